// Instruction sets a kernel family is compiled for, and the choice between them at run time.
#pragma once

#if ROPEWAY_HAVE_AVX2
#define ROPEWAY_IF_AVX2(table) (table)
#else
#define ROPEWAY_IF_AVX2(table) nullptr
#endif
#if ROPEWAY_HAVE_AVX512
#define ROPEWAY_IF_AVX512(table) (table)
#else
#define ROPEWAY_IF_AVX512(table) nullptr
#endif

namespace ropeway {

// In order of preference, worst first.
enum class Isa { portable, avx2, avx512 };

inline constexpr Isa all_isas[] = {Isa::portable, Isa::avx2, Isa::avx512};

const char* isa_name(Isa isa);

// Compiled into this library and offered by this processor and operating system.
bool isa_available(Isa isa);

Isa best_isa();

template <class Table>
const Table& select_table(Isa isa, const Table* portable, const Table* avx2, const Table* avx512) {
  switch (isa) {
    case Isa::avx512: return *avx512;
    case Isa::avx2: return *avx2;
    case Isa::portable: break;
  }
  return *portable;
}

}  // namespace ropeway

// Declares a family's table of kernels, defined once per instruction set in kernels/<family>.cpp.
#define ROPEWAY_DECLARE_TABLE(Table, name) \
  namespace portable {                     \
  extern const Table name;                 \
  }                                        \
  namespace avx2 {                         \
  extern const Table name;                 \
  }                                        \
  namespace avx512 {                       \
  extern const Table name;                 \
  }

// The table `name` for an available instruction set.
#define ROPEWAY_TABLE(name, isa)                                                                       \
  (::ropeway::select_table((isa), &::ropeway::portable::name, ROPEWAY_IF_AVX2(&::ropeway::avx2::name), \
                           ROPEWAY_IF_AVX512(&::ropeway::avx512::name)))
