#include "kernels/elementwise.h"

#include <cstring>

#include "kernels/parallel.h"
#include "kernels/simd_math.h"

namespace ropeway::ROPEWAY_ISA {
namespace {

// Elements of a tile: some tens of microseconds of streaming.
constexpr std::int64_t kTileElements = 32768;

// Items of `size` elements each, as tiles: calls body(first, last) for half-open ranges of items.
template <class Body>
void for_ranges(Context& context, std::int64_t items, std::int64_t size, const Body& body) {
  const std::int64_t step = size < kTileElements ? kTileElements / (size > 0 ? size : 1) : 1;
  parallel(context, (items + step - 1) / step, [&](std::int64_t tile, int) {
    const std::int64_t first = tile * step;
    body(first, first + step < items ? first + step : items);
  });
}

// Calls body(i, count) for [0, size) in steps of 16 lanes; count < 16 in the last one if size is not a multiple.
template <class Body>
inline void for_lanes(std::int64_t size, const Body& body) {
  std::int64_t i = 0;
  for (; i + 16 <= size; i += 16) body(i, 16);
  if (i < size) body(i, static_cast<int>(size - i));
}

inline f32x16 load_some(const float* p, int count) { return count == 16 ? load_f32(p) : load_f32(p, count); }
inline void store_some(float* p, f32x16 a, int count) {
  if (count == 16) {
    store_f32(p, a);
  } else {
    store_f32(p, a, count);
  }
}

void rms_norm_row(const RmsNorm& args, std::int64_t row) {
  const std::int64_t size = args.size;
  const float* x = args.x + row * size;
  float* out = args.out + row * size;
  if (args.residual != nullptr) {
    const float* residual = args.residual + row * size;
    float* sum = args.sum + row * size;
    for_lanes(size, [&](std::int64_t i, int count) {
      store_some(sum + i, add(load_some(x + i, count), load_some(residual + i, count)), count);
    });
    x = sum;
  }
  f32x16 squares[4] = {zero_f32(), zero_f32(), zero_f32(), zero_f32()};
  std::int64_t i = 0;
  for (; i + 64 <= size; i += 64) {
    for (int j = 0; j < 4; ++j) {
      const f32x16 v = load_f32(x + i + 16 * j);
      squares[j] = fma(v, v, squares[j]);
    }
  }
  for_lanes(size - i, [&](std::int64_t rest, int count) {
    const f32x16 v = load_some(x + i + rest, count);
    squares[0] = fma(v, v, squares[0]);
  });
  const float total = lane_sum(add(add(squares[0], squares[1]), add(squares[2], squares[3])));
  const f32x16 scale = set_f32(1.0F / __builtin_sqrtf(total / static_cast<float>(size) + args.eps));
  for_lanes(size, [&](std::int64_t j, int count) {
    store_some(out + j, mul(mul(load_some(x + j, count), scale), load_some(args.weight + j, count)), count);
  });
}

void rms_norm(Context& context, const RmsNorm& args) {
  for_ranges(context, args.rows, args.size, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t row = first; row < last; ++row) rms_norm_row(args, row);
  });
}

void rope_token(const Rope& args, std::int64_t token) {
  const std::int64_t half = args.rotated / 2;
  const float* cosines = args.table + args.positions[token] * args.rotated;
  const float* sines = cosines + half;
  for (std::int64_t head = 0; head < args.heads; ++head) {
    const std::int64_t offset = (token * args.heads + head) * args.size;
    const float* x = args.x + offset;
    float* out = args.out + offset;
    for_lanes(half, [&](std::int64_t i, int count) {
      const f32x16 a = load_some(x + i, count), b = load_some(x + half + i, count);
      const f32x16 c = load_some(cosines + i, count), s = load_some(sines + i, count);
      store_some(out + i, subtract(mul(a, c), mul(b, s)), count);
      store_some(out + half + i, fma(b, c, mul(a, s)), count);
    });
    const std::int64_t rest = args.size - args.rotated;
    if (rest > 0) std::memcpy(out + args.rotated, x + args.rotated, sizeof(float) * static_cast<std::size_t>(rest));
  }
}

void rope(Context& context, const Rope& args) {
  for_ranges(context, args.tokens, args.heads * args.size, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t token = first; token < last; ++token) rope_token(args, token);
  });
}

void silu_and_mul(Context& context, const SiluAndMul& args) {
  const f32x16 one = set_f32(1.0F);
  for_ranges(context, args.count, 1, [&](std::int64_t first, std::int64_t last) {
    for_lanes(last - first, [&](std::int64_t i, int count) {
      const f32x16 gate = load_some(args.gate + first + i, count);
      const f32x16 decay = exp_f32(subtract(zero_f32(), gate));
      const f32x16 silu = divide(gate, add(one, decay));
      store_some(args.out + first + i, mul(silu, load_some(args.up + first + i, count)), count);
    });
  });
}

}  // namespace

const ElementwiseKernels elementwise_kernels = {
    .rms_norm = &rms_norm,
    .rope = &rope,
    .silu_and_mul = &silu_and_mul,
};

}  // namespace ropeway::ROPEWAY_ISA
