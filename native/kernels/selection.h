// Selecting and sorting candidates, without the standard library's templates (see README.md).
#pragma once

#include <cstdint>

namespace ropeway::ROPEWAY_ISA {

struct Candidate {
  float value;
  std::int32_t id;
};

// The likelier first; of equals, the lower id. A strict total order, since ids differ.
struct ByRank {
  bool operator()(Candidate a, Candidate b) const { return a.value > b.value || (a.value == b.value && a.id < b.id); }
};

struct ById {
  bool operator()(Candidate a, Candidate b) const { return a.id < b.id; }
};

inline void exchange(Candidate& a, Candidate& b) {
  const Candidate c = a;
  a = b;
  b = c;
}

// Heapsort: no recursion, no bad case.
template <class Before>
void sort_candidates(Candidate* c, std::int64_t n, Before before) {
  const auto sift = [&](std::int64_t parent, std::int64_t end) {
    const Candidate moving = c[parent];
    for (std::int64_t child; (child = 2 * parent + 1) < end; parent = child) {
      if (child + 1 < end && before(c[child], c[child + 1])) ++child;
      if (!before(moving, c[child])) break;
      c[parent] = c[child];
    }
    c[parent] = moving;
  };
  for (std::int64_t i = n / 2; i-- > 0;) sift(i, n);
  for (std::int64_t end = n; --end > 0;) {
    exchange(c[0], c[end]);
    sift(0, end);
  }
}

// Moves the k candidates of highest rank to the front, in no order (Hoare, "Algorithm 65: Find", 1961; the pivot is
// the median of three).
inline void select_candidates(Candidate* c, std::int64_t n, std::int64_t k) {
  const ByRank before;
  std::int64_t low = 0, high = n - 1;
  while (low < high && k < n) {
    const std::int64_t middle = low + (high - low) / 2;
    if (before(c[middle], c[low])) exchange(c[middle], c[low]);
    if (before(c[high], c[low])) exchange(c[high], c[low]);
    if (before(c[high], c[middle])) exchange(c[high], c[middle]);
    const Candidate pivot = c[middle];
    std::int64_t i = low, j = high;
    while (i <= j) {
      while (before(c[i], pivot)) ++i;
      while (before(pivot, c[j])) --j;
      if (i <= j) exchange(c[i++], c[j--]);
    }
    // [low, j] come before the pivot or equal it, [i, high] after; between them lies at most the pivot itself
    if (k <= j) {
      high = j;
    } else if (k >= i) {
      low = i;
    } else {
      return;
    }
  }
}

// How many candidates, taken by rank, it takes for their weights to reach `target`: at least one if there is one, at most n. They are
// moved to the front, in no order. Halves what is in question until it is small, so it costs O(n).
inline std::int64_t select_mass(Candidate* c, std::int64_t n, const float* weights, double target) {
  std::int64_t begin = 0, end = n;
  double kept = 0.0;  // of [0, begin)
  while (end - begin > 32) {
    const std::int64_t half = (end - begin) / 2;
    select_candidates(c + begin, end - begin, half);
    double mass = 0.0;
    for (std::int64_t i = begin; i < begin + half; ++i) mass += static_cast<double>(weights[c[i].id]);
    if (kept + mass >= target) {
      end = begin + half;
    } else {
      kept += mass;
      begin += half;
    }
  }
  sort_candidates(c + begin, end - begin, ByRank());
  while (begin < end && (begin == 0 || kept < target)) kept += static_cast<double>(weights[c[begin++].id]);
  return begin;
}

}  // namespace ropeway::ROPEWAY_ISA
