// Norms, rotary embedding and gated activation. Everything float32 and contiguous.
#pragma once

#include "core/context.h"

namespace ropeway {

struct RmsNorm {
  const float* x;         // [rows, size]
  const float* residual;  // [rows, size], added to x first; or null
  const float* weight;    // [size]
  float* out;             // [rows, size]
  float* sum;             // [rows, size]: x + residual; null where there is no residual
  std::int64_t rows, size;
  float eps;
};

struct Rope {
  const float* x;                 // [tokens, heads, size]
  const std::int32_t* positions;  // [tokens]
  const float* table;             // [positions, 2, rotated / 2]: cosines, then sines
  float* out;                     // [tokens, heads, size]
  std::int64_t tokens, heads, size, rotated;
};

struct SiluAndMul {
  const float* gate;  // [count]
  const float* up;    // [count]
  float* out;         // [count]
  std::int64_t count;
};

struct ElementwiseKernels {
  void (*rms_norm)(Context& context, const RmsNorm& args);
  void (*rope)(Context& context, const Rope& args);
  void (*silu_and_mul)(Context& context, const SiluAndMul& args);
};

ROPEWAY_DECLARE_TABLE(ElementwiseKernels, elementwise_kernels)

}  // namespace ropeway
