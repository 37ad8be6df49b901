// The RMS norm of one row, for the kernel of that name and for products that norm their inputs: the same bits.
#pragma once

#include "kernels/simd_math.h"

namespace ropeway::ROPEWAY_ISA {

// What a row [size] is to be multiplied by: 1 / sqrt(mean of squares + eps).
inline float rms_scale(const float* x, std::int64_t size, float eps) {
  f32x16 squares[4] = {zero_f32(), zero_f32(), zero_f32(), zero_f32()};
  std::int64_t i = 0;
  for (; i + 64 <= size; i += 64) {
    for (int j = 0; j < 4; ++j) {
      const f32x16 v = load_f32(x + i + 16 * j);
      squares[j] = fma(v, v, squares[j]);
    }
  }
  for_lanes(size - i, [&](std::int64_t rest, int count) {
    const f32x16 v = load_some(x + i + rest, count);
    squares[0] = fma(v, v, squares[0]);
  });
  const float total = lane_sum(add(add(squares[0], squares[1]), add(squares[2], squares[3])));
  return 1.0F / __builtin_sqrtf(total / static_cast<float>(size) + eps);
}

// out[i] = x[i] * scale * weight[i] for a row [size].
inline void rms_norm_row(const float* x, const float* weight, float eps, std::int64_t size, float* out) {
  const f32x16 scale = set_f32(rms_scale(x, size, eps));
  for_lanes(size, [&](std::int64_t i, int count) {
    store_some(out + i, mul(mul(load_some(x + i, count), scale), load_some(weight + i, count)), count);
  });
}

}  // namespace ropeway::ROPEWAY_ISA
