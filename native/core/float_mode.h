// The floating-point control word: rounding, denormals, traps.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace ropeway {

// Sets the default mode (round to nearest even, denormals kept, no traps); returns the previous one.
inline std::uint64_t set_default_float_mode() {
#if defined(__x86_64__)
  const std::uint64_t previous = _mm_getcsr();
  _mm_setcsr(0x1F80);
  return previous;
#elif defined(__aarch64__)
  std::uint64_t previous;
  __asm__ volatile("mrs %0, fpcr" : "=r"(previous));
  __asm__ volatile("msr fpcr, %0" : : "r"(std::uint64_t{0}));
  return previous;
#else
  return 0;
#endif
}

inline void restore_float_mode([[maybe_unused]] std::uint64_t mode) {
#if defined(__x86_64__)
  _mm_setcsr(static_cast<unsigned>(mode));
#elif defined(__aarch64__)
  __asm__ volatile("msr fpcr, %0" : : "r"(mode));
#endif
}

}  // namespace ropeway
