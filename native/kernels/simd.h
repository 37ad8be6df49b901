// Sixteen float32 or int32 lanes, whatever the instruction set: one 512-bit register, two 256-bit or four 128-bit
// ones. Kernels are written once over these types and compiled once per instruction set.
//
//   f32x16, i32x16       lanes
//   kVectorRegisters     how many such values fit in registers at once; what tile shapes are chosen by
#pragma once

// Both of Arm's: they differ in the products of 8-bit codes alone.
#if defined(ROPEWAY_ISA_NEON) || defined(ROPEWAY_ISA_NEON_DOTPROD)
#define ROPEWAY_ISA_ANY_NEON 1
#endif

#if defined(ROPEWAY_ISA_AVX512)
#include "kernels/simd_avx512.h"
#elif defined(ROPEWAY_ISA_AVX2)
#include "kernels/simd_avx2.h"
#elif defined(ROPEWAY_ISA_ANY_NEON)
#include "kernels/simd_neon.h"
#else
#include "kernels/simd_portable.h"
#endif
