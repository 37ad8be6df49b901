// The innermost products of attention, one set per type of cache: 64 bytes of a tile, which are `unit` features (or
// positions) of sixteen positions (or features), times `unit` inputs of a row.
//
// Every lane is a chain of its own, in order of the features or of the positions, so the shape of a tile never shows
// in the result. Products with codes are exact integers.
#pragma once

#include "kernels/attention.h"
#include "kernels/dot.h"
#include "kernels/simd_math.h"

namespace ropeway::ROPEWAY_ISA {

struct Fp32 {
  using Query = Fp32;  // what a query becomes
  using Input = float;
  using Sum = f32x16;
  using Vector = f32x16;
  static constexpr bool codes = false, small_keys = false, exact_weights = true;
  static constexpr int unit = 1, passes = 1, value_unit = 1;
  static Vector load(const std::byte* p) { return load_f32(reinterpret_cast<const float*>(p)); }
  static Sum dot(Sum sum, const Vector& v, const Input* x) { return fma(set_f32(*x), v, sum); }
  static void store(Input* to, f32x16 x) { store_f32(to, x); }
};

struct Bf16 {
  using Query = Bf16;
  using Input = Bf16Input;
  using Sum = f32x16;
  using Vector = Bf16Pair;
  static constexpr bool codes = false, small_keys = false, exact_weights = false;  // weights are rounded to 8 bits
  static constexpr int unit = 2, passes = 1, value_unit = 2;
  static Vector load(const std::byte* p) { return load_pair(reinterpret_cast<const std::uint16_t*>(p)); }
  static Sum dot(Sum sum, const Vector& v, const Input* x) { return dot_bf16(sum, v, x); }
  static void store(Input* to, f32x16 x) { store_bf16(to, x); }
};

// Inputs are codes of two digits (see dot.h), in [-kMostCode, kMostCode]; where an input holds one digit, tiles are
// multiplied with the high digits, then with the low ones.
inline constexpr std::int32_t kMostCode = 127 * 256;

struct Int8 {
  using Query = Int8;
  using Input = CodeInput;
  using Vector = Codes;
  static constexpr bool codes = true, small_keys = false, exact_weights = true;
  static constexpr int unit = 4, passes = kPasses<2>, value_unit = 4;
  static constexpr std::int32_t value_offset = 128;  // what a stored code of a value exceeds it by
  static Vector load(const std::byte* p) { return load_codes(reinterpret_cast<const std::uint8_t*>(p)); }
#if defined(ROPEWAY_ISA_AVX512)
  // Not __m512i, whose lanes are 64-bit integers: GCC keeps a value and its other type in two registers, and with as
  // many sums as here stores one of them in every step.
  struct Sum {
    __v16si v;
  };
  static Sum start(std::int32_t x) { return {(__v16si)_mm512_set1_epi32(x)}; }
  static Sum dot(Sum sum, const Vector& v, const Input* x) {
    return {(__v16si)dot_codes(CodeSum{(__m512i)sum.v}, v, x).v};
  }
  static Sum shift(Sum sum, std::int32_t start) { return {(__v16si)next_digit(CodeSum{(__m512i)sum.v}, start).v}; }
  static f32x16 value(Sum sum) { return to_f32(CodeSum{(__m512i)sum.v}); }
#else
  using Sum = CodeSum;
  static Sum start(std::int32_t x) { return set_sum(x); }
  static Sum dot(const Sum& sum, const Vector& v, const Input* x) { return dot_codes(sum, v, x); }
  template <class S>
  static S shift(const S& sum, std::int32_t start) {
    return next_digit(sum, start);
  }
  static f32x16 value(const Sum& sum) { return to_f32(sum); }
#endif
};

struct Int4 : Int8 {
  using Query = Int4;
  static constexpr int value_unit = 8;
  static constexpr std::int32_t value_offset = 0;
};

// Values as int4. Queries stay float32; small_keys.h has the scores.
struct Int4Full : Int4 {
  using Query = Fp32;
  static constexpr bool small_keys = true;
};

// Sixteen codes as inputs: high digits to `to`, low digits to `to + stride`, where they are apart.
inline void store_digits(CodeInput* to, std::int64_t stride, f32x16 codes) {
  CodeInput digits[2 * kStoredCodes];
  store_codes<2>(digits, to_i32(codes));
  std::memcpy(to, digits, 16 * sizeof(CodeInput));
  if constexpr (kPasses<2> == 2) std::memcpy(to + stride, digits + kStoredCodes, 16 * sizeof(CodeInput));
}

// Rows of a panel, and vectors that meet them at once: as many sums as registers hold, with room for the operands.
inline constexpr int kPanel = kVectorRegisters >= 32 ? 6 : kVectorRegisters >= 8 ? 4 : 2;
inline constexpr int kWide = kVectorRegisters >= 32 ? 4 : 1;

// Memory is read faster in several streams, and the processor's own guesses end at every block: so while a tile is
// used, the tile this many places later is fetched, some 32 KiB ahead. Codes are half as large, or less. Where tiles
// are multiplied in two passes, each fetches its half, lest memory is idle during the other.
inline constexpr int kMostAhead = 16;

template <class Type>
inline constexpr int kAhead = Type::codes ? kMostAhead : kMostAhead / 2;

// Into the second-level cache: in the first one, tiles of the same alignment would push each other out. Always inline,
// because GCC takes a function that does nothing else for one without effects, and drops calls of it.
[[gnu::always_inline]] inline void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// Where a span's keys and values lie, 16 positions each. After the last keys follow the values, and after the last
// values what is needed next, so that there is always something to fetch.
struct SpanTiles {
  const std::byte* keys[kSpan / kTile + kMostAhead + 1];  // tiles are taken in pairs: one more may be asked for
  const std::byte* values[kSpan / kTile + kMostAhead];
  const std::uint16_t* key_scales[kSpan / kTile];
  const std::uint16_t* value_scales[kSpan / kTile];
  const std::uint16_t* value_minimums[kSpan / kTile];
};

template <class Type, int Rows, int Wide>
[[gnu::always_inline]] inline void start_sums(typename Type::Sum (&sums)[Rows][Wide],
                                              [[maybe_unused]] const std::int32_t* starts,
                                              [[maybe_unused]] std::int64_t stride) {
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int t = 0; t < Wide; ++t) {
      if constexpr (!Type::codes) {
        sums[r][t] = zero_f32();
      } else {
        sums[r][t] = Type::start(Type::passes == 1 ? starts[r * stride] : 0);
      }
    }
  }
}

