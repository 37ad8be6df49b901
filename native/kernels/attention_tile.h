// The two products of attention for a panel of queries against up to 256 keys, and the softmax between them.
//
// Every lane is a chain of its own: a score is one fused multiply-add after the other over the head's features, an
// output feature one after the other over the keys. So the shape of a tile never shows in the result.
#pragma once

#include "kernels/attention.h"
#include "kernels/simd_math.h"

namespace ropeway::ROPEWAY_ISA {

// Queries of a panel, and vectors of keys or of output features that meet them at once: as many sums as registers
// hold, with room for the operands.
inline constexpr int kPanel = kVectorRegisters >= 8 ? 6 : 2;
inline constexpr int kWide = kVectorRegisters >= 32 ? 4 : 1;

inline f32x16 load_lanes(const float* p) { return load_f32(p); }
inline f32x16 load_lanes(const std::uint16_t* p) { return load_bf16(p); }

// Memory is read faster in several streams, and the processor's own guesses end at every block: so while a tile is
// used, the tile this many places later is fetched.
inline constexpr int kAhead = 4;

// Where a span's keys and values lie: one address per 16 keys. After the last keys follow the first values, and after
// the last values what is needed next, so that there is always something to fetch. `Fetch`: they lie in memory, not
// in a copy made just now.
template <class Element, bool Fetch>
struct SpanTiles {
  const Element* keys[kSpan / 16 + kAhead];    // [head_dim][16]
  const Element* values[kSpan / 16 + kAhead];  // [16][value_stride]
  std::int64_t value_stride;
};

// Into the second-level cache: in the first one, tiles of the same alignment would push each other out.
inline void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// scores[r][16 t + lane] for `Tiles` tiles: sum over d of q[d][r] * keys[t][d][lane].
template <int Queries, int Tiles, bool Fetch, class Element>
inline void score_tiles(const float* q, const Element* const* keys, std::int64_t head_dim, float* scores) {
  f32x16 sums[Queries][Tiles];
  for (int r = 0; r < Queries; ++r)
    for (int t = 0; t < Tiles; ++t) sums[r][t] = zero_f32();
  for (std::int64_t d = 0; d < head_dim; ++d) {
    f32x16 k[Tiles];
    for (int t = 0; t < Tiles; ++t) {
      k[t] = load_lanes(keys[t] + 16 * d);
      if constexpr (Fetch) fetch(keys[kAhead + t] + 16 * d);
    }
    for (int r = 0; r < Queries; ++r) {
      const f32x16 query = set_f32(q[d * Queries + r]);
      for (int t = 0; t < Tiles; ++t) sums[r][t] = fma(query, k[t], sums[r][t]);
    }
  }
  for (int r = 0; r < Queries; ++r)
    for (int t = 0; t < Tiles; ++t) store_f32(scores + r * kSpan + 16 * t, sums[r][t]);
}

// Scores of a panel for key tiles [begin, end) of a span; q [head_dim][Queries] -> scores [Queries][kSpan].
template <int Queries, class Element, bool Fetch>
void score_panel(const float* q, const SpanTiles<Element, Fetch>& tiles, int begin, int end, std::int64_t head_dim,
                 float* scores) {
  int t = begin;
  for (; t + kWide <= end; t += kWide)
    score_tiles<Queries, kWide, Fetch>(q, tiles.keys + t, head_dim, scores + 16 * t);
  if constexpr (kWide > 1) {
    for (; t + 2 <= end; t += 2) score_tiles<Queries, 2, Fetch>(q, tiles.keys + t, head_dim, scores + 16 * t);
    if (t < end) score_tiles<Queries, 1, Fetch>(q, tiles.keys + t, head_dim, scores + 16 * t);
  }
}

// Turns the scores (in powers of two) of keys [begin, end) into weights 2^(score - most), in place; returns their sum.
inline float soften(float* scores, int begin, int end, float& most) {
  const int first = begin & ~15, last = (end + 15) & ~15;
  for (int i = first; i < begin; ++i) scores[i] = -kInfinity;
  for (int i = end; i < last; ++i) scores[i] = -kInfinity;
  f32x16 peak = set_f32(-kInfinity);
  for (int i = first; i < last; i += 16) peak = max(load_f32(scores + i), peak);
  most = lane_max(peak);
  const f32x16 shift = set_f32(most), smallest = set_f32(-126.0F);
  f32x16 sum = zero_f32();
  for (int i = first; i < last; i += 16) {
    const f32x16 x = subtract(load_f32(scores + i), shift);
    const f32x16 weight = zero_where_less(exp2_f32(x), x, smallest);  // denormals would be slow, and are nothing
    store_f32(scores + i, weight);
    sum = add(sum, weight);
  }
  return lane_sum(sum);
}

// sums[r][16 n + lane] += sum over keys [begin, end) of weights[r][key] * values[key][column + 16 n + lane]; all keys
// in one group of kAhead tiles.
template <int Queries, int Vectors, class Element, bool Fetch>
inline void weigh_columns(const float* weights, const SpanTiles<Element, Fetch>& tiles, int begin, int end,
                          std::int64_t column, float* sums, std::int64_t sums_stride) {
  f32x16 total[Queries][Vectors];
  for (int r = 0; r < Queries; ++r)
    for (int n = 0; n < Vectors; ++n) total[r][n] = load_f32(sums + r * sums_stride + column + 16 * n);
  for (int key = begin; key < end;) {
    const int stop = (key | 15) + 1 < end ? (key | 15) + 1 : end;
    const Element* row = tiles.values[key >> 4] + (key & 15) * tiles.value_stride + column;
    for (; key < stop; ++key, row += tiles.value_stride) {
      f32x16 v[Vectors];
      for (int n = 0; n < Vectors; ++n) v[n] = load_lanes(row + 16 * n);
      if constexpr (Fetch) {
        // A line of the next group for each line used of this one, from its kAhead tiles in turn.
        const int place = key % (16 * kAhead);
        const auto* ahead = reinterpret_cast<const char*>(tiles.values[(key - place) / 16 + kAhead + place % kAhead]);
        const std::size_t first_byte = static_cast<std::size_t>(column) * sizeof(Element);
        for (std::size_t byte = (first_byte + 63) / 64 * 64; byte < first_byte + 16 * Vectors * sizeof(Element);
             byte += 64) {
          fetch(ahead + 16 * byte + 64 * (place / kAhead));
        }
      }
      for (int r = 0; r < Queries; ++r) {
        const f32x16 weight = set_f32(weights[r * kSpan + key]);
        for (int n = 0; n < Vectors; ++n) total[r][n] = fma(weight, v[n], total[r][n]);
      }
    }
  }
  for (int r = 0; r < Queries; ++r)
    for (int n = 0; n < Vectors; ++n) store_f32(sums + r * sums_stride + column + 16 * n, total[r][n]);
}

// Adds the weighted values of keys [begin, end) to sums [Queries][width], width a multiple of 16.
template <int Queries, class Element, bool Fetch>
void weigh_panel(const float* weights, const SpanTiles<Element, Fetch>& tiles, int begin, int end, std::int64_t width,
                 float* sums) {
  constexpr int group = 16 * kAhead;
  for (int first = begin; first < end;) {
    const int last = (first / group + 1) * group < end ? (first / group + 1) * group : end;
    std::int64_t column = 0;
    for (; column + 16 * kWide <= width; column += 16 * kWide)
      weigh_columns<Queries, kWide>(weights, tiles, first, last, column, sums, width);
    if constexpr (kWide > 1) {
      for (; column + 32 <= width; column += 32)
        weigh_columns<Queries, 2>(weights, tiles, first, last, column, sums, width);
      if (column < width) weigh_columns<Queries, 1>(weights, tiles, first, last, column, sums, width);
    }
    first = last;
  }
}

}  // namespace ropeway::ROPEWAY_ISA
