// What a thread does between two looks at something that another one is about to change.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ropeway {

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#endif
}

}  // namespace ropeway
