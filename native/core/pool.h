// A pool of threads that share out the tiles of one job at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "core/context.h"

namespace ropeway {

// A job's tiles are dealt out to the threads as contiguous ranges. A thread takes those of its own range from the
// front, so that what it reads follows on what it has read; then it takes from the end of the others' ranges.
//
// Idle workers spin for some tens of microseconds (the next kernel of a forward pass comes that soon), then sleep.
//
// Nobody waits for a worker that has not claimed a tile: when another process holds its core, the others do its
// share. So a worker may arrive late, when the job it was woken for is over. The ranges guard against that: each
// holds the job's number and what is left of it in one word, and tiles are claimed by compare-and-swap. Its success
// proves that the job was alive since the word was loaded, hence that the job's fields, read in between, are the
// right ones.
class Pool {
 public:
  // Throws std::system_error when the system gives no more threads.
  explicit Pool(int threads);
  ~Pool();

  void run(std::int64_t tiles, TileFunction function, void* job);

 private:
  struct alignas(64) Range {
    std::atomic<std::uint64_t> left{0};  // job number << 32 | end << 16 | begin, in claims from the range's first
  };

  void stop();
  void work_loop(int worker);
  void claim_tiles(int worker);
  // Computes one claim of a range; false if none is left.
  bool claim_from(int owner, int worker);
  std::uint32_t first_claim(std::uint32_t claims, int owner) const;

  int threads_;
  std::unique_ptr<Range[]> ranges_;
  std::uint32_t number_ = 0;  // of the job; the caller's

  std::atomic<TileFunction> function_{nullptr};
  std::atomic<void*> job_{nullptr};
  std::atomic<std::int64_t> tiles_{0};
  std::atomic<std::int64_t> tiles_per_claim_{0};
  std::atomic<std::uint32_t> claims_{0};

  alignas(64) std::atomic<std::uint32_t> unfinished_{0};  // claims not yet computed
  std::atomic<bool> caller_sleeps_{false};

  alignas(64) std::atomic<std::uint32_t> bell_{0};  // rung once per job; what sleeping workers wait on
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> workers_;
};

}  // namespace ropeway
