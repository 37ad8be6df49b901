#include "core/pool.h"

#include <algorithm>
#include <limits>

#include "core/float_mode.h"

namespace ropeway {
namespace {

constexpr std::uint64_t remaining_mask = 0xFFFFFFFF;
constexpr int spins = 2000;  // a pause takes 10 to 60 ns: some tens of microseconds

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#endif
}

}  // namespace

Pool::Pool(int threads) {
  workers_.reserve(std::max(threads - 1, 0));
  try {
    for (int worker = 1; worker < threads; ++worker) workers_.emplace_back([this, worker] { work_loop(worker); });
  } catch (...) {  // the system gives no more threads
    stop();
    throw;
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  stop_ = true;
  ++bell_;
  bell_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Pool::run(std::int64_t tiles, TileFunction function, void* job) {
  // Job numbers and tile counts share a word; no kernel comes near this many tiles, but a loop costs nothing.
  constexpr std::int64_t most = std::numeric_limits<std::uint32_t>::max();
  if (workers_.empty() || tiles <= 1 || tiles > most) {
    for (std::int64_t tile = 0; tile < tiles; ++tile) function(job, tile, 0);
    return;
  }
  function_.store(function, std::memory_order_relaxed);
  job_.store(job, std::memory_order_relaxed);
  tiles_.store(static_cast<std::uint32_t>(tiles), std::memory_order_relaxed);
  unfinished_.store(static_cast<std::uint32_t>(tiles), std::memory_order_relaxed);
  const std::uint64_t number = (claim_.load(std::memory_order_relaxed) >> 32) + 1;
  claim_.store(number << 32 | static_cast<std::uint64_t>(tiles), std::memory_order_release);
  // Sequentially consistent with `work_loop`: either we see the sleeper, or it sees the bell.
  bell_.fetch_add(1);
  if (sleepers_.load() > 0) bell_.notify_all();

  claim_tiles(0);
  for (int i = 0; i < spins; ++i) {
    if (unfinished_.load(std::memory_order_acquire) == 0) return;
    pause();
  }
  caller_sleeps_ = true;
  while (const std::uint32_t left = unfinished_.load()) unfinished_.wait(left);
  caller_sleeps_ = false;
}

void Pool::claim_tiles(int worker) {
  std::uint32_t done = 0;
  std::uint64_t claim = claim_.load(std::memory_order_acquire);
  while (const auto remaining = static_cast<std::uint32_t>(claim & remaining_mask)) {
    const TileFunction function = function_.load(std::memory_order_relaxed);
    void* const job = job_.load(std::memory_order_relaxed);
    const std::uint32_t tiles = tiles_.load(std::memory_order_relaxed);
    if (!claim_.compare_exchange_weak(claim, claim - 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
    function(job, tiles - remaining, worker);
    ++done;
    claim = claim_.load(std::memory_order_acquire);
  }
  if (done == 0) return;
  if (unfinished_.fetch_sub(done) == done && caller_sleeps_) unfinished_.notify_one();
}

void Pool::work_loop(int worker) {
  set_default_float_mode();
  std::uint32_t seen = 0;
  while (true) {
    for (int i = 0; i < spins && bell_.load(std::memory_order_acquire) == seen; ++i) pause();
    sleepers_.fetch_add(1);
    while (bell_.load() == seen) bell_.wait(seen);
    sleepers_.fetch_sub(1);
    if (stop_) return;
    seen = bell_.load();
    claim_tiles(worker);
  }
}

}  // namespace ropeway
