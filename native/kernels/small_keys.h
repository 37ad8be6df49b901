// Scores of int4_full, a group of 32 keys at a time. A key's feature is code * scale + minimum. So a query's features
// are multiplied by the scales, once per group; the score is the sum over features of that times the code, and of the
// query times the minimums, which is the same for all keys of the group.
#pragma once

#include "kernels/attention_products.h"
#include "kernels/kv_layout.h"

namespace ropeway::ROPEWAY_ISA {

// Tiles of a group that are multiplied at once, and sums of a score, each over every other feature: with few queries,
// more of them go on at a time.
inline constexpr int kGroupTiles = kVectorRegisters >= 32 ? 2 : 1, kChains = kVectorRegisters >= 32 ? 2 : 1;

// A code becomes 16 + code with two operations, where a conversion would take three: the four bits are the highest of a
// fraction. So a scale's minimum is that of the code -16.
inline constexpr float kCodeOffset = 16.0F;

inline f32x16 number_of(i32x16 words, int feature) {
  const int left = 19 - 4 * feature;  // the fraction's highest bits are 19 to 22
  return as_f32(bits_merge(left >= 0 ? shift_left(words, left) : shift_right(words, -left), 0x00780000, 0x41800000));
}

// Scales and shifted minimums of a group's features, zeros after the last: float32 [width] each.
inline void read_group_scales(const KVStorage& cache, const std::byte* first, std::int64_t width, float* scales,
                              float* minimums) {
  const auto* half_scales = reinterpret_cast<const std::uint16_t*>(first + cache.key_scales);
  const auto* half_minimums = reinterpret_cast<const std::uint16_t*>(first + cache.tile_bytes + cache.key_scales);
  for (std::int64_t d = 0; d < width; d += 16) {  // what is read beyond the last feature is the tile's, too
    const f32x16 scale = load_f16(half_scales + d);
    store_f32(scales + d, scale);
    store_f32(minimums + d, fma(scale, set_f32(-kCodeOffset), load_f16(half_minimums + d)));
  }
  for (std::int64_t d = cache.head_dim; d < width; ++d) scales[d] = minimums[d] = 0.0F;
}

// Scores [Rows][kSpan] of two tiles, `bases` added to the sums over features. `lines.load(tile, s)` are `Step` features
// of 16 keys, of which `lines.feature(_, i)` is one as numbers.
template <int Rows, int Step, class Lines>
[[gnu::always_inline]] inline void score_group(const float* q, std::int64_t width, std::int64_t steps,
                                               const float (&bases)[Rows], float* scores, const Lines& lines) {
#pragma GCC unroll 1
  for (int tile = 0; tile < 2; tile += kGroupTiles) {
    f32x16 sums[kChains][Rows][kGroupTiles];
#pragma GCC unroll 8
    for (int c = 0; c < kChains; ++c)
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
        for (int t = 0; t < kGroupTiles; ++t) sums[c][r][t] = zero_f32();
#pragma GCC unroll 1
    for (std::int64_t s = 0; s < steps; ++s) {
      i32x16 words[kGroupTiles];
#pragma GCC unroll 8
      for (int t = 0; t < kGroupTiles; ++t) words[t] = lines.load(tile + t, s);
#pragma GCC unroll 8
      for (int i = 0; i < Step; ++i) {
        f32x16 line[kGroupTiles];
#pragma GCC unroll 8
        for (int t = 0; t < kGroupTiles; ++t) line[t] = lines.feature(words[t], i);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
          const f32x16 x = set_f32(q[r * width + s * Step + i]);
#pragma GCC unroll 8
          for (int t = 0; t < kGroupTiles; ++t) sums[i % kChains][r][t] = fma(x, line[t], sums[i % kChains][r][t]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
      for (int t = 0; t < kGroupTiles; ++t) {
        f32x16 sum = sums[0][r][t];
        if constexpr (kChains == 2) sum = add(sum, sums[1][r][t]);
        store_f32(scores + r * kSpan + 16 * (tile + t), add(sum, set_f32(bases[r])));
      }
    }
  }
}

struct GroupLines {
  const std::byte* first;
  std::int64_t tile_bytes;
  i32x16 load(int tile, std::int64_t step) const { return load_i32(first + tile * tile_bytes + 64 * step); }
};

struct CodeLines : GroupLines {
  static f32x16 feature(i32x16 words, int i) { return number_of(words, i); }
};

// q [Rows][width], zeros after the last feature; `folded`: room for as much.
template <int Rows>
void score_code_group(const KVStorage& cache, const float* q, std::int64_t width, const std::byte* first,
                      const float* scales, const float* minimums, float* folded, float* scores) {
  float bases[Rows];
  for (int r = 0; r < Rows; ++r) {
    f32x16 sum = zero_f32();
    for (std::int64_t d = r * width; d < (r + 1) * width; d += 16) {
      const f32x16 x = load_f32(q + d);
      store_f32(folded + d, mul(x, load_f32(scales + d - r * width)));
      sum = fma(x, load_f32(minimums + d - r * width), sum);
    }
    bases[r] = lane_sum(sum);
  }
  score_group<Rows, 8>(folded, width, (cache.head_dim + 7) / 8, bases, scores, CodeLines{{first, cache.tile_bytes}});
}

struct BegunLines : GroupLines {
  static f32x16 feature(i32x16 pairs, int i) {
    return as_f32(i == 0 ? shift_left(pairs, 16) : bits_merge(pairs, 0xFFFF0000, 0));
  }
};

// The same over a group's keys in bfloat16.
template <int Rows>
void score_begun_group(const KVStorage& cache, const float* q, std::int64_t width, const std::byte* keys,
                       float* scores) {
  const float bases[Rows] = {};
  const std::int64_t tile_bytes = begun_bytes(cache.head_dim) / 2;
  score_group<Rows, 2>(q, width, (cache.head_dim + 1) / 2, bases, scores, BegunLines{{keys, tile_bytes}});
}

}  // namespace ropeway::ROPEWAY_ISA
