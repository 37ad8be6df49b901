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
#include "kernels/rms_norm.h"
#include "kernels/simd.h"

namespace ropeway::ROPEWAY_ISA {

// Rows [begin(i), begin(i + 1)) are group i; sizes differ by one at most.
struct RowGroups {
  std::int64_t rows, count;

  RowGroups(std::int64_t rows, int max_rows) : rows(rows), count((rows + max_rows - 1) / max_rows) {}
  std::int64_t begin(std::int64_t i) const { return rows * i / count; }
};

// Rows of x [rows, k], RMS-normed on the way where there is a norm.
struct InputRows {
  const float* x;
  std::int64_t k;
  const float* norm_weight;  // [k] or nullptr
  float norm_eps;
  float* normed;  // [workers, k] where there is a norm

  const float* row(std::int64_t index, int worker) const {
    const float* const from = x + index * k;
    if (norm_weight == nullptr) return from;
    rms_norm_row(from, norm_weight, norm_eps, k, normed + worker * k);
    return normed + worker * k;
  }
};

// `body(row, first_row, rows_of_the_group, r)` for every row, row r of its group, on all threads when that pays.
template <class Body>
inline void for_input_rows(Context& context, const InputRows& rows, const RowGroups& groups, const Body& body) {
  constexpr std::int64_t serial_elements = 1 << 14;  // waking threads takes as long as converting some thousands
  const std::int64_t elements = groups.rows * rows.k;
  const std::int64_t per_tile =
      elements > serial_elements ? groups.count * serial_elements / elements + 1 : groups.count;
  parallel(context, (groups.count + per_tile - 1) / per_tile, [&](std::int64_t tile, int worker) {
    const std::int64_t end = (tile + 1) * per_tile < groups.count ? (tile + 1) * per_tile : groups.count;
    for (std::int64_t i = tile * per_tile; i < end; ++i) {
      const std::int64_t first = groups.begin(i);
      const int count = static_cast<int>(groups.begin(i + 1) - first);
      for (int r = 0; r < count; ++r) body(rows.row(first + r, worker), first, count, r);
    }
  });
}

constexpr std::int64_t f32_row_bytes(std::int64_t k) { return k * static_cast<std::int64_t>(sizeof(float)); }

inline void prepare_f32(Context& context, const InputRows& rows, const RowGroups& groups, std::int32_t,
                        std::byte* out) {
  const std::int64_t k = rows.k;
  for_input_rows(context, rows, groups, [&](const float* from, std::int64_t first, int count, int r) {
    float* const to = reinterpret_cast<float*>(out) + first * k + r;
    for (std::int64_t i = 0; i < k; ++i) to[i * count] = from[i];
  });
}

constexpr std::int64_t bf16_row_bytes(std::int64_t k) {
  return (k + k % 2) * static_cast<std::int64_t>(sizeof(Bf16Input));
}

// Rounded to bfloat16; an odd k is padded with a zero.
inline void prepare_bf16(Context& context, const InputRows& rows, const RowGroups& groups, std::int32_t,
                         std::byte* out) {
  const std::int64_t k = rows.k;
  for_input_rows(context, rows, groups, [&](const float* from, std::int64_t first, int count, int r) {
    Bf16Input* to = reinterpret_cast<Bf16Input*>(out + first * bf16_row_bytes(k)) + r * 2;
    for (std::int64_t i = 0; i < k; i += 16) {
      const int lanes = k - i < 16 ? static_cast<int>(k - i) : 16;
      Bf16Input values[16];
      store_bf16(values, load_some(from + i, lanes));
      for (int j = 0; j < lanes; j += 2, to += 2 * count) std::memcpy(to, values + j, 2 * sizeof(Bf16Input));
    }
  });
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

template <int kGroup, int kDigits>
constexpr std::int64_t code_row_bytes(std::int64_t k) {
  return k / kGroup * CodeRecord<kGroup, kDigits>::size;
}

// Quantised per row and group of 32 features (what is left of k at the end may be 16). A record's correction is
// `-offset` times the sum of its codes, its sum is scale times that of its codes.
template <int kGroup, int kDigits>
inline void prepare_codes(Context& context, const InputRows& rows, const RowGroups& groups, std::int32_t offset,
                          std::byte* out) {
  using Record = CodeRecord<kGroup, kDigits>;
  const std::int64_t k = rows.k;
  for_input_rows(context, rows, groups, [&](const float* from, std::int64_t first, int count, int r) {
    std::byte* record = out + first * code_row_bytes<kGroup, kDigits>(k);
    for (std::int64_t i = 0; i < k; i += 32) {
      const bool whole = i + 32 <= k;
      QuantizedGroup<kDigits> group = quantize<kDigits>(from + i, whole);
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
  });
}

}  // namespace ropeway::ROPEWAY_ISA
