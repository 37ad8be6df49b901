#include "kernels/linear.h"

#include "kernels/activations.h"
#include "kernels/dot.h"
#include "kernels/parallel.h"
#include "kernels/simd.h"

// One driver for all layouts. A tile of the work is some panels of outputs for some rows of x. Inside it: blocks of
// k, so that a panel's block and the rows' inputs stay in the L2 cache; then panels; then groups of rows,
// whose sums live in registers while a panel's block is read from front to back.
//
// Every sum has one accumulator that takes its products in order of k, and rests in `out` between two blocks of k
// (storing a float32 changes nothing). So its bits depend on its row and its weights alone, whatever the tiles.

namespace ropeway::ROPEWAY_ISA {
namespace {

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Asks for weights that will be read soon; past the end of a panel comes the next one.
inline void prefetch(const void* weights) { __builtin_prefetch(static_cast<const char*>(weights) + 2048); }

// ------------------------------------------------------------------------------------------------------ layouts
// A format knows its inputs and adds the products of R rows and one panel over [k0, k1) to their sums.

// The most rows whose sums fit in registers beside weights and an input, two vectors a row; with few registers it
// pays to take the two halves of a panel one after the other, with twice the rows.
constexpr int kMaxDenseRows = kVectorRegisters == 32 ? 12 : kVectorRegisters == 8 ? 6 : 2;

template <int R>
constexpr int vectors_at_once = kVectorRegisters == 32 || 2 * R <= kMaxDenseRows ? 2 : 1;

// `step(part, v)` for parts of the sums, kAtOnce vectors a row beginning at v; a part of its own, copied in and out,
// so that the compiler sees that it can stay in registers.
template <int R, int kVectors, class Step>
[[gnu::always_inline]] inline void in_parts(f32x16 (&sums)[R][kVectors], const Step& step) {
  constexpr int kAtOnce = vectors_at_once<R>;
  for (int v = 0; v < kVectors; v += kAtOnce) {
    f32x16 part[R][kAtOnce];
    for (int r = 0; r < R; ++r)
      for (int u = 0; u < kAtOnce; ++u) part[r][u] = sums[r][v + u];
    step(part, v);
    for (int r = 0; r < R; ++r)
      for (int u = 0; u < kAtOnce; ++u) sums[r][v + u] = part[r][u];
  }
}

inline f32x16 load_weights(const float* w) { return load_f32(w); }
inline f32x16 load_weights(const std::uint16_t* w) { return load_f16(w); }

// fp32 and fp16: products in float32.
template <class Stored>
struct Float32Format {
  static constexpr int kVectors = kDensePanel / 16;
  static constexpr int kMaxRows = kMaxDenseRows;
  static constexpr std::int64_t kBlock = 1024;

  const Stored* weights;
  std::int64_t k;
  Inputs<float> x;

  Float32Format(Context& context, const PackedMatrix& weight, const Linear& args, const RowGroups& row_groups)
      : weights(static_cast<const Stored*>(weight.data)),
        k(weight.k),
        x(prepare_f32(context, args.x, row_groups, weight.k)) {}

  std::int64_t panel_bytes() const { return k * kDensePanel * static_cast<std::int64_t>(sizeof(Stored)); }

  template <int R>
  [[gnu::always_inline]] inline void accumulate(f32x16 (&sums)[R][kVectors], std::int64_t panel, std::int64_t row,
                                                std::int64_t k0, std::int64_t k1) const {
    constexpr int kAtOnce = vectors_at_once<R>;
    in_parts(sums, [&](f32x16(&part)[R][kAtOnce], int v) {
      const Stored* w = weights + (panel * k + k0) * kDensePanel + v * 16;
      const float* in = x.group(row) + k0 * R;
#pragma GCC unroll 2
      for (std::int64_t i = k0; i < k1; ++i, w += kDensePanel, in += R) {
        f32x16 values[kAtOnce];
        for (int u = 0; u < kAtOnce; ++u) {
          values[u] = load_weights(w + u * 16);
          if (u * sizeof(Stored) % 4 == 0) prefetch(w + u * 16);  // once per cache line
        }
        for (int r = 0; r < R; ++r) {
          const f32x16 input = set_f32(in[r]);
          for (int u = 0; u < kAtOnce; ++u) part[r][u] = fma(input, values[u], part[r][u]);
        }
      }
    });
  }
};

struct Bf16Format {
  static constexpr int kVectors = kDensePanel / 16;
  static constexpr int kMaxRows = kMaxDenseRows;
  static constexpr std::int64_t kBlock = 2048;

