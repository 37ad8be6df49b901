// What the machine can do, measured.
#pragma once

#include <cstddef>

#include "core/context.h"

namespace ropeway {

// A loop over memory: `streams` places at once (1, 2 or 4), asking for lines `ahead` bytes before they are read
// (0: not at all, the processor guesses). Which one is fastest differs from machine to machine.
struct ReadLoop {
  int streams;
  int ahead;
};

// Reads `bytes` of memory once on all threads (a multiple of 64, aligned to 64); returns a digest of it, so that no
// compiler can leave the reading out. The loop does not change the digest. Throws std::invalid_argument for a number of
// streams that it does not know.
std::uint64_t read_memory(Context& context, const void* memory, std::size_t bytes, ReadLoop loop);

// Asks the operating system to back memory with large pages; a hint, nothing happens where it cannot.
void advise_large_pages(void* memory, std::size_t bytes);

}  // namespace ropeway
