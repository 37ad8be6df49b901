// Attention of a panel of queries over one span of keys: scores, the softmax's weights relative to the span's largest
// score, their sum, and the weighted values.
#pragma once

#include "kernels/attention_products.h"
#include "kernels/half.h"
#include "kernels/kv_layout.h"

namespace ropeway::ROPEWAY_ISA {

// ------------------------------------------------------------------ queries

// A head's queries as the products want them. Panels differ by at most one query, so that none is left with few.
template <class Type>
struct Queries {
  typename Type::Input* rows;  // panel by panel: [passes][steps][queries of the panel][unit]
  float* scales;               // [queries]: of codes
  std::int32_t* starts;        // [queries]: what corrects for keys stored as code + 128
  int count, panels;
  std::int64_t steps;

  int begin(int panel) const { return static_cast<int>(std::int64_t{panel} * count / panels); }
  const typename Type::Input* panel(int number) const {
    return rows + begin(number) * steps * Type::unit * Type::passes;
  }
};

// Writes query r of a panel of `rows`, x [size], zeros after its end up to whole vectors.
template <class Type>
void pack_query(const Queries<Type>& queries, int panel, int r, const float* x, std::int64_t size,
                typename Type::Input* row) {
  using Input = typename Type::Input;
  const int first = queries.begin(panel), rows = queries.begin(panel + 1) - first;
  const std::int64_t padded = round_up(size, 16);
  if constexpr (!Type::codes) {
    for (std::int64_t d = 0; d < padded; d += 16) Type::store(row + d, load_f32(x + d));
  } else {
    i32x16 top = set_i32(0);
    for (std::int64_t d = 0; d < padded; d += 16) top = max(abs_bits(load_f32(x + d)), top);
    const float largest = bits_float(static_cast<std::uint32_t>(reduce_max(top)));
    const float inverse = static_cast<float>(kMostCode) / largest;
    const f32x16 factor = set_f32(inverse > 0x1p127F ? 0x1p127F : inverse);  // zeros stay zeros
    f32x16 sum = zero_f32();
    for (std::int64_t d = 0; d < padded; d += 16) {
      const f32x16 codes = round_even(mul(load_f32(x + d), factor));
      sum = add(sum, codes);  // exact: below 2^24
      store_digits(row + d, padded, codes);
    }
    queries.scales[first + r] = largest / static_cast<float>(kMostCode);
    const float total = lane_sum(sum);
    queries.starts[first + r] = total == total ? -128 * static_cast<std::int32_t>(total) : 0;
  }
  Input* to = queries.rows + first * queries.steps * Type::unit * Type::passes + r * Type::unit;
  for (int pass = 0; pass < Type::passes; ++pass) {
    for (std::int64_t s = 0; s < queries.steps; ++s, to += rows * Type::unit)
      std::memcpy(to, row + pass * padded + s * Type::unit, Type::unit * sizeof(Input));
  }
}

// ------------------------------------------------------------------ scores

// Scores of a panel for key tiles [begin, end) of a span -> scores [Rows][kSpan]; up to kWide - 1 more are written.
template <class Type, int Rows, bool Fetch>
void score_panel(const Queries<Type>& queries, int panel, const SpanTiles& tiles, int begin, int end, float* scores) {
  const typename Type::Input* q = queries.panel(panel);
  const std::int32_t* starts = queries.starts + queries.begin(panel);
  const std::byte* const* keys = tiles.keys;
  int t = begin;
  for (; t + kWide <= end; t += kWide)
    score_tiles<Type, Rows, kWide, Fetch>(q, starts, keys + t, keys + kAhead<Type> + t, queries.steps, scores + 16 * t);
  if constexpr (kWide > 1) {
    for (; t < end; t += 2) {
      const std::byte* const pair[] = {keys[t], keys[t + 1 < end ? t + 1 : t]};
      score_tiles<Type, Rows, 2, Fetch>(q, starts, pair, keys + kAhead<Type> + t, queries.steps, scores + 16 * t);
    }
  }
  if constexpr (Type::codes) {
    for (t = begin; t < end; ++t) {
      const f32x16 key_scales = load_f16(tiles.key_scales[t]);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        float* place = scores + r * kSpan + 16 * t;
        const f32x16 scale = mul(set_f32(queries.scales[queries.begin(panel) + r]), key_scales);
        store_f32(place, mul(load_f32(place), scale));
      }
    }
  }
}

