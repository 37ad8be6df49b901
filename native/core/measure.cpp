#include "core/measure.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace ropeway {

namespace {

constexpr std::size_t line_words = 64 / sizeof(std::uint64_t);
constexpr std::size_t tile_words = (64 << 10) / sizeof(std::uint64_t);

// The digest of `count` words, a multiple of `line_words`; eight independent chains for each stream, so that the loop
// waits for memory, not for an operation.
template <int streams>
std::uint64_t digest_of(const std::uint64_t* words, std::size_t count, std::size_t ahead) {
  std::uint64_t digest[streams][line_words] = {};
  const std::size_t part = count / streams / line_words * line_words;
  for (std::size_t i = 0; i < part; i += line_words) {
    for (int s = 0; s < streams; ++s) {
      const std::uint64_t* const line = words + static_cast<std::size_t>(s) * part + i;
      if (ahead != 0) __builtin_prefetch(line + ahead);
      for (std::size_t j = 0; j < line_words; ++j) digest[s][j] ^= line[j];
    }
  }
  for (std::size_t i = part * streams; i < count; ++i) digest[0][i % line_words] ^= words[i];
  std::uint64_t all = 0;
  for (const auto& stream : digest)
    for (const std::uint64_t word : stream) all ^= word;
  return all;
}

}  // namespace

std::uint64_t read_memory(Context& context, const void* memory, std::size_t bytes, ReadLoop loop) {
  struct Job {
    const std::uint64_t* words;
    std::size_t count, ahead;
    std::uint64_t (*digest_of)(const std::uint64_t* words, std::size_t count, std::size_t ahead);
    std::atomic<std::uint64_t> digest{0};
  } job{static_cast<const std::uint64_t*>(memory), bytes / sizeof(std::uint64_t),
        static_cast<std::size_t>(loop.ahead) / sizeof(std::uint64_t), nullptr};
  switch (loop.streams) {
    case 1: job.digest_of = &digest_of<1>; break;
    case 2: job.digest_of = &digest_of<2>; break;
    case 4: job.digest_of = &digest_of<4>; break;
    default: throw std::invalid_argument("memory is read in 1, 2 or 4 streams, not " + std::to_string(loop.streams));
  }
  context.run(
      static_cast<std::int64_t>((job.count + tile_words - 1) / tile_words),
      [](void* argument, std::int64_t tile, int) {
        Job& job = *static_cast<Job*>(argument);
        const std::size_t begin = static_cast<std::size_t>(tile) * tile_words;
        const std::size_t count = std::min(tile_words, job.count - begin);
        job.digest.fetch_xor(job.digest_of(job.words + begin, count, job.ahead), std::memory_order_relaxed);
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
