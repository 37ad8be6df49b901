#include "kernels/linear.h"

#include "kernels/linear_formats.h"
#include "kernels/parallel.h"

// One driver for all layouts. The outputs of all parts are cut into strips of 32, and a tile of the work is some strips
// for some rows. Inside it: strips; then blocks of k, so that a strip's block stays in the near caches; then groups of
// rows, whose sums live in registers while the block is read from front to back. Between two blocks of k, sums rest in
// memory (storing a float32 changes nothing); after the last one, bias, residual or gate are applied, and the outputs
// are written, once.

namespace ropeway::ROPEWAY_ISA {
namespace {

constexpr std::int64_t kRowsPerTile = 96;
static_assert(kRowsPerTile % kMaxDenseRows == 0 && kRowsPerTile % kMaxGroupedRows == 0);

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Part `i` of `parts` nearly equal ones of [0, size) begins at `part_begin(size, parts, i)`.
constexpr std::int64_t part_begin(std::int64_t size, std::int64_t parts, std::int64_t i) { return size * i / parts; }

// A part with its format, and its inputs once they are prepared.
struct Product {
  const LinearPart* part;
  Format format;
  Operand operand;
  bool owns_inputs;  // false: those of an earlier part serve
};

bool same_inputs(const Product& a, const Product& b) {
  return a.format.prepare == b.format.prepare && a.format.offset == b.format.offset;
}

// How many rows every part can take at a time.
int most_rows(const Linear& args) {
  int rows = kMaxDenseRows;
  for (int i = 0; i < args.part_count; ++i) {
    const int most = format_of(*args.parts[i].weight).max_rows;
    if (most < rows) rows = most;
  }
  return rows;
}

std::int64_t strips_of(const PackedMatrix& weight) { return ceil_div(weight.n, kStrip); }

// Bytes of a strip's weights.
std::int64_t strip_bytes(const PackedMatrix& weight) {
  switch (weight.layout) {
    case Layout::fp32: return weight.k * kStrip * 4;
    case Layout::fp16:
    case Layout::bf16: return weight.k * kStrip * 2;
    case Layout::int8: return weight.k * kStrip;
    case Layout::int4: break;
  }
  return weight.k * kStrip / 2;
}

// Rows [begin, end) of a tile, kRowsPerTile at most; whole groups.
struct TileRows {
  const RowGroups& groups;
  std::int64_t group_begin, group_end, begin, end;

  TileRows(const RowGroups& groups, std::int64_t parts, std::int64_t part)
      : groups(groups),
        group_begin(part_begin(groups.count, parts, part)),
        group_end(part_begin(groups.count, parts, part + 1)),
        begin(groups.begin(group_begin)),
        end(groups.begin(group_end)) {}
};

// The products of a tile's rows and one strip: sums [rows][kStrip].
void add_products(const Product& product, std::int64_t strip, const TileRows& rows, float* sums) {
  const std::int64_t k = product.operand.weight->k;
  for (std::int64_t k0 = 0; k0 < k; k0 += product.format.k_block) {
    const std::int64_t k1 = k0 + product.format.k_block < k ? k0 + product.format.k_block : k;
    for (std::int64_t i = rows.group_begin; i < rows.group_end; ++i) {
      const std::int64_t first = rows.groups.begin(i), count = rows.groups.begin(i + 1) - first;
      product.format.add_strip[count - 1](product.operand, strip, first, k0, k1, sums + (first - rows.begin) * kStrip);
    }
  }
}

// sum + bias, + residual where there is one.
void write_strip(const Linear& args, const LinearPart& part, std::int64_t strip, const TileRows& rows,
                 const float* sums) {
  const std::int64_t n = part.weight->n;
  for (std::int64_t column = strip * kStrip; column < n && column < (strip + 1) * kStrip; column += 16, sums += 16) {
    const int lanes = n - column < 16 ? static_cast<int>(n - column) : 16;
    const f32x16 bias = part.bias != nullptr ? load_some(part.bias + column, lanes) : zero_f32();
    for (std::int64_t row = rows.begin; row < rows.end; ++row) {
      f32x16 sum = load_f32(sums + (row - rows.begin) * kStrip);
      if (part.bias != nullptr) sum = add(sum, bias);
      if (args.residual != nullptr) sum = add(sum, load_some(args.residual + row * n + column, lanes));
      store_some(part.out + row * n + column, sum, lanes);
    }
  }
}

// silu(gate + bias) * (up + bias).
void write_gated_strip(const Linear& args, std::int64_t strip, const TileRows& rows, const float* gates,
                       const float* ups) {
  const LinearPart &gate_part = args.parts[0], &up_part = args.parts[1];
  const std::int64_t n = gate_part.weight->n;
  for (std::int64_t column = strip * kStrip; column < n && column < (strip + 1) * kStrip;
       column += 16, gates += 16, ups += 16) {
    const int lanes = n - column < 16 ? static_cast<int>(n - column) : 16;
    for (std::int64_t row = rows.begin; row < rows.end; ++row) {
      f32x16 gate = load_f32(gates + (row - rows.begin) * kStrip), up = load_f32(ups + (row - rows.begin) * kStrip);
      if (gate_part.bias != nullptr) gate = add(gate, load_some(gate_part.bias + column, lanes));
      if (up_part.bias != nullptr) up = add(up, load_some(up_part.bias + column, lanes));
      store_some(gate_part.out + row * n + column, mul(silu(gate), up), lanes);
    }
  }
}

// Parts with the formats of their matrices; scratch memory holds their inputs.
struct Job {
  const Linear& args;
  Product products[kMostLinearParts];
  int columns;  // parts that have strips of their own: all, or the first of two gated ones
  RowGroups groups;