// ------------------------------------------------------------------ softmax

// Keys [begin, end) of a span, and the tiles [first, last) whose weights are wanted: zero beyond the keys.
struct Visible {
  int begin, end, first, last;
};

// The largest score of the visible keys; what lies beside them in their tiles becomes minus infinity.
inline float largest_score(float* scores, const Visible& keys) {
  const int first = keys.begin & ~15, last = (keys.end + 15) & ~15;
  for (int i = first; i < keys.begin; ++i) scores[i] = -kInfinity;
  for (int i = keys.end; i < last; ++i) scores[i] = -kInfinity;
  f32x16 even = set_f32(-kInfinity), odd = even;
  int i = first;
  for (; i + 32 <= last; i += 32) {
    even = max(load_f32(scores + i), even);
    odd = max(load_f32(scores + i + 16), odd);
  }
  if (i < last) even = max(load_f32(scores + i), even);
  return lane_max(max(odd, even));
}

// Writes weights 2^(score - most) of scores that are in powers of two, to where `store(index, weights)` puts them;
// returns their sum.
template <class Type, class Store>
inline float soften(const float* scores, const Visible& keys, float most, const Store& store) {
  const int first = keys.begin & ~15, last = (keys.end + 15) & ~15;
  const f32x16 shift = set_f32(most), smallest = set_f32(-126.0F);
  f32x16 sum = zero_f32();
  for (int i = first; i < last; i += 16) {
    const f32x16 x = subtract(load_f32(scores + i), shift);
    const f32x16 power = Type::exact_weights ? exp2_f32(x) : exp2_below_one(x);
    const f32x16 weight = zero_where_less(power, x, smallest);  // denormals would be slow, and are nothing
    store(i, weight);
    sum = add(sum, weight);
  }
  for (int i = 16 * keys.first; i < first; i += 16) store(i, zero_f32());
  for (int i = last; i < 16 * keys.last; i += 16) store(i, zero_f32());
  return lane_sum(sum);
}

// A query's weights as the products want them.
template <class Type>
struct Weights {
  typename Type::Input* rows;  // [groups][passes][kSpan]
  float* scales;               // [groups]: of codes
  float* bases;                // [groups]: sum of weights times minimums
  std::int32_t* starts;        // [groups]
};

// Scales of a tile's positions, zeros for those a query does not see: what lies there may be a NaN.
inline f32x16 visible_scales(const std::uint16_t* scales, int tile, const Visible& keys) {
  const f32x16 all = load_f16(scales);
  if (keys.begin <= 16 * tile && 16 * (tile + 1) <= keys.end) return all;
  float lanes[16];
  store_f32(lanes, all);
  for (int i = 0; i < 16; ++i)
    if (16 * tile + i < keys.begin || 16 * tile + i >= keys.end) lanes[i] = 0.0F;
  return load_f32(lanes);
}

// Weights times the values' scales as codes, group by group; `weights` [kSpan] are lost.
template <class Type>
void quantise_weights(const float* weights, const SpanTiles& tiles, const Visible& keys, std::int64_t groups,
                      const Weights<Type>& to) {
  const int first = keys.begin / 16, last = (keys.end + 15) / 16;
  float scaled[kSpan];
  for (std::int64_t g = 0; g < groups; ++g) {
    typename Type::Input* row = to.rows + g * Type::passes * kSpan;
    f32x16 top = zero_f32(), all = zero_f32(), base = zero_f32();
    for (int t = first; t < last; ++t) {
      const f32x16 weight = load_f32(weights + 16 * t);
      const f32x16 product = mul(weight, visible_scales(tiles.value_scales[t] + g * kTile, t, keys));
      store_f32(scaled + 16 * t, product);
      top = max(product, top);
      all = add(all, product);
      if constexpr (Type::value_offset == 0)
        base = fma(weight, visible_scales(tiles.value_minimums[t] + g * kTile, t, keys), base);
    }
    const float largest = lane_max(top), inverse = static_cast<float>(kMostCode) / largest;
    const f32x16 factor = set_f32(inverse > 0x1p127F ? 0x1p127F : inverse);
    f32x16 sum = zero_f32();
    for (int t = keys.first; t < keys.last; ++t) {
      const bool seen = first <= t && t < last;
      const f32x16 codes = seen ? round_even(mul(load_f32(scaled + 16 * t), factor)) : zero_f32();
      sum = add(sum, codes);  // exact: below 2^24
      store_digits(row + 16 * t, kSpan, codes);
    }
    const float total = lane_sum(sum), checked = lane_sum(all);
    const bool is_nan = checked != checked;
    to.scales[g] = is_nan ? checked : largest / static_cast<float>(kMostCode);
    to.starts[g] = is_nan ? 0 : -Type::value_offset * static_cast<std::int32_t>(total);
    to.bases[g] = lane_sum(base);
  }
}

