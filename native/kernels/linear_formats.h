// How `linear` multiplies: for every layout, the products of some rows and a strip of 32 outputs, added over a range
// of k to sums in memory. Every sum has one accumulator that takes its products in order of k, whatever the number of
// rows at a time, so that its bits depend on its row and its weights alone.
#pragma once

#include "core/packed.h"
#include "kernels/activations.h"
#include "kernels/dot.h"
#include "kernels/simd.h"

namespace ropeway::ROPEWAY_ISA {

inline constexpr int kStrip = 32;  // outputs: a dense panel, or two grouped ones
inline constexpr int kStripVectors = kStrip / 16;
inline constexpr int kStripPanels = kStrip / kGroupedPanel;

// A matrix, and what its format's `prepare` made of the rows that it is multiplied with.
struct Operand {
  const PackedMatrix* weight;
  const std::byte* inputs;
  std::int64_t row_bytes;

  template <class T>
  const T* row_group(std::int64_t first_row) const {
    return reinterpret_cast<const T*>(inputs + first_row * row_bytes);
  }
};

// What to ask memory for, while a block of weights is read: `bytes` per cache line of the block, from `next` on.
struct Ahead {
  const char* next;
  std::int64_t bytes;

  void line() {
    __builtin_prefetch(next);
    next += bytes;
  }
};

// Adds to `sums` [rows][kStrip], or sets them where k0 is 0. `row` begins a group of rows; outputs beyond n get zeros
// or nothing.
using AddStrip = void (*)(const Operand& operand, std::int64_t strip, std::int64_t row, std::int64_t k0,
                          std::int64_t k1, Ahead ahead, float* sums);
using Prepare = void (*)(Context& context, const InputRows& rows, const RowGroups& groups, std::int32_t offset,
                         std::byte* out);

struct Format {
  Prepare prepare;
  std::int32_t offset;  // for `prepare`
  std::int64_t (*row_bytes)(std::int64_t k);
  std::int64_t k_block;       // as much of k is taken at once, a multiple of every group
  int max_rows;               // in a group of rows
  const AddStrip* add_strip;  // [max_rows]: for one row, for two, ...
};

// `step(part)` on the sums [R][kStrip] in memory, kWidth vectors of each row from vector `v` on, held in registers
// meanwhile.
template <int R, int kWidth, class Step>
[[gnu::always_inline]] inline void in_registers(float* sums, int v, bool from_zero, const Step& step) {
  f32x16 part[R][kWidth];
  for (int r = 0; r < R; ++r)
    for (int u = 0; u < kWidth; ++u)
      part[r][u] = from_zero ? zero_f32() : load_f32(sums + r * kStrip + (v + u) * 16);
  step(part);
  for (int r = 0; r < R; ++r)
    for (int u = 0; u < kWidth; ++u) store_f32(sums + r * kStrip + (v + u) * 16, part[r][u]);
}

// ------------------------------------------------------------------------------------------- fp32, fp16 and bf16

// The most rows whose sums fit in registers beside weights and an input, two vectors a row; with few registers it
// pays to take the two halves of a panel one after the other, with twice the rows.
inline constexpr int kMaxDenseRows = kVectorRegisters == 32 ? 12 : kVectorRegisters == 8 ? 6 : 2;

template <int R>
inline constexpr int kDenseWidth = kVectorRegisters == 32 || 2 * R <= kMaxDenseRows ? 2 : 1;

inline f32x16 load_weights(const float* w) { return load_f32(w); }
inline f32x16 load_weights(const std::uint16_t* w) { return load_f16(w); }

// fp32 and fp16: products in float32.
template <class Stored>
struct Float32Format {
  static constexpr int kMaxRows = kMaxDenseRows;