// Between the digits: 256 * sum + start.
template <class Type, int Rows, int Wide>
[[gnu::always_inline]] inline void shift_sums(typename Type::Sum (&sums)[Rows][Wide], const std::int32_t* starts,
                                              std::int64_t stride) {
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int t = 0; t < Wide; ++t) sums[r][t] = Type::shift(sums[r][t], starts[r * stride]);
}

// Scores of a panel's rows for `Wide` tiles, as the products give them: q [passes][steps][Rows][unit].
template <class Type, int Rows, int Wide, bool Fetch>
inline void score_tiles(const typename Type::Input* q, const std::int32_t* starts, const std::byte* const* keys,
                        const std::byte* const* ahead, std::int64_t steps, float* scores) {
  typename Type::Sum sums[Rows][Wide];
  start_sums<Type>(sums, starts, 1);
  for (int pass = 0; pass < Type::passes; ++pass) {
    if constexpr (Type::passes == 2) {
      if (pass == 1) shift_sums<Type>(sums, starts, 1);
    }
    for (std::int64_t s = 0; s < steps; ++s) {
      typename Type::Vector k[Wide];
#pragma GCC unroll 8
      for (int t = 0; t < Wide; ++t) k[t] = Type::load(keys[t] + 64 * s);
      if constexpr (Fetch) {
#pragma GCC unroll 8
        for (int t = pass; t < Wide; t += Type::passes) fetch(ahead[t] + 64 * s);
      }
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
        for (int t = 0; t < Wide; ++t) sums[r][t] = Type::dot(sums[r][t], k[t], q + r * Type::unit);
      q += Rows * Type::unit;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int t = 0; t < Wide; ++t) {
      if constexpr (!Type::codes) {
        store_f32(scores + r * kSpan + 16 * t, sums[r][t]);
      } else {
        store_f32(scores + r * kSpan + 16 * t, Type::value(sums[r][t]));
      }
    }
  }
}

// Adds to `sums` the weighted values of `value_unit` positions; weights [Rows] are `stride` apart. Of what is ahead, a
// pass fetches every `Every`-th vector, `Pass` being the first; none where that is 0.
template <class Type, int Rows, int Wide, int Every, int Pass = 0>
[[gnu::always_inline]] inline void weigh_step(typename Type::Sum (&sums)[Rows][Wide],
                                              const typename Type::Input* weights, std::int64_t stride,
                                              const std::byte* values, [[maybe_unused]] const std::byte* ahead) {
  typename Type::Vector v[Wide];
#pragma GCC unroll 8
  for (int n = 0; n < Wide; ++n) {
    v[n] = Type::load(values + 64 * n);
    if constexpr (Every > 0) {
      if (n % Every == Pass) fetch(ahead + 64 * n);
    }
  }
  if constexpr (Type::value_unit == Type::unit) {
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
      for (int n = 0; n < Wide; ++n) sums[r][n] = Type::dot(sums[r][n], v[n], weights + r * stride);
  } else {
    typename Type::Vector part[Wide];
#pragma GCC unroll 8
    for (int n = 0; n < Wide; ++n) part[n] = low_halves(v[n]);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
      for (int n = 0; n < Wide; ++n) sums[r][n] = Type::dot(sums[r][n], part[n], weights + r * stride);
#pragma GCC unroll 8
    for (int n = 0; n < Wide; ++n) part[n] = high_halves(v[n]);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
      for (int n = 0; n < Wide; ++n) sums[r][n] = Type::dot(sums[r][n], part[n], weights + r * stride + Type::unit);
  }
}

}  // namespace ropeway::ROPEWAY_ISA
