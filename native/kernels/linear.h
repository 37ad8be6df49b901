// Rows times packed weights.
#pragma once

#include "core/context.h"
#include "core/packed.h"

namespace ropeway {

struct Linear {
  const float* x;     // [rows, k]
  const float* bias;  // [n] or nullptr
  float* out;         // [rows, n]
  std::int64_t rows;
};

struct LinearKernels {
  void (*linear)(Context& context, const PackedMatrix& weight, const Linear& args);
};

ROPEWAY_DECLARE_TABLE(LinearKernels, linear_kernels)

}  // namespace ropeway
