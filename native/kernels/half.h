// Single float16 values; simd.h widens vectors of them.
#pragma once

#include <cstdint>
#include <cstring>

namespace ropeway::ROPEWAY_ISA {

inline constexpr std::uint16_t kHalfNaN = 0x7E00, kHalfInfinity = 0x7C00;

inline std::uint32_t float_bits(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float bits_float(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// To the nearest float16, ties to even; infinity beyond the largest.
inline std::uint16_t to_half(float x) {
  const std::uint32_t bits = float_bits(x), magnitude = bits & 0x7FFFFFFF;
  const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000);
  std::uint32_t half;
  if (magnitude > 0x7F800000) {
    half = kHalfNaN;
  } else if (magnitude >= 0x477FF000) {
    half = kHalfInfinity;
  } else if (magnitude < 0x38800000) {  // below 2^-14: the sum's last bit is 2^-24, that of denormals
    half = float_bits(bits_float(magnitude) + 0.5F) - float_bits(0.5F);
  } else {
    half = (magnitude - (112U << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13;
  }
  return static_cast<std::uint16_t>(sign | half);
}

inline float from_half(std::uint16_t half) {
  const std::uint32_t magnitude = half & 0x7FFFU, sign = (half & 0x8000U) << 16;
  if (magnitude >= kHalfInfinity) return bits_float(sign | 0x7F800000 | magnitude << 13);
  return bits_float(sign | float_bits(bits_float(magnitude << 13) * 0x1p112F));
}

}  // namespace ropeway::ROPEWAY_ISA
