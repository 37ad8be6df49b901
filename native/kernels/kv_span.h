// The keys and values of one span of positions, as the products of attention_tile.h want them: where they lie if
// sixteen keys lie together, else a copy.
#pragma once

#include <cstring>

#include "kernels/attention_tile.h"
#include "kernels/kv_layout.h"

namespace ropeway::ROPEWAY_ISA {

inline std::int64_t round_up(std::int64_t n, std::int64_t step) { return (n + step - 1) / step * step; }
inline std::int64_t least(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
inline std::int64_t most_of(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

inline float widen(float x) { return x; }
inline float widen(std::uint16_t x) {
  const std::uint32_t bits = std::uint32_t{x} << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

// Keys [begin, end) of a span, relative to its start, and where its blocks are.
struct SpanRange {
  std::int64_t start;  // absolute position of the span
  std::int64_t begin, end;
  std::int64_t end_of_item;  // relative to the start as well; beyond the span if the next one follows
  const std::int32_t* block_table;
};

template <class Element>
SpanTiles<Element, true> tiles_in_place(const KVStorage& cache, std::int64_t layer, std::int64_t head,
                                        const SpanRange& range) {
  const auto offset = [&](std::int64_t t) { return (range.start + 16 * t) % cache.block_size * cache.head_dim; };
  const auto block = [&](std::int64_t t) { return range.block_table[(range.start + 16 * t) / cache.block_size]; };
  SpanTiles<Element, true> tiles;
  tiles.value_stride = cache.head_dim;
  const std::int64_t first = range.begin / 16, last = (range.end + 15) / 16;
  for (std::int64_t t = first; t < last; ++t) {
    tiles.keys[t] = block_keys<Element>(cache, block(t), layer, head) + offset(t);
    tiles.values[t] = block_values<Element>(cache, block(t), layer, head) + offset(t);
  }
  for (std::int64_t i = 0; i < kAhead; ++i) tiles.keys[last + i] = tiles.values[least(first + i, last - 1)];
  const std::int64_t next_group = round_up(last, kAhead);
  for (std::int64_t t = last; t < next_group + kAhead; ++t) {
    const std::int64_t next_tile = kSpan / 16 + t - next_group;
    const bool follows = t >= next_group && 16 * next_tile < range.end_of_item;
    tiles.values[t] = follows ? block_keys<Element>(cache, block(next_tile), layer, head) + offset(next_tile)
                              : tiles.values[last - 1];
  }
  return tiles;
}

// Copies keys and values [range.begin, range.end) to float32; values padded with zeros to `width` features. Blocks
// without a key in the range are not touched: their table entries may be undefined.
template <class Element>
SpanTiles<float, false> tiles_copied(const KVStorage& cache, std::int64_t layer, std::int64_t head,
                                     const SpanRange& range, std::int64_t width, float* keys, float* values) {
  const std::int64_t size = cache.head_dim, tile = key_tile(cache);
  SpanTiles<float, false> tiles;
  tiles.value_stride = width;
  for (int t = 0; t < kSpan / 16; ++t) {
    tiles.keys[t] = keys + 16 * t * size;
    tiles.values[t] = values + 16 * t * width;
  }
  for (std::int64_t at = range.begin / tile * tile; at < range.end; at += tile) {
    const std::int64_t position = range.start + at;
    const std::int64_t block = range.block_table[position / cache.block_size];
    const std::int64_t offset = position % cache.block_size * size;
    const Element* k = block_keys<Element>(cache, block, layer, head) + offset;
    const Element* v = block_values<Element>(cache, block, layer, head) + offset;
    float* key_place = keys + at / 16 * 16 * size + at % 16;
    if (tile == 16) {
      for (std::int64_t d = 0; d < size; ++d) store_f32(key_place + 16 * d, load_lanes(k + 16 * d));
    } else {
      for (std::int64_t d = 0; d < size; ++d)
        for (std::int64_t j = 0; j < tile; ++j) key_place[16 * d + j] = widen(k[d * tile + j]);
    }
    for (std::int64_t j = 0; j < tile; ++j) {
      float* place = values + (at + j) * width;
      std::int64_t d = 0;
      for (; d + 16 <= size; d += 16) store_f32(place + d, load_lanes(v + j * size + d));
      for (; d < size; ++d) place[d] = widen(v[j * size + d]);
      for (; d < width; ++d) place[d] = 0.0F;
    }
  }
  return tiles;
}

}  // namespace ropeway::ROPEWAY_ISA
