// Number formats, and the comparison of results with exact ones.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace ropeway::tests {

inline constexpr double kEpsilon = 0x1p-24;  // half a unit in the last place of float32, relative

inline float from_bf16(std::uint16_t x) { return std::bit_cast<float>(std::uint32_t{x} << 16); }

// To the nearest, ties to even; a NaN stays one.
inline std::uint16_t to_bf16(float x) {
  if (std::isnan(x)) return 0x7FC0;
  const auto bits = std::bit_cast<std::uint32_t>(x);
  return static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline float from_fp16(std::uint16_t x) {
  const int exponent = x >> 10 & 31, mantissa = x & 1023;
  const double sign = x & 0x8000 ? -1.0 : 1.0;
  if (exponent == 31) return static_cast<float>(sign * (mantissa == 0 ? INFINITY : NAN));
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return static_cast<float>(sign * magnitude);
}

inline bool same_bits(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) || std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

// The largest error seen, as a multiple of what is allowed; above 1 is wrong.
struct Worst {
  double ratio = 0.0;
  std::int64_t at = -1;
  double actual = 0.0, expected = 0.0;

  void see(std::int64_t index, double got, double want, double allowed) {
    double now = std::abs(got - want) / allowed;
    if (std::isnan(want) || std::isinf(want)) now = (std::isnan(want) ? std::isnan(got) : got == want) ? 0.0 : INFINITY;
    if (std::isnan(now)) now = got == want ? 0.0 : INFINITY;
    if (now <= ratio) return;
    ratio = now;
    at = index;
    actual = got;
    expected = want;
  }
};

}  // namespace ropeway::tests

// At every place of a test that compares: what was seen goes into the message.
#define CHECK_WORST(worst)                                                                                       \
  CHECK_MESSAGE((worst).ratio <= 1.0, "at ", (worst).at, ": ", (worst).actual, " instead of ", (worst).expected, \
                ", ", (worst).ratio, " times the allowed error")
