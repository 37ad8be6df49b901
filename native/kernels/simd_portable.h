// Sixteen lanes in four 128-bit vectors of the compiler (GCC and Clang), which map to SSE2, NEON, ... or to scalars.
#pragma once

#include <cstdint>
#include <cstring>

namespace ropeway::ROPEWAY_ISA {

inline constexpr int kVectorRegisters = 4;

using f32x4 = float __attribute__((vector_size(16)));
using i32x4 = std::int32_t __attribute__((vector_size(16)));
using u32x4 = std::uint32_t __attribute__((vector_size(16)));

struct f32x16 {
  f32x4 v[4];
};
struct i32x16 {
  i32x4 v[4];
};

inline f32x16 set_f32(float x) {
  const f32x4 v = {x, x, x, x};
  return {{v, v, v, v}};
}
inline f32x16 zero_f32() { return set_f32(0.0F); }
inline f32x16 load_f32(const float* p) {
  f32x16 a;
  std::memcpy(&a, p, sizeof a);
  return a;
}
inline void store_f32(float* p, f32x16 a) { std::memcpy(p, &a, sizeof a); }
// The first `count` lanes, 0 <= count <= 16; the others read as 0.
inline f32x16 load_f32(const float* p, int count) {
  f32x16 a = zero_f32();
  std::memcpy(&a, p, sizeof(float) * static_cast<std::size_t>(count));
  return a;
}
inline void store_f32(float* p, f32x16 a, int count) {
  std::memcpy(p, &a, sizeof(float) * static_cast<std::size_t>(count));
}

inline f32x16 add(f32x16 a, f32x16 b) {
  for (int i = 0; i < 4; ++i) a.v[i] += b.v[i];
  return a;
}
inline f32x16 mul(f32x16 a, f32x16 b) {
  for (int i = 0; i < 4; ++i) a.v[i] *= b.v[i];
  return a;
}
// a * b + c; rounded once where the processor can, twice elsewhere (a call of fma() per lane would take ages).
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) c.v[i][j] = __builtin_fmaf(a.v[i][j], b.v[i][j], c.v[i][j]);
#else
  for (int i = 0; i < 4; ++i) c.v[i] = a.v[i] * b.v[i] + c.v[i];
#endif
  return c;
}
// b where a lane of a is NaN.
inline f32x16 max(f32x16 a, f32x16 b) {
  for (int i = 0; i < 4; ++i) a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return a;
}
inline f32x16 min(f32x16 a, f32x16 b) {
  for (int i = 0; i < 4; ++i) a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
  return a;
}

inline i32x4 load_u16(const std::uint16_t* p) {
  using u16x4 = std::uint16_t __attribute__((vector_size(8)));
  u16x4 narrow;
  std::memcpy(&narrow, p, sizeof narrow);
  return __builtin_convertvector(narrow, i32x4);
}
// Half precision and bfloat16 in memory, widened exactly.
inline f32x16 load_f16(const std::uint16_t* p) {
  // Shift exponent and mantissa into place and multiply by 2^112, which fixes the exponent's bias and normalises
  // denormals, exactly; infinities and NaNs (exponent 31) get all exponent bits set instead.
  const f32x4 rebias = {0x1p112F, 0x1p112F, 0x1p112F, 0x1p112F};
  f32x16 a;
  for (int i = 0; i < 4; ++i) {
    const i32x4 h = load_u16(p + 4 * i);
    const i32x4 magnitude = (h & 0x7FFF) << 13;
    const i32x4 finite = reinterpret_cast<i32x4>(reinterpret_cast<f32x4>(magnitude) * rebias);
    const i32x4 special = magnitude | 0x7F800000;
    const i32x4 is_special = magnitude >= (31 << 23);
    a.v[i] = reinterpret_cast<f32x4>((h & 0x8000) << 16 | (is_special & special) | (~is_special & finite));
  }
  return a;
}
inline f32x16 load_bf16(const std::uint16_t* p) {
  f32x16 a;
  for (int i = 0; i < 4; ++i) {
    const i32x4 h = load_u16(p + 4 * i);
    a.v[i] = reinterpret_cast<f32x4>(h << 16);
  }
  return a;
}

inline i32x16 set_i32(std::int32_t x) {
  const i32x4 v = {x, x, x, x};
  return {{v, v, v, v}};
}
inline f32x16 to_f32(i32x16 a) {
  f32x16 b;
  for (int i = 0; i < 4; ++i) b.v[i] = __builtin_convertvector(a.v[i], f32x4);
  return b;
}
// To the nearest integer, ties to even; |a| < 2^22: adding 1.5 * 2^23 leaves the integer in the low mantissa bits.
inline i32x16 to_i32(f32x16 a) {
  const f32x4 magic = {0x1.8p23F, 0x1.8p23F, 0x1.8p23F, 0x1.8p23F};
  i32x16 b;
  for (int i = 0; i < 4; ++i) b.v[i] = reinterpret_cast<i32x4>(a.v[i] + magic) - reinterpret_cast<i32x4>(magic);
  return b;
}
inline i32x16 max(i32x16 a, i32x16 b) {
  for (int i = 0; i < 4; ++i) a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return a;
}
inline std::int32_t reduce_max(i32x16 a) {
  std::int32_t most = a.v[0][0];
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) most = a.v[i][j] > most ? a.v[i][j] : most;
  return most;
}
inline std::int32_t reduce_add(i32x16 a) {
  const i32x4 four = (a.v[0] + a.v[1]) + (a.v[2] + a.v[3]);
  return (four[0] + four[1]) + (four[2] + four[3]);
}
// The bits of |a|: ordered like |a|, with NaN above infinity.
inline i32x16 abs_bits(f32x16 a) {
  i32x16 b;
  for (int i = 0; i < 4; ++i) b.v[i] = reinterpret_cast<i32x4>(a.v[i]) & 0x7FFFFFFF;
  return b;
}

}  // namespace ropeway::ROPEWAY_ISA

#include "kernels/simd_four.h"
