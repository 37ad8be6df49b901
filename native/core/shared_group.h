// Collectives between the processes of one host, through memory that all of them have mapped.
//
//   | head: a line per rank | slots of rank 0: even, odd | slots of rank 1: even, odd | ...
//
// A collective goes chunk by chunk. For a chunk, each rank copies its part into its own slot and raises its stage;
// once all have reached that stage, everybody reads all slots. Chunks take the two slots in turns: whoever writes
// chunk c + 2 has seen everybody at stage c + 1, and so past the reading of chunk c.
//
// Every rank makes the same calls in the same order, with the same counts.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace ropeway {

class SharedGroup {
 public:
  static constexpr int kMostRanks = 64;
  static constexpr std::size_t kSlotBytes = std::size_t{128} << 10;

  // Of the memory that `size` ranks share; it holds zeros when the first of them comes.
  static std::size_t bytes(int size);

  // Throws std::invalid_argument for a rank that there is not.
  SharedGroup(std::byte* memory, int rank, int size);

  // x[i] = the sum over the ranks' x[i], added in rank order.
  void all_reduce(float* x, std::int64_t count);
  // out [size][bytes]: the ranks' x [bytes].
  void all_gather(const std::byte* x, std::int64_t bytes, std::byte* out);
  // x = rank 0's.
  void broadcast(std::byte* x, std::int64_t bytes);

  // Makes every collective that waits, or will wait, throw std::runtime_error, on all ranks. From any thread.
  void fail();

 private:
  struct alignas(64) Line {
    std::atomic<std::uint32_t> stage;     // chunks this rank has written
    std::atomic<std::uint32_t> sleepers;  // who waits for that
  };
  struct alignas(64) Head {
    std::atomic<std::uint32_t> failed;
  };

  std::byte* slot(int rank) const;
  void arrive();
  void await_all();
  void await(Line& line);

  Head* head_;
  Line* lines_;
  std::byte* slots_;
  const int rank_, size_;
  std::uint32_t stage_ = 0;
};

}  // namespace ropeway
