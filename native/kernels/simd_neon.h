// Sixteen lanes in four NEON registers of 64-bit Arm.
//
// The struct is that of simd_portable.h, four vectors that C++ operators work on, so that code written for the
// compiler's vectors serves here too; what has an instruction of its own is said with intrinsics.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace ropeway::ROPEWAY_ISA {

inline constexpr int kVectorRegisters = 8;

using f32x4 = float32x4_t;
using i32x4 = int32x4_t;
using u32x4 = uint32x4_t;

struct f32x16 {
  f32x4 v[4];
};
struct i32x16 {
  i32x4 v[4];
};

inline f32x16 set_f32(float x) {
  const f32x4 v = vdupq_n_f32(x);
  return {{v, v, v, v}};
}
inline f32x16 zero_f32() { return set_f32(0.0F); }
inline f32x16 load_f32(const float* p) {
  return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}};
}
inline void store_f32(float* p, f32x16 a) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]);
}
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
  for (int i = 0; i < 4; ++i) a.v[i] = vaddq_f32(a.v[i], b.v[i]);
  return a;
}
inline f32x16 mul(f32x16 a, f32x16 b) {
  for (int i = 0; i < 4; ++i) a.v[i] = vmulq_f32(a.v[i], b.v[i]);
  return a;
}
// a * b + c, rounded once.
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  for (int i = 0; i < 4; ++i) c.v[i] = vfmaq_f32(c.v[i], a.v[i], b.v[i]);
  return c;
}
// b where a lane of a is NaN, and where one of b is: fmax would do neither.
inline f32x16 max(f32x16 a, f32x16 b) {
  for (int i = 0; i < 4; ++i) a.v[i] = vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]);
  return a;
}
inline f32x16 min(f32x16 a, f32x16 b) {
  for (int i = 0; i < 4; ++i) a.v[i] = vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]);
  return a;
}

// Half precision and bfloat16 in memory, widened exactly.
inline f32x16 load_f16(const std::uint16_t* p) {
  f32x16 a;
  for (int i = 0; i < 4; ++i) a.v[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
  return a;
}
inline f32x16 load_bf16(const std::uint16_t* p) {
  f32x16 a;
  for (int i = 0; i < 4; ++i) a.v[i] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16));
  return a;
}

inline i32x16 set_i32(std::int32_t x) {
  const i32x4 v = vdupq_n_s32(x);
  return {{v, v, v, v}};
}
inline f32x16 to_f32(i32x16 a) {
  f32x16 b;
  for (int i = 0; i < 4; ++i) b.v[i] = vcvtq_f32_s32(a.v[i]);
  return b;
}
// To the nearest integer, ties to even; lanes within the range of int32.
inline i32x16 to_i32(f32x16 a) {
  i32x16 b;
  for (int i = 0; i < 4; ++i) b.v[i] = vcvtnq_s32_f32(a.v[i]);
  return b;
}
inline i32x16 max(i32x16 a, i32x16 b) {
  for (int i = 0; i < 4; ++i) a.v[i] = vmaxq_s32(a.v[i], b.v[i]);
  return a;
}
inline std::int32_t reduce_max(i32x16 a) {
  return vmaxvq_s32(vmaxq_s32(vmaxq_s32(a.v[0], a.v[1]), vmaxq_s32(a.v[2], a.v[3])));
}
inline std::int32_t reduce_add(i32x16 a) {
  return vaddvq_s32(vaddq_s32(vaddq_s32(a.v[0], a.v[1]), vaddq_s32(a.v[2], a.v[3])));
}
// The bits of |a|: ordered like |a|, with NaN above infinity.
inline i32x16 abs_bits(f32x16 a) {
  i32x16 b;
  for (int i = 0; i < 4; ++i) b.v[i] = vreinterpretq_s32_f32(vabsq_f32(a.v[i]));
  return b;
}

}  // namespace ropeway::ROPEWAY_ISA

#include "kernels/simd_four.h"
