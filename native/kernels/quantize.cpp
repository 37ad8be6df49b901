#include "kernels/quantize.h"

#include <cstring>

#include "kernels/parallel.h"

namespace ropeway::ROPEWAY_ISA {
namespace {

#if defined(ROPEWAY_ISA_AVX512)
constexpr int kLanes = 16;
#elif defined(ROPEWAY_ISA_AVX2)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr std::int64_t kTileGroups = 1024;
constexpr float kWidestGroup = 15 * 65504.0F;  // codes [0, 15] times the largest scale in fp16
constexpr float kNeverBetter = 0x1.fffffep127F;

// As many groups side by side as a register has lanes, so that every sum over a group is taken in the order of its
// values: the same bits from every instruction set. The compilers' own vectors, unlike those of simd.h, have
// subtraction, division and comparisons, which nothing else needs.
using Lanes = float __attribute__((vector_size(kLanes * sizeof(float))));
struct Block {
  Lanes x[kQuantizedGroup];
};
struct Fit {
  Lanes scale, minimum;
};

inline float bits_to_float(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline std::uint32_t float_to_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float widen_half(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000) << 16;
  const std::uint32_t magnitude = static_cast<std::uint32_t>(half & 0x7FFF) << 13;
  if ((half & 0x7C00) == 0x7C00) return bits_to_float(sign | 0x7F800000 | magnitude);
  return bits_to_float(sign | float_to_bits(bits_to_float(magnitude) * 0x1p112F));
}

// To the nearest, ties to even; infinity from 65520 on.
inline std::uint16_t narrow_half(float value) {
  const std::uint32_t bits = float_to_bits(value), magnitude = bits & 0x7FFFFFFF;
  const std::uint32_t sign = (bits >> 16) & 0x8000;
  if (magnitude >= 0x47800000) {  // 65536, infinity, NaN
    return static_cast<std::uint16_t>(sign | (magnitude > 0x7F800000 ? 0x7E00 : 0x7C00));
  }
  if (magnitude < 0x38800000) {  // below the smallest normal number: steps of 2^-24, which 0.5 has as its last bit
    const std::uint32_t rounded = float_to_bits(bits_to_float(magnitude) + 0.5F) - float_to_bits(0.5F);
    return static_cast<std::uint16_t>(sign | rounded);
  }
  const std::uint32_t rounded = magnitude + 0xFFF + ((magnitude >> 13) & 1);
  return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000) >> 13));
}

inline bool is_finite_half(std::uint16_t half) { return (half & 0x7C00) != 0x7C00; }

// To the nearest integer, ties to even, for |a| < 2^22.
inline void round_to_nearest(Lanes& a) { a = (a + 0x1.8p23F) - 0x1.8p23F; }
inline void keep_at_most(Lanes& a, const Lanes& b) { a = a < b ? a : b; }
inline void keep_at_least(Lanes& a, const Lanes& b) { a = a > b ? a : b; }

struct AsFloat {
  using Stored = float;
  static float widen(float value) { return value; }
};
struct AsBfloat16 {
  using Stored = std::uint16_t;
  static float widen(std::uint16_t value) { return bits_to_float(static_cast<std::uint32_t>(value) << 16); }
};
struct AsHalf {
  using Stored = std::uint16_t;
  static float widen(std::uint16_t value) { return widen_half(value); }
};

// Groups [first, first + count) of the matrix, row after row; lanes from `count` on are 0. Whether all are finite.
template <class Type>
bool load_block(const Quantize& args, std::int64_t first, int count, Block& block) {
  const std::int64_t groups = args.k / kQuantizedGroup;
  float x[kQuantizedGroup][kLanes] = {};
  float sum = 0;  // of zeros, or NaN
  for (int lane = 0; lane < count; ++lane) {
    const std::int64_t row = (first + lane) / groups, group = (first + lane) % groups;
    const auto* const values =
        static_cast<const typename Type::Stored*>(args.values) + row * args.row_stride + group * kQuantizedGroup;
    for (int i = 0; i < kQuantizedGroup; ++i) {
      const float value = Type::widen(values[i]);
      x[i][lane] = value;
      sum += value * 0.0F;
    }
  }
  std::memcpy(&block, x, sizeof block);
  return sum == 0.0F;
}

// scale = largest magnitude / 127.
void fit_int8(const Block& block, Fit& fit) {
  Lanes most = {};
  for (const Lanes& x : block.x) {
    keep_at_least(most, x);
    keep_at_least(most, -x);
  }
  fit.scale = most / 127.0F;
}

