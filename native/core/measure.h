// What the machine can do, measured.
#pragma once

#include <cstddef>

#include "core/context.h"

namespace ropeway {

// Reads `bytes` of memory once on all threads (a multiple of 64, aligned to 64); returns a digest of it, so that no
// compiler can leave the reading out.
std::uint64_t read_memory(Context& context, const void* memory, std::size_t bytes);

// Asks the operating system to back memory with large pages; a hint, nothing happens where it cannot.
void advise_large_pages(void* memory, std::size_t bytes);

}  // namespace ropeway
