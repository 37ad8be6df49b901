// A pool of threads that claim the tiles of one job at a time from an atomic counter.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "core/context.h"

namespace ropeway {

// Idle workers spin for some tens of microseconds (the next kernel of a forward pass comes that soon), then sleep.
//
// Nobody waits for a worker that has not claimed a tile: when another process holds its core, the others do its
// share. So a worker may arrive late, when the job it was woken for is over. `claim_` guards against that: it
// holds the job's number and the tiles not yet claimed in one word, and a tile is claimed by compare-and-swap. Its
// success proves that the job was alive since the word was loaded, hence that the job's fields, read in between,
// are the right ones.
class Pool {
 public:
  // Throws std::system_error when the system gives no more threads.
  explicit Pool(int threads);
  ~Pool();

  void run(std::int64_t tiles, TileFunction function, void* job);

 private:
  void stop();
  void work_loop(int worker);
  void claim_tiles(int worker);

  std::atomic<std::uint64_t> claim_{0};  // job number << 32 | tiles not yet claimed
  std::atomic<TileFunction> function_{nullptr};
  std::atomic<void*> job_{nullptr};
  std::atomic<std::uint32_t> tiles_{0};

  alignas(64) std::atomic<std::uint32_t> unfinished_{0};  // tiles not yet computed
  std::atomic<bool> caller_sleeps_{false};

  alignas(64) std::atomic<std::uint32_t> bell_{0};  // rung once per job; what sleeping workers wait on
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> workers_;
};

}  // namespace ropeway
