// The innermost steps of `linear` that differ between instruction sets: products of bfloat16 pairs, and of unsigned
// weight codes with signed activation codes.
//
//   Bf16Input, store_bf16     activations rounded to bfloat16, as the step wants them
//   Bf16Pair, dot_bf16        two k of sixteen outputs, times two k of a row
//   CodeInput, store_codes    quantised activations, as the step wants them
//   CodeSum, Codes, dot_codes four k of sixteen outputs, times four k of a row; exact
//   low_halves, high_halves   the codes of 4-bit weights
//   whole_bytes, kByteOffset  those of 8-bit weights; what has been added to each
//   kPasses, next_digit       how activation codes of several digits are multiplied, one digit after the other
//   sum_digits                the same side by side
//
// An activation code of two digits is 256 * high + low, both in int8. Where CodeInput holds one digit, a group's
// weights are multiplied with the high digits first, then, after `next_digit`, with the low ones.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/simd.h"

namespace ropeway::ROPEWAY_ISA {

// `store_codes` leaves room for so many codes of the first pass before those of the second.
inline constexpr int kStoredCodes = 32;

}  // namespace ropeway::ROPEWAY_ISA

#if defined(ROPEWAY_ISA_ANY_NEON)
#include "kernels/dot_neon.h"
#endif

namespace ropeway::ROPEWAY_ISA {

#if defined(ROPEWAY_ISA_AVX512)

using Bf16Input = std::uint16_t;

struct Bf16Pair {
  __m512bh v;
};

inline Bf16Pair load_pair(const std::uint16_t* w) { return {(__m512bh)_mm512_loadu_si512(w)}; }

inline f32x16 dot_bf16(f32x16 sum, Bf16Pair w, const Bf16Input* x) {
  std::int32_t pair;
  std::memcpy(&pair, x, sizeof pair);
  return {_mm512_dpbf16_ps(sum.v, w.v, (__m512bh)_mm512_set1_epi32(pair))};
}

inline void store_bf16(Bf16Input* out, f32x16 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), (__m256i)_mm512_cvtneps_pbh(x.v));
}

using CodeInput = std::int8_t;
using CodeSum = i32x16;

struct Codes {
  __m512i v;
};

inline Codes load_codes(const std::uint8_t* w) { return {_mm512_loadu_si512(w)}; }
inline Codes low_halves(Codes w) { return {_mm512_and_si512(w.v, _mm512_set1_epi8(15))}; }
inline Codes high_halves(Codes w) { return {_mm512_and_si512(_mm512_srli_epi16(w.v, 4), _mm512_set1_epi8(15))}; }

inline CodeSum dot_codes(CodeSum sum, Codes w, const CodeInput* x) {
  std::int32_t quad;
  std::memcpy(&quad, x, sizeof quad);
  return {_mm512_dpbusd_epi32(sum.v, w.v, _mm512_set1_epi32(quad))};
}

inline CodeSum set_sum(std::int32_t x) { return set_i32(x); }

template <int kDigits>
inline constexpr int kPasses = kDigits;

// 256 * sum + start.
inline CodeSum next_digit(CodeSum sum, std::int32_t start) {
  return {_mm512_add_epi32(_mm512_slli_epi32(sum.v, 8), _mm512_set1_epi32(start))};
}

// 256 * high + low + correction.
inline CodeSum sum_digits(CodeSum high, CodeSum low, std::int32_t correction) {
  return {_mm512_add_epi32(next_digit(high, correction).v, low.v)};
}

inline void store_low_bytes(CodeInput* out, __m512i codes) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(codes));
}

// The low digit is the low byte, taken as signed; adding 128 carries what that takes away into the high one.
template <int kDigits>
inline void store_codes(CodeInput* out, i32x16 codes) {
  if constexpr (kDigits == 1) {
    store_low_bytes(out, codes.v);
  } else {
    store_low_bytes(out, _mm512_srai_epi32(_mm512_add_epi32(codes.v, _mm512_set1_epi32(128)), 8));
    store_low_bytes(out + kStoredCodes, codes.v);
  }
}

