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
#if ROPEWAY_HAVE_NEON
#define ROPEWAY_IF_NEON(table) (table)
#else
#define ROPEWAY_IF_NEON(table) nullptr
#endif
#if ROPEWAY_HAVE_NEON_DOTPROD
#define ROPEWAY_IF_NEON_DOTPROD(table) (table)
#else
#define ROPEWAY_IF_NEON_DOTPROD(table) nullptr
#endif

namespace ropeway {

// In order of preference, worst first; no processor has both of x86's and Arm's.
enum class Isa { portable, avx2, avx512, neon, neon_dotprod };

inline constexpr Isa all_isas[] = {Isa::portable, Isa::avx2, Isa::avx512, Isa::neon, Isa::neon_dotprod};

const char* isa_name(Isa isa);

// Compiled into this library and offered by this processor and operating system.
bool isa_available(Isa isa);

Isa best_isa();

// A table of `portable`'s type, or nullptr where the instruction set is left out.
template <class Table>
struct OptionalTable {
  using Pointer = const Table*;
};

template <class Table>
const Table& select_table(Isa isa, const Table* portable, typename OptionalTable<Table>::Pointer avx2,
                          typename OptionalTable<Table>::Pointer avx512, typename OptionalTable<Table>::Pointer neon,
                          typename OptionalTable<Table>::Pointer neon_dotprod) {
  switch (isa) {
    case Isa::avx2: return *avx2;
    case Isa::avx512: return *avx512;
    case Isa::neon: return *neon;
    case Isa::neon_dotprod: return *neon_dotprod;
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
  }                                        \
  namespace neon {                         \
  extern const Table name;                 \
  }                                        \
  namespace neon_dotprod {                 \
  extern const Table name;                 \
  }

// The table `name` for an available instruction set.
#define ROPEWAY_TABLE(name, isa)                                                                       \
  (::ropeway::select_table((isa), &::ropeway::portable::name, ROPEWAY_IF_AVX2(&::ropeway::avx2::name), \
                           ROPEWAY_IF_AVX512(&::ropeway::avx512::name),                                \
                           ROPEWAY_IF_NEON(&::ropeway::neon::name),                                    \
                           ROPEWAY_IF_NEON_DOTPROD(&::ropeway::neon_dotprod::name)))
