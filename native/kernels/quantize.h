// Rounding of dense matrices to grouped codes, when a model is loaded.
#pragma once

#include <cstdint>

#include "core/context.h"
#include "core/packed.h"

namespace ropeway {

inline constexpr int kQuantizedGroup = 32;

struct Quantize {
  const void* values;           // [n, k] fp32, bf16 or fp16; rows `row_stride` elements apart
  Layout from;                  // fp32, bf16 or fp16
  std::int64_t n, k;            // k: a multiple of kQuantizedGroup
  std::int64_t row_stride;
  std::int8_t* codes;           // [n, k]
  std::uint16_t* scales;        // fp16 [n, k / kQuantizedGroup]
  std::uint16_t* minimums;      // like scales; nullptr: int8, else int4
};

struct QuantizeKernels {
  // False if a value is not finite, or a scale or a minimum is beyond fp16; what was written is then of no use.
  bool (*quantize)(Context& context, const Quantize& args);
};

ROPEWAY_DECLARE_TABLE(QuantizeKernels, quantize_kernels)

}  // namespace ropeway
