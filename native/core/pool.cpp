#include "core/pool.h"

#include <algorithm>

#include "core/float_mode.h"
#include "core/pause.h"

namespace ropeway {
namespace {

constexpr std::uint64_t most_claims = 0xFFFF;  // of a range
constexpr int spins = 2000;  // a pause takes 10 to 60 ns: some tens of microseconds

}  // namespace

Pool::Pool(int threads) : threads_(std::max(threads, 1)), ranges_(new Range[static_cast<std::size_t>(threads_)]) {
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

std::uint32_t Pool::first_claim(std::uint32_t claims, int owner) const {
  return static_cast<std::uint32_t>(std::uint64_t{claims} * static_cast<std::uint64_t>(owner) /
                                    static_cast<std::uint64_t>(threads_));
}

void Pool::run(std::int64_t tiles, TileFunction function, void* job) {
  if (workers_.empty() || tiles <= 1) {
    for (std::int64_t tile = 0; tile < tiles; ++tile) function(job, tile, 0);
    return;
  }
  // One tile a claim, unless that makes more claims than a range's word can count.
  const std::int64_t most = static_cast<std::int64_t>(most_claims) * threads_;
  const std::int64_t tiles_per_claim = (tiles + most - 1) / most;
  const auto claims = static_cast<std::uint32_t>((tiles + tiles_per_claim - 1) / tiles_per_claim);
  function_.store(function, std::memory_order_relaxed);
  job_.store(job, std::memory_order_relaxed);
  tiles_.store(tiles, std::memory_order_relaxed);
  tiles_per_claim_.store(tiles_per_claim, std::memory_order_relaxed);
  claims_.store(claims, std::memory_order_relaxed);
  unfinished_.store(claims, std::memory_order_relaxed);
  ++number_;
  for (int owner = 0; owner < threads_; ++owner) {
    const std::uint64_t size = first_claim(claims, owner + 1) - first_claim(claims, owner);
    ranges_[owner].left.store(std::uint64_t{number_} << 32 | size << 16, std::memory_order_release);
  }
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

bool Pool::claim_from(int owner, int worker) {
  std::atomic<std::uint64_t>& range = ranges_[owner].left;
  std::uint64_t left = range.load(std::memory_order_acquire);
  while (true) {
    const std::uint64_t begin = left & most_claims, end = left >> 16 & most_claims;
    if (begin == end) return false;
    const TileFunction function = function_.load(std::memory_order_relaxed);
    void* const job = job_.load(std::memory_order_relaxed);
    const std::int64_t tiles = tiles_.load(std::memory_order_relaxed);
    const std::int64_t tiles_per_claim = tiles_per_claim_.load(std::memory_order_relaxed);
    const std::uint32_t claims = claims_.load(std::memory_order_relaxed);
    const bool own = owner == worker;
    const std::uint64_t rest = own ? left + 1 : left - (std::uint64_t{1} << 16);
    if (!range.compare_exchange_weak(left, rest, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
    const auto claim = static_cast<std::int64_t>(first_claim(claims, owner) + (own ? begin : end - 1));
    const std::int64_t last = std::min((claim + 1) * tiles_per_claim, tiles);
    for (std::int64_t tile = claim * tiles_per_claim; tile < last; ++tile) function(job, tile, worker);
    return true;
  }
}

void Pool::claim_tiles(int worker) {
  std::uint32_t done = 0;
  for (int i = 0; i < threads_; ++i) {
    while (claim_from((worker + i) % threads_, worker)) ++done;
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
