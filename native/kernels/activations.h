// Inputs of `linear` as its inner loops want them, made once per call in scratch memory.
//
// Rows are cut into groups of a format's `max_rows`, whose sums fit in registers. Inside a group the rows are
// interleaved, so that an inner loop reads its inputs from front to back at offsets known to the compiler, whatever k
// is:
//
//   fp32, fp16   [k][rows of the group]
//   bf16         [ceil(k / 2)][rows of the group][2]
//   int8, int4   a record per group of weights: codes [passes][group / 4][rows][4], corrections, scales, sums [rows]
//
// A row takes the same space in every group, so a group's inputs begin at its first row times that.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/dot.h"
#include "kernels/parallel.h"
#include "kernels/simd.h"

namespace ropeway::ROPEWAY_ISA {

// Rows [begin(i), begin(i + 1)) are group i; sizes differ by one at most.
struct RowGroups {
  std::int64_t rows, count;

  RowGroups(std::int64_t rows, int max_rows) : rows(rows), count((rows + max_rows - 1) / max_rows) {}
  std::int64_t begin(std::int64_t i) const { return rows * i / count; }
};

template <class T>
struct Inputs {
  const T* data;
  std::int64_t row_size;

  const T* group(std::int64_t first_row) const { return data + first_row * row_size; }
};

// `body(first_row, rows_of_the_group)` for every group of rows, on all threads when that pays.
template <class Body>
inline void for_row_groups(Context& context, const RowGroups& groups, std::int64_t k, const Body& body) {
  constexpr std::int64_t serial_elements = 1 << 14;  // waking threads takes as long as converting some thousands
  const std::int64_t elements = groups.rows * k;
  const std::int64_t per_tile =
      elements > serial_elements ? groups.count * serial_elements / elements + 1 : groups.count;
  parallel(context, (groups.count + per_tile - 1) / per_tile, [&](std::int64_t tile, int) {
    const std::int64_t end = (tile + 1) * per_tile < groups.count ? (tile + 1) * per_tile : groups.count;
    for (std::int64_t i = tile * per_tile; i < end; ++i) {
      body(groups.begin(i), static_cast<int>(groups.begin(i + 1) - groups.begin(i)));
    }
  });
}

inline Inputs<float> prepare_f32(Context& context, const float* x, const RowGroups& groups, std::int64_t k) {
  if (groups.rows == 1) return {x, k};
  float* const out =
      reinterpret_cast<float*>(context.scratch(static_cast<std::size_t>(groups.rows * k) * sizeof(float)));
  for_row_groups(context, groups, k, [&](std::int64_t first, int count) {
    const float* const from = x + first * k;
    float* const to = out + first * k;
    for (std::int64_t i = 0; i < k; ++i)
      for (int r = 0; r < count; ++r) to[i * count + r] = from[r * k + i];
  });
  return {out, k};
}

// Rounded to bfloat16; an odd k is padded with a zero.
inline Inputs<Bf16Input> prepare_bf16(Context& context, const float* x, const RowGroups& groups, std::int64_t k) {
  const std::int64_t row_size = k + k % 2;
  const std::size_t size = static_cast<std::size_t>(groups.rows * row_size) * sizeof(Bf16Input);
  auto* const out = reinterpret_cast<Bf16Input*>(context.scratch(size));
  for_row_groups(context, groups, k, [&](std::int64_t first, int count) {
    for (int r = 0; r < count; ++r) {
      const float* const from = x + (first + r) * k;
      Bf16Input* to = out + first * row_size + r * 2;
      for (std::int64_t i = 0; i < k; i += 16) {
        const int lanes = k - i < 16 ? static_cast<int>(k - i) : 16;
        Bf16Input values[16];
        store_bf16(values, lanes == 16 ? load_f32(from + i) : load_f32(from + i, lanes));
        for (int j = 0; j < lanes; j += 2, to += 2 * count) std::memcpy(to, values + j, 2 * sizeof(Bf16Input));
      }
    }
  });
  return {out, row_size};
}

// Where a record of `kGroup` features of `rows` rows holds what; bytes.
template <int kGroup, int kDigits>
struct CodeRecord {
  static constexpr std::int64_t codes_size = kPasses<kDigits> * kGroup * sizeof(CodeInput);
  static constexpr std::int64_t size = codes_size + 12;

