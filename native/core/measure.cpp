#include "core/measure.h"

#include <algorithm>
#include <atomic>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace ropeway {

std::uint64_t read_memory(Context& context, const void* memory, std::size_t bytes) {
  constexpr std::size_t tile_words = (512 << 10) / sizeof(std::uint64_t);
  struct Job {
    const std::uint64_t* words;
    std::size_t count;
    std::atomic<std::uint64_t> digest{0};
  } job{static_cast<const std::uint64_t*>(memory), bytes / sizeof(std::uint64_t)};
  context.run(
      static_cast<std::int64_t>((job.count + tile_words - 1) / tile_words),
      [](void* argument, std::int64_t tile, int) {
        Job& job = *static_cast<Job*>(argument);
        const std::size_t begin = static_cast<std::size_t>(tile) * tile_words;
        const std::size_t end = std::min(begin + tile_words, job.count);
        // Eight independent chains: the loop waits for memory, not for an addition.
        std::uint64_t digest[8] = {};
        for (std::size_t i = begin; i + 8 <= end; i += 8) {
          __builtin_prefetch(job.words + i + 256);
          for (std::size_t j = 0; j < 8; ++j) digest[j] ^= job.words[i + j];
        }
        for (const std::uint64_t part : digest) job.digest.fetch_xor(part, std::memory_order_relaxed);
      },
      &job);
  return job.digest.load();
}

void advise_large_pages([[maybe_unused]] void* memory, [[maybe_unused]] std::size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr std::uintptr_t page = 4096;
  const auto begin = (reinterpret_cast<std::uintptr_t>(memory) + page - 1) / page * page;
  const auto end = (reinterpret_cast<std::uintptr_t>(memory) + bytes) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace ropeway