  Job(Context& context, const Linear& args)
      : args(args), columns(args.gated ? 1 : args.part_count), groups(args.rows, most_rows(args)) {
    const std::int64_t k = args.parts[0].weight->k;
    std::int64_t starts[kMostLinearParts], bytes = 0;
    for (int i = 0; i < args.part_count; ++i) {
      Product& product = products[i];
      product.part = &args.parts[i];
      product.format = format_of(*args.parts[i].weight);
      product.operand = {args.parts[i].weight, nullptr, product.format.row_bytes(k)};
      product.owns_inputs = true;
      starts[i] = bytes;
      for (int j = 0; j < i && product.owns_inputs; ++j) {
        if (!same_inputs(products[j], product)) continue;
        product.owns_inputs = false;
        starts[i] = starts[j];
      }
      if (product.owns_inputs) bytes += ceil_div(args.rows * product.operand.row_bytes, 64) * 64;
    }
    const std::int64_t normed = bytes;
    if (args.norm_weight != nullptr) bytes += context.threads() * f32_row_bytes(k);
    std::byte* const scratch = context.scratch(static_cast<std::size_t>(bytes));
    const InputRows rows{args.x, k, args.norm_weight, args.norm_eps, reinterpret_cast<float*>(scratch + normed)};
    for (int i = 0; i < args.part_count; ++i) {
      Product& product = products[i];
      product.operand.inputs = scratch + starts[i];
      if (product.owns_inputs) {
        product.format.prepare(context, rows, groups, product.format.offset, scratch + starts[i]);
      }
    }
  }

  std::int64_t strips() const {
    std::int64_t all = 0;
    for (int i = 0; i < columns; ++i) all += strips_of(*products[i].operand.weight);
    return all;
  }

  // `strip` counts over all parts.
  void run_strip(std::int64_t strip, std::int64_t row_parts, std::int64_t row_part) const {
    alignas(64) float sums[2][kRowsPerTile * kStrip];
    int i = 0;
    for (; strip >= strips_of(*products[i].operand.weight); ++i) strip -= strips_of(*products[i].operand.weight);
    const TileRows rows(groups, row_parts, row_part);
    add_products(products[i], strip, rows, sums[0]);
    if (args.gated) {
      add_products(products[1], strip, rows, sums[1]);
      write_gated_strip(args, strip, rows, sums[0], sums[1]);
    } else {
      write_strip(args, *products[i].part, strip, rows, sums[0]);
    }
  }
};

struct Tiling {
  std::int64_t row_parts, strip_parts;
};

// Tiles big enough to be worth claiming (some microseconds), small enough to share out evenly.
Tiling choose_tiling(std::int64_t rows, std::int64_t strips, std::int64_t bytes, int threads) {
  constexpr std::int64_t tile_cost = 96 << 10;
  const std::int64_t row_parts = ceil_div(rows, kRowsPerTile);
  // Measured in bytes read once; a row on top costs about a quarter of reading the strip for the first.
  const std::int64_t strip_cost = bytes * (3 + ceil_div(rows, row_parts)) / 4;
  std::int64_t strips_per_part = tile_cost / strip_cost;
  const std::int64_t even_share = strips * row_parts / (4 * threads);
  if (strips_per_part > even_share && strips * row_parts * strip_cost > tile_cost) strips_per_part = even_share;
  if (strips_per_part < 1) strips_per_part = 1;
  return {row_parts, ceil_div(strips, strips_per_part)};
}

void linear(Context& context, const Linear& args) {
  if (args.rows == 0) return;
  const Job job(context, args);
  const std::int64_t strips = job.strips();
  const std::int64_t bytes = strip_bytes(*args.parts[0].weight) * (args.gated ? 2 : 1);
  const Tiling tiling = choose_tiling(args.rows, strips, bytes, context.threads());
  parallel(context, tiling.row_parts * tiling.strip_parts, [&](std::int64_t tile, int) {
    const std::int64_t strip_part = tile / tiling.row_parts, row_part = tile % tiling.row_parts;
    const std::int64_t end = part_begin(strips, tiling.strip_parts, strip_part + 1);
    for (std::int64_t strip = part_begin(strips, tiling.strip_parts, strip_part); strip < end; ++strip) {
      job.run_strip(strip, tiling.row_parts, row_part);
    }
  });
}

}  // namespace

const LinearKernels linear_kernels = {&linear};

}  // namespace ropeway::ROPEWAY_ISA
