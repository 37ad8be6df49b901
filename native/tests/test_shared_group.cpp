// Collectives through shared memory. The ranks are threads here; what they share is the same.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/shared_group.h"
#include "random.h"

namespace ropeway::tests {
namespace {

// Zeroed, as a fresh mapping is, and aligned to lines.
struct Memory {
  explicit Memory(int size)
      : bytes(SharedGroup::bytes(size)),
        data(static_cast<std::byte*>(::operator new(bytes, std::align_val_t{64}))) {
    std::memset(data, 0, bytes);
  }
  ~Memory() { ::operator delete(data, std::align_val_t{64}); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::size_t bytes;
  std::byte* data;
};

template <class Work>
void on_ranks(int size, const Memory& memory, const Work& work) {
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      SharedGroup group(memory.data, rank, size);
      work(group, rank);
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

float element(int rank, std::int64_t i) {
  const float steps[] = {1.0F, 3e-5F, -7e4F, 0.25F};
  return steps[rank % 4] * static_cast<float>(i % 1013 + rank);
}

TEST_CASE("every rank gets the sum in rank order, for any number of elements") {
  const std::int64_t slot = SharedGroup::kSlotBytes / sizeof(float);
  for (int size = 1; size <= 4; ++size) {
    CAPTURE(size);
    const Memory memory(size);
    on_ranks(size, memory, [&](SharedGroup& group, int rank) {
      int wrong = 0;
      for (const std::int64_t count : {std::int64_t{0}, std::int64_t{1}, std::int64_t{17}, slot - 1, slot, slot + 1,
                                       2 * slot, 3 * slot + 5, std::int64_t{3}}) {
        std::vector<float> x(static_cast<std::size_t>(count));
        for (std::int64_t i = 0; i < count; ++i) x[static_cast<std::size_t>(i)] = element(rank, i);
        group.all_reduce(x.data(), count);
        for (std::int64_t i = 0; i < count; ++i) {
          float sum = element(0, i);
          for (int other = 1; other < size; ++other) sum += element(other, i);
          wrong += x[static_cast<std::size_t>(i)] != sum;
        }
      }
      CHECK(wrong == 0);
    });
  }
}

TEST_CASE("thousands of small collectives of all kinds, by ranks that come when they like") {
  const int size = 3;
  const Memory memory(size);
  on_ranks(size, memory, [&](SharedGroup& group, int rank) {
    Random random(static_cast<std::uint64_t>(rank));
    int wrong = 0;
    for (int round = 0; round < 2000; ++round) {
      if (random.chance(0.01)) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // others fall asleep
      const std::int64_t count = 1 + round % 40;
      std::vector<float> x(static_cast<std::size_t>(count), static_cast<float>(rank + round));
      std::vector<float> gathered(static_cast<std::size_t>(count * size));
      switch (round % 3) {
        case 0:
          group.all_reduce(x.data(), count);
          wrong += std::count(x.begin(), x.end(), static_cast<float>(3 * round + 3)) != count;
          break;
        case 1:
          group.all_gather(reinterpret_cast<const std::byte*>(x.data()), 4 * count,
                           reinterpret_cast<std::byte*>(gathered.data()));
          for (std::int64_t i = 0; i < count * size; ++i)
            wrong += gathered[static_cast<std::size_t>(i)] != static_cast<float>(i / count + round);
          break;
        default:
          group.broadcast(reinterpret_cast<std::byte*>(x.data()), 4 * count);
          wrong += std::count(x.begin(), x.end(), static_cast<float>(round)) != count;
      }
    }
    CHECK(wrong == 0);
  });
}

TEST_CASE("a failure reaches who waits, and who comes later") {
  const Memory memory(2);
  SharedGroup first(memory.data, 0, 2), second(memory.data, 1, 2);
  float x = 1.0F;
  std::thread failing([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    second.fail();
  });
  CHECK_THROWS_AS(first.all_reduce(&x, 1), std::runtime_error);
  failing.join();
  CHECK_THROWS_AS(first.all_reduce(&x, 1), std::runtime_error);
}

TEST_CASE("ranks are numbered from 0 and below their count") {
  const Memory memory(2);
  CHECK_THROWS_AS(SharedGroup(memory.data, 2, 2), std::invalid_argument);
  CHECK_THROWS_AS(SharedGroup(memory.data, -1, 2), std::invalid_argument);
  CHECK_THROWS_AS(SharedGroup(memory.data, 0, SharedGroup::kMostRanks + 1), std::invalid_argument);
}

}  // namespace
}  // namespace ropeway::tests