  const std::uint16_t* weights;
  std::int64_t padded_k;
  Inputs<Bf16Input> x;

  Bf16Format(Context& context, const PackedMatrix& weight, const Linear& args, const RowGroups& row_groups)
      : weights(static_cast<const std::uint16_t*>(weight.data)),
        padded_k(weight.k + weight.k % 2),
        x(prepare_bf16(context, args.x, row_groups, weight.k)) {}

  std::int64_t panel_bytes() const { return padded_k * kDensePanel * 2; }

  template <int R>
  [[gnu::always_inline]] inline void accumulate(f32x16 (&sums)[R][kVectors], std::int64_t panel, std::int64_t row,
                                                std::int64_t k0, std::int64_t k1) const {
    constexpr int kAtOnce = vectors_at_once<R>;
    in_parts(sums, [&](f32x16(&part)[R][kAtOnce], int v) {
      const std::uint16_t* w = weights + (panel * padded_k + k0) * kDensePanel + v * 32;
      const Bf16Input* in = x.group(row) + k0 * R;
#pragma GCC unroll 2
      for (std::int64_t i = k0; i < k1; i += 2, w += 2 * kDensePanel, in += 2 * R) {
        Bf16Pair pairs[kAtOnce];
        for (int u = 0; u < kAtOnce; ++u) {
          pairs[u] = load_pair(w + u * 32);
          prefetch(w + u * 32);
        }
        for (int r = 0; r < R; ++r)
          for (int u = 0; u < kAtOnce; ++u) part[r][u] = dot_bf16(part[r][u], pairs[u], in + 2 * r);
      }
    });
  }
};

inline f32x16 load_scales(const float* p) { return load_f32(p); }
inline f32x16 load_scales(const std::uint16_t* p) { return load_f16(p); }

// int8 and int4: exact integer sums inside a group, then sum = fma(integer, weight scale * input scale, sum).
//
// Codes are stored unsigned, `code + kOffset`: the last pass over a group starts at -kOffset times the sum of the
// input's codes.
template <int kBits, int kGroup, class Scale, bool kMinimums, int kDigits>
struct GroupedFormat {
  static constexpr int kVectors = kGroupedPanel / 16;
  static constexpr int kMaxRows = kVectorRegisters == 32 ? 12 : kVectorRegisters == 8 ? 4 : 1;
  static constexpr std::int64_t kBlock = (kBits == 8 ? 8192 : 16384) / kDigits;
  static constexpr int kOffset = kBits == 8 ? 128 : kMinimums ? 0 : 8;
  static constexpr int kGroupBytes = kGroup * kGroupedPanel * kBits / 8;

  using Record = CodeRecord<kGroup, kDigits>;

  const std::uint8_t* codes;
  const Scale* scales;
  const Scale* minimums;
  std::int64_t groups;
  Inputs<std::byte> x;

  GroupedFormat(Context& context, const PackedMatrix& weight, const Linear& args, const RowGroups& row_groups)
      : codes(static_cast<const std::uint8_t*>(weight.data)),
        scales(static_cast<const Scale*>(weight.scales)),
        minimums(static_cast<const Scale*>(weight.minimums)),
        groups(weight.k / kGroup),
        x(prepare_codes<kGroup, kDigits>(context, args.x, row_groups, weight.k, kOffset)) {}

  std::int64_t panel_bytes() const {
    constexpr std::int64_t scale_bytes = sizeof(Scale) * kGroupedPanel * (kMinimums ? 2 : 1);
    return groups * (kGroupBytes + scale_bytes);
  }