  template <int R>
  static void add_strip(const Operand& operand, std::int64_t strip, std::int64_t row, std::int64_t k0, std::int64_t k1,
                        Ahead ahead, float* sums) {
    constexpr int kWidth = kDenseWidth<R>;
    const auto* const panel = static_cast<const Stored*>(operand.weight->data) + strip * operand.weight->k * kStrip;
    for (int v = 0; v < kStripVectors; v += kWidth) {
      in_registers<R, kWidth>(sums, v, k0 == 0, [&](f32x16(&part)[R][kWidth]) {
        const Stored* w = panel + k0 * kStrip + v * 16;
        const float* in = operand.row_group<float>(row) + k0 * R;
#pragma GCC unroll 2
        for (std::int64_t i = k0; i < k1; ++i, w += kStrip, in += R) {
          f32x16 values[kWidth];
          for (int u = 0; u < kWidth; ++u) {
            values[u] = load_weights(w + u * 16);
            if (u * sizeof(Stored) % 4 == 0) ahead.line();
          }
          for (int r = 0; r < R; ++r) {
            const f32x16 input = set_f32(in[r]);
            for (int u = 0; u < kWidth; ++u) part[r][u] = fma(input, values[u], part[r][u]);
          }
        }
      });
    }
  }
};

struct Bf16Format {
  static constexpr int kMaxRows = kMaxDenseRows;

  template <int R>
  static void add_strip(const Operand& operand, std::int64_t strip, std::int64_t row, std::int64_t k0, std::int64_t k1,
                        Ahead ahead, float* sums) {
    constexpr int kWidth = kDenseWidth<R>;
    const std::int64_t padded_k = operand.weight->k + operand.weight->k % 2;
    const auto* const panel = static_cast<const std::uint16_t*>(operand.weight->data) + strip * padded_k * kStrip;
    for (int v = 0; v < kStripVectors; v += kWidth) {
      in_registers<R, kWidth>(sums, v, k0 == 0, [&](f32x16(&part)[R][kWidth]) {
        const std::uint16_t* w = panel + k0 * kStrip + v * 32;
        const Bf16Input* in = operand.row_group<Bf16Input>(row) + k0 * R;
#pragma GCC unroll 2
        for (std::int64_t i = k0; i < k1; i += 2, w += 2 * kStrip, in += 2 * R) {
          Bf16Pair pairs[kWidth];
          for (int u = 0; u < kWidth; ++u) {
            pairs[u] = load_pair(w + u * 32);
            ahead.line();
          }
          for (int r = 0; r < R; ++r)
            for (int u = 0; u < kWidth; ++u) part[r][u] = dot_bf16(part[r][u], pairs[u], in + 2 * r);
        }
      });
    }
  }
};

// ------------------------------------------------------------------------------------------------- int8 and int4

inline f32x16 load_scales(const float* p) { return load_f32(p); }
inline f32x16 load_scales(const std::uint16_t* p) { return load_f16(p); }

inline constexpr int kMaxGroupedRows = kVectorRegisters == 32 ? 12 : kVectorRegisters == 8 ? 4 : 1;

// Exact integer sums inside a group, then sum = fma(integer, weight scale * input scale, sum).
//
// Codes are stored unsigned, `code + kOffset`: the last pass over a group starts at -kOffset times the sum of the
// input's codes.
template <int kBits, int kGroup, class Scale, bool kMinimums, int kDigits>
struct GroupedFormat {
  static constexpr int kMaxRows = kMaxGroupedRows;
  // With so few rows there are registers for the sums of both digits at once, and codes are unpacked once. (Where there
  // is nothing to unpack it is slower than two passes: 25 instead of 33 GB/s for one row.)
  static constexpr int kMostRowsOfBothDigits = kBits == 4 && kVectorRegisters == 32 ? 6 : 0;
  static constexpr int kOffset = kBits == 8 ? kByteOffset : kMinimums ? 0 : 8;
  static constexpr int kGroupBytes = kGroup * kGroupedPanel * kBits / 8;

  using Record = CodeRecord<kGroup, kDigits>;