// The scale and minimum with the least squared error among those that fit the codes of ten trials best. Trial t spreads
// the group over [0, 13 + 0.3 t]: below 15, codes stay unused, but the inner values may lie better; above, the largest
// are cut off. Best means least squares, whose gain over nothing is scale * sum(y code) + minimum * sum(y).
void fit_int4(const Block& block, Fit& fit) {
  const Lanes zero = {}, most_code = zero + 15.0F;
  Lanes low = block.x[0], high = low, total = zero;
  for (const Lanes& x : block.x) {
    keep_at_most(low, x);
    keep_at_least(high, x);
  }
  Block above;  // y: values above the group's lowest
  for (int i = 0; i < kQuantizedGroup; ++i) {
    above.x[i] = block.x[i] - low;
    total += above.x[i];
  }
  const Lanes range = high - low;
  const auto too_wide = range > kWidestGroup;  // sums may overflow: refused
  Lanes gain = too_wide ? zero + kNeverBetter : zero;
  fit.scale = too_wide ? zero + kWidestGroup : zero;
  fit.minimum = low;
  for (int trial = 0; trial < 10; ++trial) {
    const float top = 13.0F + 0.3F * static_cast<float>(trial);
    const Lanes spread = range > 0x1p-120F ? top / range : zero;
    Lanes codes = zero, squares = zero, products = zero;
    for (const Lanes& y : above.x) {
      Lanes code = y * spread;
      round_to_nearest(code);
      keep_at_most(code, most_code);
      codes += code;
      squares += code * code;
      products += y * code;
    }
    constexpr float count = kQuantizedGroup;
    const Lanes determinant = count * squares - codes * codes;
    const Lanes inverse = determinant > zero ? 1.0F / determinant : zero;
    const Lanes scale = (count * products - codes * total) * inverse;
    const Lanes minimum = (squares * total - codes * products) * inverse;
    const Lanes gained = scale * products + minimum * total;
    const auto better = gained > gain;
    gain = better ? gained : gain;
    fit.scale = better ? scale : fit.scale;
    fit.minimum = better ? minimum + low : fit.minimum;
  }
}

// Codes of the rounded scales and minimums.
bool store_block(const Quantize& args, const Block& block, const Fit& fit, std::int64_t first, int count) {
  const bool int4 = args.minimums != nullptr;
  const float lowest = int4 ? 0.0F : -127.0F, highest = int4 ? 15.0F : 127.0F;
  Lanes inverse = {}, minimum = {};
  bool fits = true;
  for (int lane = 0; lane < count; ++lane) {
    const std::uint16_t half = narrow_half(fit.scale[lane]);
    const float scale = widen_half(half);
    inverse[lane] = scale > 0 ? 1.0F / scale : 0;
    args.scales[first + lane] = half;
    fits &= is_finite_half(half);
    if (int4) {
      const std::uint16_t low = narrow_half(fit.minimum[lane]);
      args.minimums[first + lane] = low;
      minimum[lane] = widen_half(low);
      fits &= is_finite_half(low);
    }
  }
  float codes[kQuantizedGroup][kLanes];
  for (int i = 0; i < kQuantizedGroup; ++i) {
    Lanes code = (block.x[i] - minimum) * inverse;
    keep_at_least(code, Lanes{} + lowest);
    keep_at_most(code, Lanes{} + highest);
    round_to_nearest(code);
    std::memcpy(codes[i], &code, sizeof code);
  }
  for (int lane = 0; lane < count; ++lane) {
    std::int8_t* const to = args.codes + (first + lane) * kQuantizedGroup;
    for (int i = 0; i < kQuantizedGroup; ++i) to[i] = static_cast<std::int8_t>(static_cast<int>(codes[i][lane]));
  }
  return fits;
}

template <class Type>
bool quantize_from(Context& context, const Quantize& args) {
  const std::int64_t groups = args.n * (args.k / kQuantizedGroup);
  constexpr std::int64_t step = kTileGroups;
  int failed = 0;
  parallel(context, (groups + step - 1) / step, [&](std::int64_t tile, int) {
    const std::int64_t end = (tile + 1) * step < groups ? (tile + 1) * step : groups;
    bool good = true;
    for (std::int64_t first = tile * step; first < end; first += kLanes) {
      const int count = static_cast<int>(end - first < kLanes ? end - first : kLanes);
      Block block;
      Fit fit;
      good &= load_block<Type>(args, first, count, block);
      if (args.minimums != nullptr) {
        fit_int4(block, fit);
      } else {
        fit_int8(block, fit);
      }
      good &= store_block(args, block, fit, first, count);
    }
    if (!good) __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
  });
  return __atomic_load_n(&failed, __ATOMIC_RELAXED) == 0;
}

bool quantize(Context& context, const Quantize& args) {
  switch (args.from) {
    case Layout::bf16: return quantize_from<AsBfloat16>(context, args);
    case Layout::fp16: return quantize_from<AsHalf>(context, args);
    default: return quantize_from<AsFloat>(context, args);
  }
}

}  // namespace

const QuantizeKernels quantize_kernels = {.quantize = &quantize};

}  // namespace ropeway::ROPEWAY_ISA