  template <int R>
  [[gnu::always_inline]] inline void accumulate(f32x16 (&sums)[R][kVectors], std::int64_t panel, std::int64_t row,
                                                std::int64_t k0, std::int64_t k1) const {
    const std::int64_t first = panel * groups;
    const std::byte* in = x.group(row) + k0 / kGroup * (R * Record::size);
    for (std::int64_t g = first + k0 / kGroup; g < first + k1 / kGroup; ++g, in += R * Record::size) {
      const std::uint8_t* const w = codes + g * kGroupBytes;
      CodeSum integers[R];
      if constexpr (kPasses<kDigits> == 1) {
        for (int r = 0; r < R; ++r) integers[r] = set_sum(read<std::int32_t>(in + Record::correction(R, r)));
        add_products<0>(integers, w, in);
      } else {
        for (int r = 0; r < R; ++r) integers[r] = set_sum(0);
        add_products<0>(integers, w, in);
        for (int r = 0; r < R; ++r) {
          integers[r] = next_digit(integers[r], read<std::int32_t>(in + Record::correction(R, r)));
        }
        add_products<1>(integers, w, in);
      }
      const f32x16 scale = load_scales(scales + g * kGroupedPanel);
      for (int r = 0; r < R; ++r) {
        const f32x16 both_scales = mul(scale, set_f32(read<float>(in + Record::scale(R, r))));
        sums[r][0] = fma(to_f32(integers[r]), both_scales, sums[r][0]);
      }
      if constexpr (kMinimums) {
        const f32x16 minimum = load_scales(minimums + g * kGroupedPanel);
        for (int r = 0; r < R; ++r) {
          sums[r][0] = fma(minimum, set_f32(read<float>(in + Record::sum(R, r))), sums[r][0]);
        }
      }
    }
  }