  template <int R>
  static void add_strip(const Operand& operand, std::int64_t strip, std::int64_t row, std::int64_t k0, std::int64_t k1,
                        Ahead ahead, float* sums) {
    const PackedMatrix& weight = *operand.weight;
    const std::int64_t groups = weight.k / kGroup;
    for (int v = 0; v < kStripPanels && (strip * kStripPanels + v) * kGroupedPanel < weight.n; ++v) {
      in_registers<R, 1>(sums, v, k0 == 0, [&](f32x16(&part)[R][1]) {
        const std::int64_t first = (strip * kStripPanels + v) * groups;
        const std::byte* in = operand.row_group<std::byte>(row) + k0 / kGroup * (R * Record::size);
        for (std::int64_t g = first + k0 / kGroup; g < first + k1 / kGroup; ++g, in += R * Record::size) {
          add_group(part, weight, g, in, ahead);
        }
      });
    }
  }

 private:
  template <int R>
  [[gnu::always_inline]] static inline void add_group(f32x16 (&sums)[R][1], const PackedMatrix& weight, std::int64_t g,
                                                      const std::byte* in, Ahead& ahead) {
    const auto* const w = static_cast<const std::uint8_t*>(weight.data) + g * kGroupBytes;
    CodeSum integers[R];
    if constexpr (kPasses<kDigits> == 1) {
      for (int r = 0; r < R; ++r) integers[r] = set_sum(read<std::int32_t>(in + Record::correction(R, r)));
      add_products<0>(integers, w, in, ahead);
    } else if constexpr (R <= kMostRowsOfBothDigits) {
      CodeSum high[R];
      for (int r = 0; r < R; ++r) integers[r] = high[r] = set_sum(0);
      add_products_of_both_digits(high, integers, w, in, ahead);
      for (int r = 0; r < R; ++r) {
        integers[r] = sum_digits(high[r], integers[r], read<std::int32_t>(in + Record::correction(R, r)));
      }
    } else {
      for (int r = 0; r < R; ++r) integers[r] = set_sum(0);
      add_products<0>(integers, w, in, ahead);
      for (int r = 0; r < R; ++r) {
        integers[r] = next_digit(integers[r], read<std::int32_t>(in + Record::correction(R, r)));
      }
      add_products<1>(integers, w, in, ahead);
    }
    const f32x16 scale = load_scales(static_cast<const Scale*>(weight.scales) + g * kGroupedPanel);
    for (int r = 0; r < R; ++r) {
      const f32x16 both_scales = mul(scale, set_f32(read<float>(in + Record::scale(R, r))));
      sums[r][0] = fma(to_f32(integers[r]), both_scales, sums[r][0]);
    }
    if constexpr (kMinimums) {
      const f32x16 minimum = load_scales(static_cast<const Scale*>(weight.minimums) + g * kGroupedPanel);
      for (int r = 0; r < R; ++r) {
        sums[r][0] = fma(minimum, set_f32(read<float>(in + Record::sum(R, r))), sums[r][0]);
      }
    }
  }

  // A group's weight codes times one pass of the rows' codes.
  template <int kPass, int R>
  [[gnu::always_inline]] static inline void add_products(CodeSum (&integers)[R], const std::uint8_t* w,
                                                         const std::byte* in, Ahead& ahead) {
#pragma GCC unroll 8
    for (int block = 0; block < kGroupBytes / 64; ++block) {
      const Codes stored = load_codes(w + block * 64);
      if (kPass == 0) ahead.line();
      if constexpr (kBits == 8) {
        const Codes bytes = whole_bytes(stored);
        for (int r = 0; r < R; ++r) integers[r] = dot_codes(integers[r], bytes, quad<kPass>(in, R, block, r));
      } else {
        const Codes low = low_halves(stored), high = high_halves(stored);
        for (int r = 0; r < R; ++r) integers[r] = dot_codes(integers[r], low, quad<kPass>(in, R, block, r));
        for (int r = 0; r < R; ++r) integers[r] = dot_codes(integers[r], high, quad<kPass>(in, R, block + 4, r));
      }
    }
  }

