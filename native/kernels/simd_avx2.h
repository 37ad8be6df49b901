// Sixteen lanes in two AVX registers.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace ropeway::ROPEWAY_ISA {

inline constexpr int kVectorRegisters = 8;

struct f32x16 {
  __m256 lo, hi;
};
struct i32x16 {
  __m256i lo, hi;
};

// Lanes [0, 8) of a mask whose first `count` lanes are set; count may be negative or above 8.
inline __m256i lane_mask(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline f32x16 zero_f32() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline f32x16 set_f32(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline f32x16 load_f32(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store_f32(float* p, f32x16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
// The first `count` lanes, 0 <= count <= 16; the others read as 0.
inline f32x16 load_f32(const float* p, int count) {
  return {_mm256_maskload_ps(p, lane_mask(count)), _mm256_maskload_ps(p + 8, lane_mask(count - 8))};
}
inline void store_f32(float* p, f32x16 a, int count) {
  _mm256_maskstore_ps(p, lane_mask(count), a.lo);
  _mm256_maskstore_ps(p + 8, lane_mask(count - 8), a.hi);
}

inline f32x16 add(f32x16 a, f32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline f32x16 mul(f32x16 a, f32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
// a * b + c, rounded once.
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
// b where a lane of a is NaN.
inline f32x16 max(f32x16 a, f32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline f32x16 min(f32x16 a, f32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }

// Half precision and bfloat16 in memory, widened exactly.
inline f32x16 load_f16(const std::uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline __m256 load_bf16x8(const std::uint16_t* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline f32x16 load_bf16(const std::uint16_t* p) { return {load_bf16x8(p), load_bf16x8(p + 8)}; }

inline i32x16 set_i32(std::int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline i32x16 load_i32(const void* p) {
  const auto* lanes = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(lanes), _mm256_loadu_si256(lanes + 1)};
}
// (a & mask) | rest.
inline i32x16 bits_merge(i32x16 a, std::uint32_t mask, std::uint32_t rest) {
  const __m256i some = _mm256_set1_epi32(static_cast<int>(mask)), others = _mm256_set1_epi32(static_cast<int>(rest));
  return {_mm256_or_si256(_mm256_and_si256(a.lo, some), others), _mm256_or_si256(_mm256_and_si256(a.hi, some), others)};
}
inline i32x16 shift_left(i32x16 a, int n) { return {(__m256i)((__v8su)a.lo << n), (__m256i)((__v8su)a.hi << n)}; }
inline i32x16 shift_right(i32x16 a, int n) { return {(__m256i)((__v8su)a.lo >> n), (__m256i)((__v8su)a.hi >> n)}; }
inline f32x16 as_f32(i32x16 bits) { return {_mm256_castsi256_ps(bits.lo), _mm256_castsi256_ps(bits.hi)}; }
inline f32x16 to_f32(i32x16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
// To the nearest integer, ties to even; lanes within the range of int32.
inline i32x16 to_i32(f32x16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
inline i32x16 max(i32x16 a, i32x16 b) { return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)}; }
inline std::int32_t reduce_max(i32x16 a) {
  const __m256i eight = _mm256_max_epi32(a.lo, a.hi);
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
}
inline std::int32_t reduce_add(i32x16 a) {
  const __m256i eight = _mm256_add_epi32(a.lo, a.hi);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
}
// The bits of |a|: ordered like |a|, with NaN above infinity.
inline i32x16 abs_bits(f32x16 a) {
  const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
  return {_mm256_and_si256(_mm256_castps_si256(a.lo), magnitude),
          _mm256_and_si256(_mm256_castps_si256(a.hi), magnitude)};
}

}  // namespace ropeway::ROPEWAY_ISA
