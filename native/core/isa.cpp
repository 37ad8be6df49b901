#include "core/isa.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace ropeway {
namespace {

// What an Arm processor says of itself; every 64-bit one has NEON.
[[maybe_unused]] bool has_dotprod() {
#if defined(__aarch64__) && defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
  return false;
#endif
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::avx512: return "avx512";
    case Isa::avx2: return "avx2";
    case Isa::neon: return "neon";
    case Isa::neon_dotprod: return "neon_dotprod";
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
    case Isa::neon:
#if ROPEWAY_HAVE_NEON
      return true;
#else
      return false;
#endif
    case Isa::neon_dotprod:
#if ROPEWAY_HAVE_NEON_DOTPROD
      return has_dotprod();
#else
      return false;
#endif
    case Isa::portable: break;
  }
  return true;
}

Isa best_isa() {
  Isa best = Isa::portable;
  for (const Isa isa : all_isas) {
    if (isa_available(isa)) best = isa;
  }
  return best;
}

}  // namespace ropeway
