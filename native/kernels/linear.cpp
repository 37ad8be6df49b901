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

// A strip's weights from k0 on, as nearly as asking for them needs.
const char* weights_at(const PackedMatrix& weight, std::int64_t strip, std::int64_t k0) {
  const std::int64_t bytes = strip_bytes(weight);
  return static_cast<const char*>(weight.data) + strip * bytes + k0 * (bytes / weight.k);
}

// What to ask for while the `i`-th of `count` groups of rows is multiplied with a block of `bytes` at `block`. Were it
// that block, the first group would wait for memory, and memory be idle while the others compute. So all of them
// together ask for the block that is read after it.
Ahead ahead_of(std::int64_t i, std::int64_t count, const char* block, std::int64_t bytes, const char* after) {
  constexpr std::int64_t distance = 2048;
  if (count == 1) return {block + distance, 64};
  return {after + bytes / count * i, 64 / count};
}

// The products of a tile's rows and one strip: sums [rows][kStrip]. `after`: the weights that are read next.
void add_products(const Product& product, std::int64_t strip, const TileRows& rows, const char* after, float* sums) {
  const PackedMatrix& weight = *product.operand.weight;
  const std::int64_t k = weight.k, count = rows.group_end - rows.group_begin;
  for (std::int64_t k0 = 0; k0 < k; k0 += product.format.k_block) {
    const std::int64_t k1 = k0 + product.format.k_block < k ? k0 + product.format.k_block : k;
    const char* const block = weights_at(weight, strip, k0);
    const std::int64_t bytes = weights_at(weight, strip, k1) - block;
    const char* const next = k1 < k ? block + bytes : after;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t first = rows.groups.begin(rows.group_begin + i);
      const std::int64_t height = rows.groups.begin(rows.group_begin + i + 1) - first;
      product.format.add_strip[height - 1](product.operand, strip, first, k0, k1,
                                           ahead_of(i, count, block, bytes, next),
                                           sums + (first - rows.begin) * kStrip);
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

  // `strip` counts over all parts; `next` is the one whose weights are read after its own.
  void run_strip(std::int64_t strip, std::int64_t next, const TileRows& rows) const {
    alignas(64) float sums[2][kRowsPerTile * kStrip];
    const Place place = place_of(strip);
    const char* const after = weights_of(place_of(next));
    if (args.gated) {
      add_products(products[0], place.strip, rows, weights_of({1, place.strip}), sums[0]);
      add_products(products[1], place.strip, rows, after, sums[1]);
      write_gated_strip(args, place.strip, rows, sums[0], sums[1]);
    } else {
      add_products(products[place.part], place.strip, rows, after, sums[0]);
      write_strip(args, *products[place.part].part, place.strip, rows, sums[0]);
    }
  }

 private:
  struct Place {
    int part;
    std::int64_t strip;
  };

  // One past the last strip is past the last one of the last part.
  Place place_of(std::int64_t strip) const {
    int part = 0;
    for (; part + 1 < columns && strip >= strips_of(*products[part].operand.weight); ++part) {
      strip -= strips_of(*products[part].operand.weight);
    }
    return {part, strip};
  }

  const char* weights_of(const Place& place) const {
    return weights_at(*products[place.part].operand.weight, place.strip, 0);
  }
};

struct Tiling {
  std::int64_t row_parts, strip_parts;
};

// Tiles big enough to be worth claiming (about a microsecond), small enough to end together. A thread takes tiles that
// follow on each other, so that small ones cost no bandwidth.
Tiling choose_tiling(std::int64_t rows, std::int64_t strips, std::int64_t bytes) {
  constexpr std::int64_t tile_cost = 32 << 10;
  const std::int64_t row_parts = ceil_div(rows, kRowsPerTile);
  // Measured in bytes read once; a row on top costs about a quarter of reading the strip for the first.
  const std::int64_t strip_cost = bytes * (3 + ceil_div(rows, row_parts)) / 4;
  const std::int64_t strips_per_part = strip_cost < tile_cost ? tile_cost / strip_cost : 1;
  return {row_parts, ceil_div(strips, strips_per_part)};
}

void linear(Context& context, const Linear& args) {
  if (args.rows == 0) return;
  const Job job(context, args);
  const std::int64_t strips = job.strips();
  const std::int64_t bytes = strip_bytes(*args.parts[0].weight) * (args.gated ? 2 : 1);
  const Tiling tiling = choose_tiling(args.rows, strips, bytes);
  parallel(context, tiling.row_parts * tiling.strip_parts, [&](std::int64_t tile, int) {
    const std::int64_t strip_part = tile / tiling.row_parts, row_part = tile % tiling.row_parts;
    const std::int64_t begin = part_begin(strips, tiling.strip_parts, strip_part);
    const std::int64_t end = part_begin(strips, tiling.strip_parts, strip_part + 1);
    const std::int64_t next_tile = row_part + 1 < tiling.row_parts ? begin : end;
    const TileRows rows(job.groups, tiling.row_parts, row_part);
    for (std::int64_t strip = begin; strip < end; ++strip) {
      job.run_strip(strip, strip + 1 < end ? strip + 1 : next_tile, rows);
    }
  });
}

}  // namespace

const LinearKernels linear_kernels = {&linear};

}  // namespace ropeway::ROPEWAY_ISA
