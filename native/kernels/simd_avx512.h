// Sixteen lanes in one AVX-512 register.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace ropeway::ROPEWAY_ISA {

inline constexpr int kVectorRegisters = 32;

struct f32x16 {
  __m512 v;
};
struct i32x16 {
  __m512i v;
};

inline f32x16 zero_f32() { return {_mm512_setzero_ps()}; }
inline f32x16 set_f32(float x) { return {_mm512_set1_ps(x)}; }
inline f32x16 load_f32(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store_f32(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
// The first `count` lanes, 0 <= count <= 16; the others read as 0.
inline f32x16 load_f32(const float* p, int count) {
  return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1U << count) - 1), p)};
}
inline void store_f32(float* p, f32x16 a, int count) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1U << count) - 1), a.v);
}

inline f32x16 add(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline f32x16 mul(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
// a * b + c, rounded once.
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// b where a lane of a is NaN.
inline f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }

// Half precision and bfloat16 in memory, widened exactly.
inline f32x16 load_f16(const std::uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline f32x16 load_bf16(const std::uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}

inline i32x16 set_i32(std::int32_t x) { return {_mm512_set1_epi32(x)}; }
inline i32x16 load_i32(const void* p) { return {_mm512_loadu_si512(p)}; }
// (a & mask) | rest.
inline i32x16 bits_merge(i32x16 a, std::uint32_t mask, std::uint32_t rest) {
  return {_mm512_ternarylogic_epi32(a.v, _mm512_set1_epi32(static_cast<int>(mask)),
                                    _mm512_set1_epi32(static_cast<int>(rest)), 0xEA)};
}
inline i32x16 shift_left(i32x16 a, int n) { return {(__m512i)((__v16su)a.v << n)}; }
inline i32x16 shift_right(i32x16 a, int n) { return {(__m512i)((__v16su)a.v >> n)}; }
inline f32x16 as_f32(i32x16 bits) { return {_mm512_castsi512_ps(bits.v)}; }
inline f32x16 to_f32(i32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
// To the nearest integer, ties to even; lanes within the range of int32.
inline i32x16 to_i32(f32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }
inline i32x16 max(i32x16 a, i32x16 b) { return {_mm512_max_epi32(a.v, b.v)}; }
inline std::int32_t reduce_max(i32x16 a) { return _mm512_reduce_max_epi32(a.v); }
inline std::int32_t reduce_add(i32x16 a) { return _mm512_reduce_add_epi32(a.v); }
// The bits of |a|: ordered like |a|, with NaN above infinity.
inline i32x16 abs_bits(f32x16 a) { return {_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7FFFFFFF))}; }

}  // namespace ropeway::ROPEWAY_ISA
