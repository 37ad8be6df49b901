// The pool: every tile once, whatever the threads do, and one floating-point mode for all of them.
#include <doctest/doctest.h>

#include <atomic>
#include <cfenv>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "core/measure.h"
#include "core/pool.h"
#include "machine.h"
#include "random.h"

namespace ropeway::tests {
namespace {

struct Job {
  explicit Job(std::int64_t tiles) : visits(static_cast<std::size_t>(tiles)) {}
  std::vector<std::int32_t> visits;  // not atomic: a tile belongs to one thread, and the caller comes after all
  std::atomic<int> most_worker{0};
  int work = 0;

  static void visit(void* argument, std::int64_t tile, int worker) {
    Job& job = *static_cast<Job*>(argument);
    volatile float sink = 0.0F;
    for (int i = 0; i < job.work; ++i) sink = sink + static_cast<float>(i);
    ++job.visits[static_cast<std::size_t>(tile)];
    int most = job.most_worker.load();
    while (worker > most && !job.most_worker.compare_exchange_weak(most, worker)) {
    }
  }

  std::int64_t wrong() const {
    std::int64_t count = 0;
    for (const std::int32_t visited : visits) count += visited != 1;
    return count;
  }
};

TEST_CASE("every tile is computed once, by a worker that the context has") {
  for (int threads = 1; threads <= 4; ++threads) {
    CAPTURE(threads);
    Pool pool(threads);
    for_seeds(3000, [&](std::uint64_t seed) {
      Random random(seed);
      Job job(random.chance(0.1) ? random.integer(0, 2000) : random.integer(0, 9));
      job.work = static_cast<int>(random.integer(0, 300));
      pool.run(static_cast<std::int64_t>(job.visits.size()), &Job::visit, &job);
      CHECK(job.wrong() == 0);
      CHECK(job.most_worker < threads);
      if (seed % 500 == 499) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // workers fall asleep
    });
  }
}

TEST_CASE("a pool that never worked, and one just used, can be destroyed") {
  for (int threads = 1; threads <= 4; ++threads) {
    for (int uses = 0; uses < 3; ++uses) {
      Pool pool(threads);
      for (int i = 0; i < uses; ++i) {
        Job job(7);
        pool.run(7, &Job::visit, &job);
        CHECK(job.wrong() == 0);
      }
    }
  }
}

TEST_CASE("callers of one context take turns") {
  Context shared(3, Isa::portable);
  std::vector<std::thread> callers;
  std::atomic<std::int64_t> wrong{0};
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&, caller] {
      for (int i = 0; i < 200; ++i) {
        Job job(1 + (i + caller) % 13);
        const Call call(shared);
        std::byte* const memory = shared.scratch(static_cast<std::size_t>(64 * (1 + i)));
        memory[64 * i] = static_cast<std::byte>(caller);
        shared.run(static_cast<std::int64_t>(job.visits.size()), &Job::visit, &job);
        wrong += job.wrong() + (memory[64 * i] != static_cast<std::byte>(caller));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(wrong == 0);
}

TEST_CASE("all threads round to nearest and keep denormals, whatever the caller does, and the caller's mode is kept") {
  Context used(4, Isa::portable);
  std::fesetround(FE_UPWARD);
  struct Seen {
    std::vector<float> thirds = std::vector<float>(64), tiny = std::vector<float>(64);
  } seen;
  {
    const Call call(used);
    used.run(
        64,
        [](void* argument, std::int64_t tile, int) {
          Seen& result = *static_cast<Seen*>(argument);
          volatile float one = 1.0F, three = 3.0F, small = 1e-38F, half = 0.5F;
          result.thirds[static_cast<std::size_t>(tile)] = one / three;
          result.tiny[static_cast<std::size_t>(tile)] = small * half;
        },
        &seen);
  }
  CHECK(std::fegetround() == FE_UPWARD);
  std::fesetround(FE_TONEAREST);
  for (const float third : seen.thirds) CHECK(third == 0x1.555556p-2F);
  for (const float tiny : seen.tiny) CHECK(tiny > 0.0F);
}

TEST_CASE("reading memory gives the same digest on any number of threads") {
  std::unique_ptr<std::uint64_t[]> words(new std::uint64_t[200000]);
  Random random(1);
  std::uint64_t want = 0;
  for (std::size_t i = 0; i < 200000; ++i) want ^= words[i] = random.bits();
  for (int threads = 1; threads <= 4; ++threads) {
    for (const ReadLoop loop : {ReadLoop{1, 0}, ReadLoop{4, 8}}) {
      CHECK(read_memory(context(Isa::portable, threads), words.get(), 1600000, loop) == want);
    }
  }
}

}  // namespace
}  // namespace ropeway::tests