  static constexpr std::int64_t code(int rows, int pass, int quad, int row) {
    return ((pass * (kGroup / 4) + quad) * rows + row) * 4 * static_cast<std::int64_t>(sizeof(CodeInput));
  }
  static constexpr std::int64_t correction(int rows, int row) { return rows * codes_size + row * 4; }
  static constexpr std::int64_t scale(int rows, int row) { return rows * (codes_size + 4) + row * 4; }
  static constexpr std::int64_t sum(int rows, int row) { return rows * (codes_size + 8) + row * 4; }
};

// The largest code: 127 * 256^(digits - 1), so that every digit fits in int8.
template <int kDigits>
inline constexpr float kMaxCode = kDigits == 1 ? 127.0F : 32512.0F;

// Sixteen or thirty-two features quantised with one scale: value = scale * code, scale = max |value| / largest code,
// code = value / scale rounded to the nearest, ties to even.
template <int kDigits>
struct QuantizedGroup {
  CodeInput codes[kPasses<kDigits>][kStoredCodes];
  std::int32_t code_sums[2];  // of each half
  float scale;
};

template <int kDigits>
inline QuantizedGroup<kDigits> quantize(const float* x, bool whole) {
  const f32x16 halves[2] = {load_f32(x), whole ? load_f32(x + 16) : zero_f32()};
  // Found in the bits, so that a NaN gives a NaN scale, which poisons the row's results as it should.
  const std::int32_t most_bits = reduce_max(max(abs_bits(halves[0]), abs_bits(halves[1])));
  float most;
  std::memcpy(&most, &most_bits, sizeof most);
  QuantizedGroup<kDigits> group;
  group.scale = most / kMaxCode<kDigits>;
  constexpr float largest = 0x1.fffffeP+127F;  // in place of an infinite inverse, so that zeros stay zeros
  const float inverse = 1.0F / group.scale < largest ? 1.0F / group.scale : largest;
  for (int half = 0; half < 2; ++half) {
    const f32x16 scaled = mul(halves[half], set_f32(inverse));
    // The bounds matter only to what is not finite.
    const i32x16 codes = to_i32(min(max(scaled, set_f32(-kMaxCode<kDigits>)), set_f32(kMaxCode<kDigits>)));
    store_codes<kDigits>(group.codes[0] + 16 * half, codes);
    group.code_sums[half] = reduce_add(codes);
  }
  return group;
}

// Quantised per row and group of 32 features (what is left of k at the end may be 16). A record's correction is
// `-offset` times the sum of its codes, its sum is scale times that of its codes.
template <int kGroup, int kDigits>
inline Inputs<std::byte> prepare_codes(Context& context, const float* x, const RowGroups& groups, std::int64_t k,
                                       std::int32_t offset) {
  using Record = CodeRecord<kGroup, kDigits>;
  const std::int64_t row_size = k / kGroup * Record::size;
  std::byte* const out = context.scratch(static_cast<std::size_t>(groups.rows * row_size));
  for_row_groups(context, groups, k, [&](std::int64_t first, int count) {
    for (int r = 0; r < count; ++r) {
      std::byte* record = out + first * row_size;
      for (std::int64_t i = 0; i < k; i += 32) {
        const bool whole = i + 32 <= k;
        QuantizedGroup<kDigits> group = quantize<kDigits>(x + (first + r) * k + i, whole);
        if (kGroup == 32) group.code_sums[0] += group.code_sums[1];
        for (int part = 0; part < (whole ? 32 : 16) / kGroup; ++part, record += count * Record::size) {
          for (int pass = 0; pass < kPasses<kDigits>; ++pass) {
            const CodeInput* const codes = group.codes[pass] + part * kGroup;
            for (int quad = 0; quad < kGroup / 4; ++quad) {
              std::memcpy(record + Record::code(count, pass, quad, r), codes + quad * 4, 4 * sizeof(CodeInput));
            }
          }
          const std::int32_t correction = -offset * group.code_sums[part];
          const float sum = group.scale * static_cast<float>(group.code_sums[part]);
          std::memcpy(record + Record::correction(count, r), &correction, 4);
          std::memcpy(record + Record::scale(count, r), &group.scale, 4);
          std::memcpy(record + Record::sum(count, r), &sum, 4);
        }
      }
    }
  });
  return {out, row_size};
}

}  // namespace ropeway::ROPEWAY_ISA