#else

// Without bfloat16 products: activations are float32 that hold bfloat16 values.
using Bf16Input = float;

struct Bf16Pair {
  f32x16 first, second;
};

inline f32x16 dot_bf16(f32x16 sum, Bf16Pair w, const Bf16Input* x) {
  return fma(w.first, set_f32(x[0]), fma(w.second, set_f32(x[1]), sum));
}

inline void store_bf16(Bf16Input* out, f32x16 x) {
  std::uint32_t bits[16];
  std::memcpy(bits, &x, sizeof bits);
  for (std::uint32_t& b : bits) {
    const bool is_nan = (b & 0x7FFFFFFF) > 0x7F800000;
    const std::uint32_t rounded = b + 0x7FFF + (b >> 16 & 1);  // to nearest, ties to even
    b = (is_nan ? b | 0x00400000 : rounded) & 0xFFFF0000;
  }
  std::memcpy(out, bits, sizeof bits);
}

#if defined(ROPEWAY_ISA_AVX2)

inline f32x16 as_f32(__m256i lo, __m256i hi) { return {_mm256_castsi256_ps(lo), _mm256_castsi256_ps(hi)}; }

inline Bf16Pair load_pair(const std::uint16_t* w) {
  const __m256i lo = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
  const __m256i hi = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 16));
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xFFFF0000));
  return {as_f32(_mm256_slli_epi32(lo, 16), _mm256_slli_epi32(hi, 16)),
          as_f32(_mm256_and_si256(lo, upper), _mm256_and_si256(hi, upper))};
}

// Products of 16-bit integers, summed in pairs: those of bytes (vpmaddubsw) would saturate. So an input holds both
// digits, and sums of a group stay below 2^29 (32 * 255 * 32512). A quad of activations is stored in the order 0, 2, 1,
// 3, because even and odd bytes of the weights are split by a mask and a shift.
using CodeInput = std::int16_t;
using CodeSum = i32x16;

struct Codes {
  __m256i lo_even, lo_odd, hi_even, hi_odd;
};

inline Codes load_codes(const std::uint8_t* w) {
  const __m256i lo = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
  const __m256i hi = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 32));
  const __m256i even = _mm256_set1_epi16(255);
  return {_mm256_and_si256(lo, even), _mm256_srli_epi16(lo, 8), _mm256_and_si256(hi, even), _mm256_srli_epi16(hi, 8)};
}
inline Codes low_halves(Codes w) {
  const __m256i low = _mm256_set1_epi16(15);
  return {_mm256_and_si256(w.lo_even, low), _mm256_and_si256(w.lo_odd, low), _mm256_and_si256(w.hi_even, low),
          _mm256_and_si256(w.hi_odd, low)};
}
inline Codes high_halves(Codes w) {
  return {_mm256_srli_epi16(w.lo_even, 4), _mm256_srli_epi16(w.lo_odd, 4), _mm256_srli_epi16(w.hi_even, 4),
          _mm256_srli_epi16(w.hi_odd, 4)};
}

inline CodeSum dot_codes(CodeSum sum, Codes w, const CodeInput* x) {
  std::int32_t even, odd;
  std::memcpy(&even, x, sizeof even);
  std::memcpy(&odd, x + 2, sizeof odd);
  const __m256i xe = _mm256_set1_epi32(even), xo = _mm256_set1_epi32(odd);
  const __m256i lo = _mm256_add_epi32(_mm256_madd_epi16(w.lo_even, xe), _mm256_madd_epi16(w.lo_odd, xo));
  const __m256i hi = _mm256_add_epi32(_mm256_madd_epi16(w.hi_even, xe), _mm256_madd_epi16(w.hi_odd, xo));
  return {_mm256_add_epi32(sum.lo, lo), _mm256_add_epi32(sum.hi, hi)};
}

inline CodeSum set_sum(std::int32_t x) { return set_i32(x); }

template <int kDigits>
inline constexpr int kPasses = 1;

