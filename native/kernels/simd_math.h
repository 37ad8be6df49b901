// Operations on sixteen lanes beyond plain arithmetic: comparisons, reductions over the lanes, exponentials.
#pragma once

#include "kernels/simd.h"

namespace ropeway::ROPEWAY_ISA {

inline constexpr float kInfinity = __builtin_inff();

// ------------------------------------------------------------------ what each instruction set says its own way

#if defined(ROPEWAY_ISA_AVX512) || defined(ROPEWAY_ISA_AVX2)

inline float lane_sum(__m256 lo, __m256 hi) {
  const __m256 eight = _mm256_add_ps(lo, hi);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline float lane_max(__m256 lo, __m256 hi) {
  const __m256 eight = _mm256_max_ps(lo, hi);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

#endif

#if defined(ROPEWAY_ISA_AVX512)

inline f32x16 subtract(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline f32x16 divide(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
// Bit i is set where a[i] > b[i].
inline unsigned greater_mask(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
inline unsigned equal_mask(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
// a, but 0 where x < limit.
inline f32x16 zero_where_less(f32x16 a, f32x16 x, f32x16 limit) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_NLT_UQ), a.v)};
}
inline float lane_sum(f32x16 a) {
  float halves[16];
  store_f32(halves, a);
  return lane_sum(_mm256_loadu_ps(halves), _mm256_loadu_ps(halves + 8));
}
inline float lane_max(f32x16 a) {
  float halves[16];
  store_f32(halves, a);
  return lane_max(_mm256_loadu_ps(halves), _mm256_loadu_ps(halves + 8));
}
// Nearest integer, ties to even.
inline f32x16 round_even(f32x16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT)}; }
// a * 2^n for integers n in [-250, 250].
inline f32x16 scale_by_power(f32x16 a, f32x16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }

#elif defined(ROPEWAY_ISA_AVX2)

inline f32x16 subtract(f32x16 a, f32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline f32x16 divide(f32x16 a, f32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline unsigned sign_mask(__m256 lo, __m256 hi) {
  return static_cast<unsigned>(_mm256_movemask_ps(lo)) | static_cast<unsigned>(_mm256_movemask_ps(hi)) << 8;
}
// Bit i is set where a[i] > b[i].
inline unsigned greater_mask(f32x16 a, f32x16 b) {
  return sign_mask(_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ));
}
inline unsigned equal_mask(f32x16 a, f32x16 b) {
  return sign_mask(_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ));
}
// a, but 0 where x < limit.
inline f32x16 zero_where_less(f32x16 a, f32x16 x, f32x16 limit) {
  return {_mm256_and_ps(_mm256_cmp_ps(x.lo, limit.lo, _CMP_NLT_UQ), a.lo),
          _mm256_and_ps(_mm256_cmp_ps(x.hi, limit.hi, _CMP_NLT_UQ), a.hi)};
}
inline float lane_sum(f32x16 a) { return lane_sum(a.lo, a.hi); }
inline float lane_max(f32x16 a) { return lane_max(a.lo, a.hi); }
// Nearest integer, ties to even.
inline f32x16 round_even(f32x16 a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
inline __m256 power_of_two(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
inline __m256 scale_by_power(__m256 a, __m256 n) {
  const __m256i whole = _mm256_cvtps_epi32(n);
  const __m256i half = _mm256_srai_epi32(whole, 1);
  return _mm256_mul_ps(_mm256_mul_ps(a, power_of_two(half)), power_of_two(_mm256_sub_epi32(whole, half)));
}
// a * 2^n for integers n in [-250, 250]; in two steps, because 2^n itself may not be a float.
inline f32x16 scale_by_power(f32x16 a, f32x16 n) { return {scale_by_power(a.lo, n.lo), scale_by_power(a.hi, n.hi)}; }

#else

inline f32x16 subtract(f32x16 a, f32x16 b) {
  for (int i = 0; i < 4; ++i) a.v[i] -= b.v[i];
  return a;
}
inline f32x16 divide(f32x16 a, f32x16 b) {
  for (int i = 0; i < 4; ++i) a.v[i] /= b.v[i];
  return a;
}
// a, but 0 where x < limit.
inline f32x16 zero_where_less(f32x16 a, f32x16 x, f32x16 limit) {
  for (int i = 0; i < 4; ++i) {
    const i32x4 less = x.v[i] < limit.v[i];
    a.v[i] = reinterpret_cast<f32x4>(~less & reinterpret_cast<i32x4>(a.v[i]));
  }
  return a;
}
inline float lane_sum(f32x16 a) {
  const f32x4 four = (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]);
  return (four[0] + four[2]) + (four[1] + four[3]);
}
// a * 2^n for integers n in [-250, 250]; in two steps, because 2^n itself may not be a float.
inline f32x16 scale_by_power(f32x16 a, f32x16 n) {
  for (int i = 0; i < 4; ++i) {
    const i32x4 whole = __builtin_convertvector(n.v[i], i32x4);
    const i32x4 half = whole >> 1;
    a.v[i] *= reinterpret_cast<f32x4>((half + 127) << 23);
    a.v[i] *= reinterpret_cast<f32x4>((whole - half + 127) << 23);
  }
  return a;
}

#if defined(ROPEWAY_ISA_ANY_NEON)

// Bit 4 i + j from lane j of vector i, which is all ones or zeros.
inline unsigned lane_mask(uint32x4_t v0, uint32x4_t v1, uint32x4_t v2, uint32x4_t v3) {
  const uint32x4_t bits = {1, 2, 4, 8};
  uint32x4_t all = vandq_u32(v0, bits);
  all = vorrq_u32(all, vshlq_n_u32(vandq_u32(v1, bits), 4));
  all = vorrq_u32(all, vshlq_n_u32(vandq_u32(v2, bits), 8));
  return vaddvq_u32(vorrq_u32(all, vshlq_n_u32(vandq_u32(v3, bits), 12)));
}
// Bit i is set where a[i] > b[i].
inline unsigned greater_mask(f32x16 a, f32x16 b) {
  return lane_mask(vcgtq_f32(a.v[0], b.v[0]), vcgtq_f32(a.v[1], b.v[1]), vcgtq_f32(a.v[2], b.v[2]),
                   vcgtq_f32(a.v[3], b.v[3]));
}
inline unsigned equal_mask(f32x16 a, f32x16 b) {
  return lane_mask(vceqq_f32(a.v[0], b.v[0]), vceqq_f32(a.v[1], b.v[1]), vceqq_f32(a.v[2], b.v[2]),
                   vceqq_f32(a.v[3], b.v[3]));
}
// NaN only where every lane is.
inline float lane_max(f32x16 a) {
  return vmaxnmvq_f32(vmaxnmq_f32(vmaxnmq_f32(a.v[0], a.v[1]), vmaxnmq_f32(a.v[2], a.v[3])));
}
// Nearest integer, ties to even.
inline f32x16 round_even(f32x16 a) {
  for (int i = 0; i < 4; ++i) a.v[i] = vrndnq_f32(a.v[i]);
  return a;
}

#else

// Bit i is set where a[i] > b[i].
inline unsigned greater_mask(f32x16 a, f32x16 b) {
  unsigned mask = 0;
  for (int i = 0; i < 16; ++i) mask |= static_cast<unsigned>(a.v[i / 4][i % 4] > b.v[i / 4][i % 4]) << i;
  return mask;
}
inline unsigned equal_mask(f32x16 a, f32x16 b) {
  unsigned mask = 0;
  for (int i = 0; i < 16; ++i) mask |= static_cast<unsigned>(a.v[i / 4][i % 4] == b.v[i / 4][i % 4]) << i;
  return mask;
}
inline float lane_max(f32x16 a) {
  float most = a.v[0][0];
  for (int i = 1; i < 16; ++i) most = a.v[i / 4][i % 4] > most ? a.v[i / 4][i % 4] : most;
  return most;
}
// Nearest integer, ties to even; |a| < 2^22.
inline f32x16 round_even(f32x16 a) {
  const f32x16 shift = set_f32(0x1.8p23F);
  return subtract(add(a, shift), shift);
}
#endif

#endif

// ------------------------------------------------------------------ exponentials

// x within [low, high]; NaN stays NaN.
inline f32x16 clamp(f32x16 x, float low, float high) { return min(set_f32(high), max(set_f32(low), x)); }

// 2^x, relative error below 1e-7; exactly 1 at 0, +0 below -150, infinity above 128, NaN for NaN. The polynomial is
// the minimax one for (2^f - 1) / f on [-1/2, 1/2].
inline f32x16 exp2_f32(f32x16 x) {
  x = clamp(x, -160.0F, 140.0F);
  const f32x16 n = round_even(x);
  const f32x16 f = subtract(x, n);
  f32x16 p = set_f32(0x1.41fbbap-13F);
  p = fma(p, f, set_f32(0x1.5f3e58p-10F));
  p = fma(p, f, set_f32(0x1.3b2d4cp-7F));
  p = fma(p, f, set_f32(0x1.c6aee8p-5F));
  p = fma(p, f, set_f32(0x1.ebfbdcp-3F));
  p = fma(p, f, set_f32(0x1.62e430p-1F));
  return scale_by_power(fma(p, f, set_f32(1.0F)), n);
}

// 2^x for x <= 0, relative error below 3e-6; exactly 1 at 0, anything below 2^-125 where x is below -126, NaN for NaN.
// The polynomial is the minimax one for (2^f - 1) / f on [-1/2, 1/2].
inline f32x16 exp2_below_one(f32x16 x) {
  x = max(set_f32(-127.0F), x);
  const f32x16 n = round_even(x);
  const f32x16 f = subtract(x, n);
  f32x16 p = set_f32(0x1.3a02ccp-7F);
  p = fma(p, f, set_f32(0x1.c9fc46p-5F));
  p = fma(p, f, set_f32(0x1.ec0378p-3F));
  p = fma(p, f, set_f32(0x1.62e12cp-1F));
  return scale_by_power(fma(p, f, set_f32(1.0F)), n);
}

// e^x, relative error below 2e-7; exactly 1 at 0, +0 below -104, infinity above 89, NaN for NaN. Argument reduction
// by a two-part ln 2 whose first part has so few bits that n times it is exact (Cody and Waite, "Software Manual
// for the Elementary Functions", 1980, chapter 6); minimax polynomial for (e^f - 1 - f) / f^2.
inline f32x16 exp_f32(f32x16 x) {
  x = clamp(x, -110.0F, 95.0F);
  const f32x16 n = round_even(mul(x, set_f32(0x1.715476p+0F)));
  f32x16 f = fma(n, set_f32(-0x1.63p-1F), x);
  f = fma(n, set_f32(0x1.bd0106p-13F), f);
  f32x16 p = set_f32(0x1.6a2434p-10F);
  p = fma(p, f, set_f32(0x1.1239e2p-7F));
  p = fma(p, f, set_f32(0x1.5558f2p-5F));
  p = fma(p, f, set_f32(0x1.555492p-3F));
  p = fma(p, f, set_f32(0x1.fffffcp-2F));
  p = fma(mul(p, f), f, f);
  return scale_by_power(add(p, set_f32(1.0F)), n);
}

// x / (1 + e^-x).
inline f32x16 silu(f32x16 x) { return divide(x, add(set_f32(1.0F), exp_f32(subtract(zero_f32(), x)))); }

// ------------------------------------------------------------------ arrays

// Calls body(i, count) for [0, size) in steps of 16 lanes; count < 16 in the last one if size is not a multiple.
template <class Body>
inline void for_lanes(std::int64_t size, const Body& body) {
  std::int64_t i = 0;
  for (; i + 16 <= size; i += 16) body(i, 16);
  if (i < size) body(i, static_cast<int>(size - i));
}

inline f32x16 load_some(const float* p, int count) { return count == 16 ? load_f32(p) : load_f32(p, count); }
inline void store_some(float* p, f32x16 a, int count) {
  if (count == 16) {
    store_f32(p, a);
  } else {
    store_f32(p, a, count);
  }
}

}  // namespace ropeway::ROPEWAY_ISA