 private:
  // A group's weight codes times one pass of the rows' codes.
  template <int kPass, int R>
  [[gnu::always_inline]] static inline void add_products(CodeSum (&integers)[R], const std::uint8_t* w,
                                                         const std::byte* in) {
#pragma GCC unroll 8
    for (int block = 0; block < kGroupBytes / 64; ++block) {
      const Codes stored = load_codes(w + block * 64);
      if (kPass == 0) prefetch(w + block * 64);
      if constexpr (kBits == 8) {
        for (int r = 0; r < R; ++r) integers[r] = dot_codes(integers[r], stored, quad<kPass>(in, R, block, r));
      } else {
        const Codes low = low_halves(stored), high = high_halves(stored);
        for (int r = 0; r < R; ++r) integers[r] = dot_codes(integers[r], low, quad<kPass>(in, R, block, r));
        for (int r = 0; r < R; ++r) integers[r] = dot_codes(integers[r], high, quad<kPass>(in, R, block + 4, r));
      }
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

// ------------------------------------------------------------------------------------------------------- driver

// Lanes of vector `v` of panel `panel` that are real outputs.
template <int kVectors>
inline int lanes(std::int64_t n, std::int64_t panel, int v) {
  const std::int64_t left = n - (panel * kVectors + v) * 16;
  return left >= 16 ? 16 : left > 0 ? static_cast<int>(left) : 0;
}

template <int R, class Format>
void compute_rows(const Format& format, const Linear& args, const PackedMatrix& weight, std::int64_t panel,
                  std::int64_t row, std::int64_t k0, std::int64_t k1) {
  constexpr int kVectors = Format::kVectors;
  float* const out = args.out + row * weight.n + panel * kVectors * 16;
  f32x16 sums[R][kVectors];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v)
      sums[r][v] = k0 == 0 ? zero_f32() : load_f32(out + r * weight.n + v * 16, lanes<kVectors>(weight.n, panel, v));
  format.accumulate(sums, panel, row, k0, k1);
  if (args.bias != nullptr && k1 == weight.k) {
    for (int v = 0; v < kVectors; ++v) {
      const f32x16 bias = load_f32(args.bias + (panel * kVectors + v) * 16, lanes<kVectors>(weight.n, panel, v));
      for (int r = 0; r < R; ++r) sums[r][v] = add(sums[r][v], bias);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v)
      store_f32(out + r * weight.n + v * 16, sums[r][v], lanes<kVectors>(weight.n, panel, v));
}

// `compute_rows` for a number of rows in [1, Format::kMaxRows] known at run time.
template <class Format, int R = Format::kMaxRows>
inline void compute_rows(int rows, const Format& format, const Linear& args, const PackedMatrix& weight,
                         std::int64_t panel, std::int64_t row, std::int64_t k0, std::int64_t k1) {
  if constexpr (R > 1) {
    if (rows < R) return compute_rows<Format, R - 1>(rows, format, args, weight, panel, row, k0, k1);
  }
  compute_rows<R>(format, args, weight, panel, row, k0, k1);
}

// Part `i` of `parts` nearly equal ones of [0, size) begins at `part_begin(size, parts, i)`.
inline std::int64_t part_begin(std::int64_t size, std::int64_t parts, std::int64_t i) { return size * i / parts; }

struct Tiling {
  std::int64_t row_parts, panel_parts;
};

// Tiles big enough to be worth claiming (some microseconds), small enough to share out evenly.
inline Tiling choose_tiling(std::int64_t rows, std::int64_t panels, std::int64_t panel_bytes, int threads) {
  constexpr std::int64_t rows_per_part = 96;
  constexpr std::int64_t tile_cost = 96 << 10;
  const std::int64_t row_parts = ceil_div(rows, rows_per_part);
  // Measured in bytes read once; a row on top costs about a quarter of reading the panel for the first.
  const std::int64_t panel_cost = panel_bytes * (3 + ceil_div(rows, row_parts)) / 4;
  std::int64_t panels_per_part = tile_cost / panel_cost;
  const std::int64_t even_share = panels * row_parts / (4 * threads);
  if (panels_per_part > even_share && panels * row_parts * panel_cost > tile_cost) panels_per_part = even_share;
  if (panels_per_part < 1) panels_per_part = 1;
  return {row_parts, ceil_div(panels, panels_per_part)};
}

template <class Format>
void linear(Context& context, const PackedMatrix& weight, const Linear& args) {
  const RowGroups row_groups(args.rows, Format::kMaxRows);
  const Format format(context, weight, args, row_groups);
  const std::int64_t panels = ceil_div(weight.n, Format::kVectors * 16);
  const Tiling tiling = choose_tiling(args.rows, panels, format.panel_bytes(), context.threads());
  parallel(context, tiling.row_parts * tiling.panel_parts, [&](std::int64_t tile, int) {
    const std::int64_t panel_part = tile / tiling.row_parts, row_part = tile % tiling.row_parts;
    const std::int64_t panel_begin = part_begin(panels, tiling.panel_parts, panel_part);
    const std::int64_t panel_end = part_begin(panels, tiling.panel_parts, panel_part + 1);
    const std::int64_t group_begin = part_begin(row_groups.count, tiling.row_parts, row_part);
    const std::int64_t group_end = part_begin(row_groups.count, tiling.row_parts, row_part + 1);
    for (std::int64_t k0 = 0; k0 < weight.k; k0 += Format::kBlock) {
      const std::int64_t k1 = k0 + Format::kBlock < weight.k ? k0 + Format::kBlock : weight.k;
      for (std::int64_t panel = panel_begin; panel < panel_end; ++panel) {
        for (std::int64_t i = group_begin; i < group_end; ++i) {
          const std::int64_t first = row_groups.begin(i);
          const int rows = static_cast<int>(row_groups.begin(i + 1) - first);
          compute_rows(rows, format, args, weight, panel, first, k0, k1);
        }
      }
    }
  });
}

template <int kBits, int kGroup, class Scale>
void linear_scaled(Context& context, const PackedMatrix& weight, const Linear& args) {
  const bool one_digit = weight.activation_digits == 1;
  if (weight.minimums != nullptr) {
    (one_digit ? linear<GroupedFormat<kBits, kGroup, Scale, true, 1>>
               : linear<GroupedFormat<kBits, kGroup, Scale, true, 2>>)(context, weight, args);
  } else {
    (one_digit ? linear<GroupedFormat<kBits, kGroup, Scale, false, 1>>
               : linear<GroupedFormat<kBits, kGroup, Scale, false, 2>>)(context, weight, args);
  }
}

template <int kBits, int kGroup>
void linear_grouped(Context& context, const PackedMatrix& weight, const Linear& args) {
  (weight.half_scales ? linear_scaled<kBits, kGroup, std::uint16_t>
                      : linear_scaled<kBits, kGroup, float>)(context, weight, args);
}

void linear_any(Context& context, const PackedMatrix& weight, const Linear& args) {
  switch (weight.layout) {
    case Layout::fp32: return linear<Float32Format<float>>(context, weight, args);
    case Layout::fp16: return linear<Float32Format<std::uint16_t>>(context, weight, args);
    case Layout::bf16: return linear<Bf16Format>(context, weight, args);
    case Layout::int8:
      return (weight.group == 32 ? linear_grouped<8, 32> : linear_grouped<8, 16>)(context, weight, args);
    case Layout::int4: return linear_grouped<4, 32>(context, weight, args);
  }
}

}  // namespace

const LinearKernels linear_kernels = {&linear_any};

}  // namespace ropeway::ROPEWAY_ISA
