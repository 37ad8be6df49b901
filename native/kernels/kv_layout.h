// Addresses inside the paged cache; attention.h has the picture.
#pragma once

#include "kernels/attention.h"

namespace ropeway::ROPEWAY_ISA {

inline std::int64_t round_up(std::int64_t n, std::int64_t step) { return (n + step - 1) / step * step; }
inline std::int64_t least(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
inline std::int64_t most_of(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

// The tile of a block that holds its position `place`.
inline std::byte* tile_at(const KVStorage& cache, std::int64_t block, std::int64_t layer, std::int64_t head,
                          std::int64_t place) {
  const std::int64_t part = (block * cache.layers + layer) * cache.kv_heads + head;
  return cache.data + part * cache.head_bytes + place / cache.tile_positions * cache.tile_bytes;
}

// Offsets in elements: feature d of a tile's position in the keys, and in the values.
inline std::int64_t key_element(const KVStorage& cache, std::int64_t position, std::int64_t d) {
  return (d / cache.unit * cache.tile_positions + position) * cache.unit + d % cache.unit;
}
inline std::int64_t value_element(const KVStorage& cache, std::int64_t position, std::int64_t d) {
  const std::int64_t unit = least(cache.unit, cache.tile_positions);
  return (position / unit * cache.head_dim + d) * unit + position % unit;
}
// Offset in bfloat16 elements, in the keys of a begun group, of feature d of position `place`: two tiles of bf16.
inline std::int64_t begun_element(const KVStorage& cache, std::int64_t place, std::int64_t d) {
  return ((place / kTile * ((cache.head_dim + 1) / 2) + d / 2) * kTile + place % kTile) * 2 + d % 2;
}
// Offset in bytes of a 4-bit value; positions with bit 2 set are in the high half.
inline std::int64_t small_value_byte(const KVStorage& cache, std::int64_t position, std::int64_t d) {
  return (position / 8 * cache.head_dim + d) * 4 + position % 4;
}
inline int small_value_shift(std::int64_t position) { return position & 4; }

}  // namespace ropeway::ROPEWAY_ISA
