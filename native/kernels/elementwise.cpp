#include "kernels/elementwise.h"

#include <cstring>

#include "kernels/parallel.h"
#include "kernels/rms_norm.h"
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

void add_rows(const float* x, const float* residual, std::int64_t size, float* sum) {
  for_lanes(size, [&](std::int64_t i, int count) {
    store_some(sum + i, add(load_some(x + i, count), load_some(residual + i, count)), count);
  });
}

void rms_norm(Context& context, const RmsNorm& args) {
  for_ranges(context, args.rows, args.size, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t row = first; row < last; ++row) {
      const std::int64_t offset = row * args.size;
      const float* x = args.x + offset;
      if (args.residual != nullptr) {
        add_rows(x, args.residual + offset, args.size, args.sum + offset);
        x = args.sum + offset;
      }
      rms_norm_row(x, args.weight, args.eps, args.size, args.out + offset);
    }
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
  for_ranges(context, args.count, 1, [&](std::int64_t first, std::int64_t last) {
    for_lanes(last - first, [&](std::int64_t i, int count) {
      const f32x16 gate = load_some(args.gate + first + i, count), up = load_some(args.up + first + i, count);
      store_some(args.out + first + i, mul(silu(gate), up), count);
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
