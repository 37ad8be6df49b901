// The keys and values of one span of positions, as the products want them: where they lie if that is in whole tiles
// and vectors, else a copy.
#pragma once

#include <cstring>

#include "kernels/attention_products.h"
#include "kernels/kv_layout.h"

namespace ropeway::ROPEWAY_ISA {

// Keys of a span, relative to its start, and where its blocks are. A query sees a range of keys that starts in
// [begin, common_begin] and ends in [common_end, end].
struct SpanRange {
  std::int64_t start;  // absolute position of the span
  std::int64_t begin, end;
  std::int64_t common_begin, common_end;
  const std::int32_t* block_table;
};

// What a copy lays out: tiles of 16 positions, features rounded up to whole vectors.
struct CopyLayout {
  std::int64_t steps, width;            // of the keys: units of features; of the values: features
  std::int64_t key_bytes, value_bytes;  // of a tile
};

inline CopyLayout copy_layout(const KVStorage& cache) {
  const std::int64_t steps = (cache.head_dim + cache.unit - 1) / cache.unit, width = round_up(cache.head_dim, 16);
  const std::int64_t step_positions = small_values(cache.type) ? 8 : cache.unit;
  return {steps, width, 64 * steps, kTile / step_positions * width * 4};
}

class SpanReader {
 public:
  SpanReader(const KVStorage& cache, std::int64_t layer, std::byte* keys, std::byte* values)
      : cache_(cache), layer_(layer), layout_(copy_layout(cache)), keys_(keys), values_(values) {}

  // Blocks without a key in the range are not touched: their table entries may be undefined. `next` are the tiles read
  // after this span, null where there are none. Returns false where a value that some query does not see is not finite:
  // a weight of zero would not keep it out.
  bool read(std::int64_t head, const SpanRange& range, const std::byte* const* next, SpanTiles& tiles) const {
    const bool whole = cache_.tile_positions == kTile, vectors = whole && cache_.head_dim % 16 == 0;
    const std::int64_t first = range.begin / kTile, last = (range.end + kTile - 1) / kTile;
    bool finite = true;
    for (std::int64_t t = first; t < last; ++t) {
      const std::byte* tile = whole ? tile_of(head, range, t * kTile) : nullptr;
      std::byte* const key_copy = keys_ + t * layout_.key_bytes;
      std::byte* const value_copy = values_ + t * layout_.value_bytes;
      tiles.keys[t] = whole ? tile : key_copy;
      if (!whole) copy_keys(head, range, t, key_copy);
      const bool seen = range.common_begin <= t * kTile && (t + 1) * kTile <= range.common_end;
      if (quantised(cache_.type)) {  // codes are finite
        tiles.key_scales[t] = reinterpret_cast<const std::uint16_t*>(tile + cache_.key_scales);
        tiles.value_scales[t] = reinterpret_cast<const std::uint16_t*>(tile + cache_.value_scales);
        tiles.value_minimums[t] = reinterpret_cast<const std::uint16_t*>(tile + cache_.value_minimums);
        tiles.values[t] = vectors ? tile + cache_.values : value_copy;
        if (!vectors) copy_value_rows(tile + cache_.values, value_copy);
      } else if (vectors && seen) {
        tiles.values[t] = tile + cache_.values;
      } else {
        tiles.values[t] = value_copy;
        const bool copied = cache_.type == KVType::fp32 ? copy_values<std::uint32_t>(head, range, t, value_copy)
                                                        : copy_values<std::uint16_t>(head, range, t, value_copy);
        finite = finite && (copied || seen);
      }
    }
    for (std::int64_t i = 0; i < kMostAhead; ++i) {
      tiles.values[last + i] = next[i] == nullptr ? tiles.values[last - 1] : next[i];
    }
    for (std::int64_t i = 0; i <= kMostAhead; ++i) tiles.keys[last + i] = tiles.values[first + i];
    return finite;
  }

