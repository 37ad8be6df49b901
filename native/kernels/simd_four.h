// Integer lanes where sixteen of them are four vectors of the compiler: NEON and portable. Included by their headers.
#pragma once

#include <cstring>

namespace ropeway::ROPEWAY_ISA {

inline i32x16 load_i32(const void* p) {
  i32x16 a;
  std::memcpy(&a, p, sizeof a);
  return a;
}
// (a & mask) | rest.
inline i32x16 bits_merge(i32x16 a, std::uint32_t mask, std::uint32_t rest) {
  for (int i = 0; i < 4; ++i)
    a.v[i] = (a.v[i] & static_cast<std::int32_t>(mask)) | static_cast<std::int32_t>(rest);
  return a;
}
inline i32x16 shift_left(i32x16 a, int n) {
  for (int i = 0; i < 4; ++i) a.v[i] = reinterpret_cast<i32x4>(reinterpret_cast<u32x4>(a.v[i]) << n);
  return a;
}
inline i32x16 shift_right(i32x16 a, int n) {
  for (int i = 0; i < 4; ++i) a.v[i] = reinterpret_cast<i32x4>(reinterpret_cast<u32x4>(a.v[i]) >> n);
  return a;
}
inline f32x16 as_f32(i32x16 bits) {
  f32x16 a;
  for (int i = 0; i < 4; ++i) a.v[i] = reinterpret_cast<f32x4>(bits.v[i]);
  return a;
}

}  // namespace ropeway::ROPEWAY_ISA
