#include "core/shared_group.h"

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>
#endif

#include "core/pause.h"

namespace ropeway {
namespace {

static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

constexpr int spins = 1000;  // a pause takes 10 to 60 ns

// Until the word changes, or for a while: then it is looked whether a rank has failed. std::atomic's own waiting does
// not reach other processes.
void sleep_while(std::atomic<std::uint32_t>& word, std::uint32_t value) {
#if defined(__linux__)
  const timespec patience{0, 100'000'000};
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT, value, &patience, nullptr, 0);
#else
  if (word.load() == value) std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
}

void wake_all([[maybe_unused]] std::atomic<std::uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

// Stages are compared across the end of their range.
bool reached(std::uint32_t stage, std::uint32_t wanted) { return static_cast<std::int32_t>(stage - wanted) >= 0; }

}  // namespace

std::size_t SharedGroup::bytes(int size) {
  const auto ranks = static_cast<std::size_t>(size);
  return sizeof(Head) + ranks * (sizeof(Line) + 2 * kSlotBytes);
}

SharedGroup::SharedGroup(std::byte* memory, int rank, int size)
    : head_(reinterpret_cast<Head*>(memory)),
      lines_(reinterpret_cast<Line*>(memory + sizeof(Head))),
      slots_(memory + sizeof(Head) + static_cast<std::size_t>(size) * sizeof(Line)),
      rank_(rank),
      size_(size) {
  if (size < 1 || size > kMostRanks || rank < 0 || rank >= size) {
    throw std::invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(size) + ": up to " +
                                std::to_string(kMostRanks) + " ranks, numbered from 0");
  }
}

std::byte* SharedGroup::slot(int rank) const {
  return slots_ + (2 * static_cast<std::size_t>(rank) + stage_ % 2) * kSlotBytes;
}

void SharedGroup::all_reduce(float* x, std::int64_t count) {
  constexpr std::int64_t most = kSlotBytes / sizeof(float);
  for (std::int64_t begin = 0; begin < count; begin += most) {
    const std::int64_t here = std::min(most, count - begin);
    float* const part = x + begin;
    ++stage_;
    std::memcpy(slot(rank_), part, static_cast<std::size_t>(here) * sizeof(float));
    arrive();
    await_all();
    const float* first = reinterpret_cast<const float*>(slot(0));
    if (size_ == 1) continue;
    const float* second = reinterpret_cast<const float*>(slot(1));
    for (std::int64_t i = 0; i < here; ++i) part[i] = first[i] + second[i];
    for (int rank = 2; rank < size_; ++rank) {
      const float* other = reinterpret_cast<const float*>(slot(rank));
      for (std::int64_t i = 0; i < here; ++i) part[i] += other[i];
    }
  }
}

void SharedGroup::all_gather(const std::byte* x, std::int64_t bytes, std::byte* out) {
  constexpr std::int64_t most = kSlotBytes;
  for (std::int64_t begin = 0; begin < bytes; begin += most) {
    const auto here = static_cast<std::size_t>(std::min(most, bytes - begin));
    ++stage_;
    std::memcpy(slot(rank_), x + begin, here);
    arrive();
    await_all();
    for (int rank = 0; rank < size_; ++rank) std::memcpy(out + rank * bytes + begin, slot(rank), here);
  }
}

void SharedGroup::broadcast(std::byte* x, std::int64_t bytes) {
  constexpr std::int64_t most = kSlotBytes;
  for (std::int64_t begin = 0; begin < bytes; begin += most) {
    const auto here = static_cast<std::size_t>(std::min(most, bytes - begin));
    ++stage_;
    if (rank_ == 0) std::memcpy(slot(0), x + begin, here);
    arrive();
    await_all();
    if (rank_ != 0) std::memcpy(x + begin, slot(0), here);
  }
}

void SharedGroup::fail() {
  head_->failed.store(1);
  for (int rank = 0; rank < size_; ++rank) wake_all(lines_[rank].stage);
}

void SharedGroup::arrive() {
  // Sequentially consistent with `await`: either we see the sleeper, or it sees the stage.
  lines_[rank_].stage.store(stage_);
  if (lines_[rank_].sleepers.load() > 0) wake_all(lines_[rank_].stage);
}

void SharedGroup::await_all() {
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_) await(lines_[rank]);
  }
}

void SharedGroup::await(Line& line) {
  for (int i = 0; i < spins; ++i) {
    if (reached(line.stage.load(std::memory_order_acquire), stage_)) return;
    pause();
  }
  line.sleepers.fetch_add(1);
  while (true) {
    const std::uint32_t stage = line.stage.load();
    if (reached(stage, stage_)) break;
    if (head_->failed.load() != 0) {
      line.sleepers.fetch_sub(1);
      throw std::runtime_error("another rank has failed, and this one cannot go on without it");
    }
    sleep_while(line.stage, stage);
  }
  line.sleepers.fetch_sub(1);
}

}  // namespace ropeway