template <int kDigits>
inline void store_codes(CodeInput* out, i32x16 codes) {
  std::int32_t lanes[16];
  std::memcpy(lanes, &codes, sizeof lanes);
  for (int quad = 0; quad < 16; quad += 4) {
    out[quad] = static_cast<CodeInput>(lanes[quad]);
    out[quad + 1] = static_cast<CodeInput>(lanes[quad + 2]);
    out[quad + 2] = static_cast<CodeInput>(lanes[quad + 1]);
    out[quad + 3] = static_cast<CodeInput>(lanes[quad + 3]);
  }
}

#else

inline Bf16Pair load_pair(const std::uint16_t* w) {
  i32x16 words;
  std::memcpy(&words, w, sizeof words);
  Bf16Pair pair;
  for (int i = 0; i < 4; ++i) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    pair.first.v[i] = reinterpret_cast<f32x4>(words.v[i] << 16);
    pair.second.v[i] = reinterpret_cast<f32x4>(words.v[i] & static_cast<std::int32_t>(0xFFFF0000));
#else
#error "the packed layouts are defined for little-endian machines"
#endif
  }
  return pair;
}

#if !defined(ROPEWAY_ISA_ANY_NEON)

// Integer products in float32: a group's sum over one digit stays below 2^24 (32 * 255 * 128), so every step is exact.
// So is `high`, a multiple of 128 below 2^29 or of 8 below 2^25 (8-bit and 4-bit weights, their correction included).
using CodeInput = float;

struct CodeSum {
  f32x16 low, high;
};

struct Codes {
  i32x16 quads;
};

inline Codes load_codes(const std::uint8_t* w) {
  Codes codes;
  std::memcpy(&codes, w, sizeof codes);
  return codes;
}
inline Codes low_halves(Codes w) {
  for (i32x4& quad : w.quads.v) quad &= 0x0F0F0F0F;
  return w;
}
inline Codes high_halves(Codes w) {
  for (i32x4& quad : w.quads.v) quad = quad >> 4 & 0x0F0F0F0F;
  return w;
}

inline CodeSum dot_codes(CodeSum sum, Codes w, const CodeInput* x) {
  for (int i = 0; i < 4; ++i) {
    const i32x4 quad = w.quads.v[i];
    sum.low.v[i] += __builtin_convertvector(quad & 255, f32x4) * x[0];
    sum.low.v[i] += __builtin_convertvector(quad >> 8 & 255, f32x4) * x[1];
    sum.low.v[i] += __builtin_convertvector(quad >> 16 & 255, f32x4) * x[2];
    sum.low.v[i] += __builtin_convertvector(quad >> 24 & 255, f32x4) * x[3];
  }
  return sum;
}

inline CodeSum set_sum(std::int32_t x) { return {set_f32(static_cast<float>(x)), zero_f32()}; }
inline f32x16 to_f32(CodeSum sum) { return add(sum.high, sum.low); }

template <int kDigits>
inline constexpr int kPasses = kDigits;

inline CodeSum next_digit(CodeSum sum, std::int32_t start) {
  return {zero_f32(), add(mul(sum.low, set_f32(256.0F)), set_f32(static_cast<float>(start)))};
}

inline CodeSum sum_digits(CodeSum high, CodeSum low, std::int32_t correction) {
  return {low.low, next_digit(high, correction).high};
}

template <int kDigits>
inline void store_codes(CodeInput* out, i32x16 codes) {
  if constexpr (kDigits == 1) {
    store_f32(out, to_f32(codes));
  } else {
    i32x16 high;
    for (int i = 0; i < 4; ++i) {
      high.v[i] = (codes.v[i] + 128) >> 8;
      codes.v[i] -= high.v[i] << 8;
    }
    store_f32(out, to_f32(high));
    store_f32(out + kStoredCodes, to_f32(codes));
  }
}

#endif
#endif
#endif

#if !defined(ROPEWAY_ISA_NEON_DOTPROD)
inline constexpr int kByteOffset = 128;
inline Codes whole_bytes(Codes w) { return w; }
#endif

}  // namespace ropeway::ROPEWAY_ISA
