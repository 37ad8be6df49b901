// What sampling one row needs: its random number and a worker's memory.
#pragma once

#include "core/context.h"
#include "kernels/selection.h"

namespace ropeway::ROPEWAY_ISA {

inline constexpr std::int64_t kBlock = 256;  // ids whose weights are summed together before a draw

inline std::int64_t round_up(std::int64_t n, std::int64_t step) { return (n + step - 1) / step * step; }

// The first word of Philox4x32-10, as a number in [0, 1) with 24 bits (Salmon et al., "Parallel random numbers: as
// easy as 1, 2, 3", SC 2011); the same as `philox_uniform` in devices/base.py.
inline float philox_uniform(std::uint64_t seed, std::uint64_t counter) {
  auto c0 = static_cast<std::uint32_t>(counter), c1 = static_cast<std::uint32_t>(counter >> 32);
  auto k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
  std::uint32_t c2 = 0, c3 = 0;
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{c0} * 0xD2511F53, p1 = std::uint64_t{c2} * 0xCD9E8D57;
    c0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<std::uint32_t>(p1);
    c2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<std::uint32_t>(p0);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return static_cast<float>(c0 >> 8) * 0x1p-24F;
}

// A worker's memory. Arrays over the vocabulary are padded to whole lanes: values with -infinity, weights with 0.
struct Scratch {
  float* values;          // [padded]: logits after penalties and biases
  float* weights;         // [padded]: e^((value - peak) / temperature)
  float* kept;            // [padded]: weights after top-k, top-p and min-p
  std::int32_t* counts;   // [padded], the same memory as `kept`
  double* sums;           // [padded / kBlock + 1]
  Candidate* candidates;  // [padded + 16]

  static std::size_t bytes(std::int64_t padded) {
    return static_cast<std::size_t>(padded) * (3 * sizeof(float) + sizeof(Candidate)) + 16 * sizeof(Candidate) +
           static_cast<std::size_t>(round_up(padded / kBlock + 1, 8)) * sizeof(double);
  }
  Scratch(std::byte* memory, std::int64_t padded)
      : values(reinterpret_cast<float*>(memory)),
        weights(values + padded),
        kept(weights + padded),
        counts(reinterpret_cast<std::int32_t*>(kept)),
        sums(reinterpret_cast<double*>(kept + padded)),
        candidates(reinterpret_cast<Candidate*>(sums + round_up(padded / kBlock + 1, 8))) {}
};

}  // namespace ropeway::ROPEWAY_ISA
