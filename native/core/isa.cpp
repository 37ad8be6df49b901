#include "core/isa.h"

namespace ropeway {

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::avx512: return "avx512";
    case Isa::avx2: return "avx2";
    case Isa::portable: break;
  }
  return "portable";
}

bool isa_available(Isa isa) {
  switch (isa) {
    case Isa::avx512:
#if ROPEWAY_HAVE_AVX512
      return isa_available(Isa::avx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
#else
      return false;
#endif
    case Isa::avx2:
#if ROPEWAY_HAVE_AVX2
      // Every processor with AVX2 also converts half precision (F16C); older compilers cannot ask for it by name.
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
      return false;
#endif
    case Isa::portable: break;
  }
  return true;
}

Isa best_isa() {
  if (isa_available(Isa::avx512)) return Isa::avx512;
  return isa_available(Isa::avx2) ? Isa::avx2 : Isa::portable;
}

}  // namespace ropeway