  const std::byte* tile_of(std::int64_t head, const SpanRange& range, std::int64_t at) const {
    const std::int64_t position = range.start + at;
    return tile_at(cache_, range.block_table[position / cache_.block_size], layer_, head, position % cache_.block_size);
  }

 private:
  // From blocks smaller than a tile.
  void copy_keys(std::int64_t head, const SpanRange& range, std::int64_t t, std::byte* to) const {
    const std::int64_t positions = cache_.tile_positions, line = 4 * positions;  // bytes of a step
    for (std::int64_t at = t * kTile; at < least((t + 1) * kTile, range.end); at += positions) {
      if (at + positions <= range.begin) continue;
      const std::byte* from = tile_of(head, range, at);
      for (std::int64_t s = 0; s < layout_.steps; ++s)
        std::memcpy(to + 64 * s + 4 * (at % kTile), from + line * s, static_cast<std::size_t>(line));
    }
  }

  // Of codes, whose rows may be shorter than whole vectors.
  void copy_value_rows(const std::byte* from, std::byte* to) const {
    const std::int64_t row = cache_.head_dim * 4, padded = layout_.width * 4;
    for (std::int64_t i = 0; i * padded < layout_.value_bytes; ++i) {
      std::memcpy(to + i * padded, from + i * row, static_cast<std::size_t>(row));
      std::memset(to + i * padded + row, 0, static_cast<std::size_t>(padded - row));
    }
  }

  // Values of a tile's positions in the range, zeros elsewhere. Returns whether all are finite.
  template <class Element>
  bool copy_values(std::int64_t head, const SpanRange& range, std::int64_t t, std::byte* to) const {
    constexpr std::int64_t unit = 4 / sizeof(Element);
    const std::int64_t step = least(unit, cache_.tile_positions), size = cache_.head_dim;
    std::memset(to, 0, static_cast<std::size_t>(layout_.value_bytes));
    bool finite = true;
    for (std::int64_t at = t * kTile; at < least((t + 1) * kTile, range.end); at += step) {
      if (at + step <= range.begin) continue;
      const auto* values = reinterpret_cast<const Element*>(tile_of(head, range, at) + cache_.values);
      const Element* from = values + value_element(cache_, at % cache_.tile_positions, 0);
      Element* row = reinterpret_cast<Element*>(to) + at % kTile / unit * unit * layout_.width + at % unit;
      if (step < unit) {  // blocks of one position
        for (std::int64_t d = 0; d < size; ++d) {
          row[d * unit] = from[d];
          finite = finite && (from[d] & 0x7F80) != 0x7F80;
        }
        continue;
      }
      const std::uint32_t later = at < range.begin ? 0xFFFF0000U : 0xFFFFFFFFU;
      const std::uint32_t mask = range.end < at + step ? later & 0x0000FFFFU : later;
      const auto* pairs = reinterpret_cast<const std::uint32_t*>(from);
      auto* words = reinterpret_cast<std::uint32_t*>(row);
      for (std::int64_t d = 0; d < size; ++d) words[d] = pairs[d] & mask;
      finite = all_finite<Element>(words, size) && finite;
    }
    return finite;
  }

  // Of words that hold one number, or two of half the size.
  template <class Element>
  static bool all_finite(const std::uint32_t* words, std::int64_t count) {
    constexpr std::uint32_t low = sizeof(Element) == 4 ? 0 : 0x7FFF, high = 0x7FFFFFFF & ~low;
    std::uint32_t low_top = 0, top = 0;
    for (std::int64_t d = 0; d < count; ++d) {
      low_top = (words[d] & low) > low_top ? words[d] & low : low_top;
      top = (words[d] & high) > top ? words[d] & high : top;
    }
    return low_top < 0x7F80 && top < 0x7F800000;
  }

  const KVStorage& cache_;
  const std::int64_t layer_;
  const CopyLayout layout_;
  std::byte* const keys_;
  std::byte* const values_;
};

}  // namespace ropeway::ROPEWAY_ISA
