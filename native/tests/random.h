// Random values that are the same on every platform, which std's distributions are not.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

namespace ropeway::tests {

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}

  std::uint64_t bits() { return engine_(); }
  // In [low, high].
  std::int64_t integer(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(high - low + 1));
  }
  // In [0, 1).
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  bool chance(double probability) { return uniform() < probability; }
  // About normal: a sum of four uniform numbers.
  float normal() {
    return static_cast<float>((uniform() + uniform() + uniform() + uniform() - 2.0) * 1.7320508);
  }
  template <class T>
  const T& pick(const std::vector<T>& choices) {
    return choices[static_cast<std::size_t>(integer(0, static_cast<std::int64_t>(choices.size()) - 1))];
  }
  template <class T>
  void shuffle(std::vector<T>& items) {
    for (std::size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[bits() % i]);
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace ropeway::tests