// ------------------------------------------------------------------ weighted values

// Columns [column, column + 16 Wide) of float weights [Rows][kSpan] times values, over tiles [begin, end) -> sums
// [Rows], `width` apart.
template <class Type, int Rows, int Wide, bool Fetch>
inline void weigh_columns(const typename Type::Input* weights, const SpanTiles& tiles, int begin, int end,
                          std::int64_t column, std::int64_t width, float* sums) {
  f32x16 total[Rows][Wide];
  start_sums<Type>(total, nullptr, 0);
  constexpr int steps = kTile / Type::value_unit, every = Fetch ? 1 : 0;
#pragma GCC unroll 1
  for (int i = begin * steps; i < end * steps; ++i) {
    const std::int64_t at = 4 * column + i % steps * 4 * width;
    weigh_step<Type, Rows, Wide, every>(total, weights + Type::value_unit * i, kSpan, tiles.values[i / steps] + at,
                                        tiles.values[i / steps + kAhead<Type>] + at);
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < Wide; ++n) store_f32(sums + r * width + 16 * n, total[r][n]);
}

// The same with codes.
template <class Type, int Rows, int Wide, bool Fetch>
inline void weigh_code_columns(const Weights<Type>& weights, std::int64_t groups, const SpanTiles& tiles, int begin,
                               int end, std::int64_t column, std::int64_t width, float* sums) {
  const std::int64_t g = groups == 1 ? 0 : column / kValueGroup, stride = groups * Type::passes * kSpan;
  const typename Type::Input* x = weights.rows + g * Type::passes * kSpan;
  typename Type::Sum total[Rows][Wide];
  start_sums<Type>(total, weights.starts + g, groups);
  constexpr int steps = kTile / Type::value_unit, every = Fetch ? Type::passes : 0;
#pragma GCC unroll 1
  for (int i = begin * steps; i < end * steps; ++i) {
    const std::int64_t at = 4 * column + i % steps * 4 * width;
    weigh_step<Type, Rows, Wide, every>(total, x + Type::value_unit * i, stride, tiles.values[i / steps] + at,
                                        tiles.values[i / steps + kAhead<Type>] + at);
  }
  if constexpr (Type::passes == 2) {
    typename Type::Sum low[Rows][Wide];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
      for (int n = 0; n < Wide; ++n) low[r][n] = Type::shift(total[r][n], weights.starts[r * groups + g]);
#pragma GCC unroll 1
    for (int i = begin * steps; i < end * steps; ++i) {
      const std::int64_t at = 4 * column + i % steps * 4 * width;
      weigh_step<Type, Rows, Wide, every, 1>(low, x + kSpan + Type::value_unit * i, stride,
                                             tiles.values[i / steps] + at, tiles.values[i / steps + kAhead<Type>] + at);
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
      for (int n = 0; n < Wide; ++n) total[r][n] = low[r][n];
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    const f32x16 scale = set_f32(weights.scales[r * groups + g]), base = set_f32(weights.bases[r * groups + g]);
#pragma GCC unroll 8
    for (int n = 0; n < Wide; ++n)
      store_f32(sums + r * width + 16 * n, fma(Type::value(total[r][n]), scale, base));
  }
}

// Calls body(column, Count<vectors>{}) for all columns of `width`.
template <int N>
struct Count {
  static constexpr int value = N;
};

template <class Body>
inline void for_columns(std::int64_t width, const Body& body) {
  std::int64_t column = 0;
  for (; column + 16 * kWide <= width; column += 16 * kWide) body(column, Count<kWide>{});
  if constexpr (kWide > 1) {
    for (; column + 32 <= width; column += 32) body(column, Count<2>{});
    if (column < width) body(column, Count<1>{});
  }
}

}  // namespace ropeway::ROPEWAY_ISA
