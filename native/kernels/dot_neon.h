// Products of 8-bit codes on 64-bit Arm: with the dot product of bytes where the processor has one, else with
// multiply-adds of 16-bit integers. dot.h says what is what.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/simd.h"

namespace ropeway::ROPEWAY_ISA {

#if defined(ROPEWAY_ISA_NEON_DOTPROD)

using CodeInput = std::int8_t;
using CodeSum = i32x16;

struct Codes {
  uint8x16_t v[4];
};

inline Codes load_codes(const std::uint8_t* w) {
  return {{vld1q_u8(w), vld1q_u8(w + 16), vld1q_u8(w + 32), vld1q_u8(w + 48)}};
}
inline Codes low_halves(Codes w) {
  for (uint8x16_t& v : w.v) v = vandq_u8(v, vdupq_n_u8(15));
  return w;
}
inline Codes high_halves(Codes w) {
  for (uint8x16_t& v : w.v) v = vshrq_n_u8(v, 4);
  return w;
}

inline CodeSum dot_codes(CodeSum sum, Codes w, const CodeInput* x) {
  std::int32_t quad;
  std::memcpy(&quad, x, sizeof quad);
  const int8x16_t quads = vreinterpretq_s8_s32(vdupq_n_s32(quad));
  for (int i = 0; i < 4; ++i) sum.v[i] = vdotq_s32(sum.v[i], vreinterpretq_s8_u8(w.v[i]), quads);
  return sum;
}

inline CodeSum set_sum(std::int32_t x) { return set_i32(x); }

template <int kDigits>
inline constexpr int kPasses = kDigits;

inline CodeSum next_digit(CodeSum sum, std::int32_t start) {
  for (i32x4& v : sum.v) v = vaddq_s32(vshlq_n_s32(v, 8), vdupq_n_s32(start));
  return sum;
}

inline void store_low_bytes(CodeInput* out, i32x16 codes) {
  const int16x8_t lo = vcombine_s16(vmovn_s32(codes.v[0]), vmovn_s32(codes.v[1]));
  const int16x8_t hi = vcombine_s16(vmovn_s32(codes.v[2]), vmovn_s32(codes.v[3]));
  vst1q_s8(out, vcombine_s8(vmovn_s16(lo), vmovn_s16(hi)));
}

// The low digit is the low byte, taken as signed; adding 128 carries what that takes away into the high one.
template <int kDigits>
inline void store_codes(CodeInput* out, i32x16 codes) {
  if constexpr (kDigits == 1) {
    store_low_bytes(out, codes);
  } else {
    i32x16 high;
    for (int i = 0; i < 4; ++i) high.v[i] = vshrq_n_s32(vaddq_s32(codes.v[i], vdupq_n_s32(128)), 8);
    store_low_bytes(out, high);
    store_low_bytes(out + kStoredCodes, codes);
  }
}

// The instruction multiplies signed bytes: what is stored loses its 128 again.
inline constexpr int kByteOffset = 0;
inline Codes whole_bytes(Codes w) {
  for (uint8x16_t& v : w.v) v = veorq_u8(v, vdupq_n_u8(128));
  return w;
}

#else

// Products of 16-bit integers, so an input holds both digits, and sums of a group stay below 2^29 (32 * 255 * 32512).
// Weights are split by their place in a quad while they are loaded: then a multiply-add takes one k of four outputs.
using CodeInput = std::int16_t;
using CodeSum = i32x16;

struct Codes {
  uint8x16x4_t places;  // [place in the quad][output]
};

inline Codes load_codes(const std::uint8_t* w) { return {vld4q_u8(w)}; }
inline Codes low_halves(Codes w) {
  for (uint8x16_t& v : w.places.val) v = vandq_u8(v, vdupq_n_u8(15));
  return w;
}
inline Codes high_halves(Codes w) {
  for (uint8x16_t& v : w.places.val) v = vshrq_n_u8(v, 4);
  return w;
}

inline CodeSum dot_codes(CodeSum sum, Codes w, const CodeInput* x) {
  for (int place = 0; place < 4; ++place) {
    const int16x8_t lo = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(w.places.val[place])));
    const int16x8_t hi = vreinterpretq_s16_u16(vmovl_high_u8(w.places.val[place]));
    sum.v[0] = vmlal_n_s16(sum.v[0], vget_low_s16(lo), x[place]);
    sum.v[1] = vmlal_high_n_s16(sum.v[1], lo, x[place]);
    sum.v[2] = vmlal_n_s16(sum.v[2], vget_low_s16(hi), x[place]);
    sum.v[3] = vmlal_high_n_s16(sum.v[3], hi, x[place]);
  }
  return sum;
}

inline CodeSum set_sum(std::int32_t x) { return set_i32(x); }

template <int kDigits>
inline constexpr int kPasses = 1;

template <int kDigits>
inline void store_codes(CodeInput* out, i32x16 codes) {
  for (int i = 0; i < 4; ++i) vst1_s16(out + 4 * i, vmovn_s32(codes.v[i]));
}

#endif

}  // namespace ropeway::ROPEWAY_ISA
