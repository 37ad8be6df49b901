// Weights [n, k] packed for `linear`, the same for every instruction set.
//
// Outputs are cut into panels, padded with zeros to whole ones, so that a vector register holds neighbouring outputs
// and a kernel reads a panel from front to back:
//
//   fp32, fp16   panel of 32 outputs:  [k][32]
//   bf16         panel of 32 outputs:  [ceil(k / 2)][32][2]            k padded with a zero
//   int8         panel of 16 outputs:  [k / 4][16][4]                  bytes, code + 128
//   int4         panel of 16 outputs:  [k / 32][4][16][4]              quad q in the low half of byte q, quad q + 4
//                                                                      in the high half; code + 8, or code when
//                                                                      there are minimums
//   scales, minimums of int8 and int4: [panel][k / group][16]
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/context.h"

namespace ropeway {

enum class Layout : int { fp32, bf16, fp16, int8, int4 };

inline constexpr int kDensePanel = 32;
inline constexpr int kGroupedPanel = 16;

constexpr int panel_width(Layout layout) {
  return layout == Layout::int8 || layout == Layout::int4 ? kGroupedPanel : kDensePanel;
}

struct PackedMatrix {
  Layout layout;
  std::int64_t n, k;
  int group;              // 16 or 32; int4: 32
  bool half_scales;       // scales and minimums are float16, else float32
  int activation_digits;  // 1 or 2: base-256 digits of the codes that inputs of int8 and int4 are quantised to
  const void* data;
  const void* scales;
  const void* minimums;  // nullptr: none
};

// Bytes of `data`, and of `scales` or `minimums`; both are to be aligned to 64 bytes.
std::size_t data_bytes(const PackedMatrix& matrix);
std::size_t scale_bytes(const PackedMatrix& matrix);

// What is packed: rows of fp32, bf16 or fp16 values, or of int8 codes; scales and minimums [n, k / group].
// `row_stride` is in elements.
struct UnpackedMatrix {
  const void* values;
  std::int64_t row_stride;
  const void* scales;
  const void* minimums;
};

// Writes data, scales and minimums of `matrix`.
void pack(Context& context, const PackedMatrix& matrix, const UnpackedMatrix& source);

// Rows `ids` in float32, exactly as `scale * code + minimum` gives them in float32: out [count, k]. The matrix holds
// rows [first, first + n) of a table: if that is a part of it, rows of other parts are zeros, else an id outside throws
// std::out_of_range.
void gather(Context& context, const PackedMatrix& matrix, const std::int32_t* ids, std::int64_t count, float* out,
            std::int64_t first = 0, bool part = false);

}  // namespace ropeway