  // The same with both digits of the rows' codes side by side.
  template <int R>
  [[gnu::always_inline]] static inline void add_products_of_both_digits(CodeSum (&high)[R], CodeSum (&low)[R],
                                                                        const std::uint8_t* w, const std::byte* in,
                                                                        Ahead& ahead) {
    const auto add_codes = [&](Codes codes, int index) {
      for (int r = 0; r < R; ++r) {
        high[r] = dot_codes(high[r], codes, quad<0>(in, R, index, r));
        low[r] = dot_codes(low[r], codes, quad<1>(in, R, index, r));
      }
    };
#pragma GCC unroll 4
    for (int block = 0; block < kGroupBytes / 64; ++block) {
      const Codes stored = load_codes(w + block * 64);
      ahead.line();
      add_codes(low_halves(stored), block);
      add_codes(high_halves(stored), block + 4);
    }
  }

  template <class T>
  static T read(const std::byte* p) {
    T value;
    std::memcpy(&value, p, sizeof value);
    return value;
  }

  template <int kPass>
  static const CodeInput* quad(const std::byte* record, int rows, int index, int row) {
    return reinterpret_cast<const CodeInput*>(record + Record::code(rows, kPass, index, row));
  }
};

// -------------------------------------------------------------------------------------------- format of a matrix

// `add_strip` of a format, for every number of rows.
template <class Products>
struct StripTable {
  AddStrip functions[Products::kMaxRows];

  constexpr StripTable() : functions() { fill<Products::kMaxRows>(); }

 private:
  template <int R>
  constexpr void fill() {
    if constexpr (R > 0) {
      functions[R - 1] = &Products::template add_strip<R>;
      fill<R - 1>();
    }
  }
};

template <class Products>
inline constexpr StripTable<Products> kStrips{};

template <class Products>
constexpr Format make_format(Prepare prepare, std::int32_t offset, std::int64_t (*row_bytes)(std::int64_t),
                             std::int64_t k_block) {
  return {prepare, offset, row_bytes, k_block, Products::kMaxRows, kStrips<Products>.functions};
}

template <int kBits, int kGroup, class Scale, bool kMinimums, int kDigits>
constexpr Format grouped_format() {
  using Products = GroupedFormat<kBits, kGroup, Scale, kMinimums, kDigits>;
  constexpr std::int64_t k_block = (kBits == 8 ? 8192 : 16384) / kDigits;
  return make_format<Products>(&prepare_codes<kGroup, kDigits>, Products::kOffset, &code_row_bytes<kGroup, kDigits>,
                               k_block);
}

template <int kBits, int kGroup, class Scale>
inline Format scaled_format(const PackedMatrix& weight) {
  const bool one_digit = weight.activation_digits == 1;
  if (weight.minimums != nullptr) {
    return one_digit ? grouped_format<kBits, kGroup, Scale, true, 1>()
                     : grouped_format<kBits, kGroup, Scale, true, 2>();
  }
  return one_digit ? grouped_format<kBits, kGroup, Scale, false, 1>()
                   : grouped_format<kBits, kGroup, Scale, false, 2>();
}

template <int kBits, int kGroup>
inline Format any_scaled_format(const PackedMatrix& weight) {
  return weight.half_scales ? scaled_format<kBits, kGroup, std::uint16_t>(weight)
                            : scaled_format<kBits, kGroup, float>(weight);
}

inline Format format_of(const PackedMatrix& weight) {
  switch (weight.layout) {
    case Layout::fp32: return make_format<Float32Format<float>>(&prepare_f32, 0, &f32_row_bytes, 1024);
    case Layout::fp16: return make_format<Float32Format<std::uint16_t>>(&prepare_f32, 0, &f32_row_bytes, 1024);
    case Layout::bf16: return make_format<Bf16Format>(&prepare_bf16, 0, &bf16_row_bytes, 2048);
    case Layout::int8: return weight.group == 32 ? any_scaled_format<8, 32>(weight) : any_scaled_format<8, 16>(weight);
    case Layout::int4: break;
  }
  return any_scaled_format<4, 32>(weight);
}

}  // namespace ropeway::ROPEWAY_ISA
