// Rows times packed weights.
#pragma once

#include "core/context.h"
#include "core/packed.h"

namespace ropeway {

// One matrix of a product whose inputs it shares with others: q, k and v of an attention, gate and up of an MLP.
struct LinearPart {
  const PackedMatrix* weight;  // [n, k]; k is the same for all parts
  const float* bias;           // [n] or nullptr
  float* out;                  // [rows, n]
};

inline constexpr int kMostLinearParts = 3;

// Inputs are prepared once for all parts, and one run of the threads computes all of them. Results have the bits that
// the kernels would give one after the other: rms_norm, a linear per part, then silu_and_mul or the residual's addition.
struct Linear {
  const float* x;  // [rows, k]
  std::int64_t rows;
  const LinearPart* parts;
  int part_count;            // 1 to kMostLinearParts
  const float* residual;     // [rows, n] or nullptr, added at the end; one part; `out` may be the same memory
  bool gated;                // two parts of the same n: parts[0].out = silu(first) * second; parts[1].out is not used
  const float* norm_weight;  // [k] or nullptr; else rows of x are RMS-normed as the inputs are prepared
  float norm_eps;
};

struct LinearKernels {
  void (*linear)(Context& context, const Linear& args);
};

ROPEWAY_DECLARE_TABLE(LinearKernels, linear_kernels)

}  // namespace ropeway
