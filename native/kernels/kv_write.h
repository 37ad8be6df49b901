// Writing keys and values, each type its own way, and reading them back. The formulas of quantised types are those of
// ropeway/devices/base.py; what is stored is the same bits on every instruction set.
#pragma once

#include <cstring>

#include "kernels/half.h"
#include "kernels/kv_layout.h"
#include "kernels/simd_math.h"

namespace ropeway::ROPEWAY_ISA {

inline void narrow(float x, float& y) { y = x; }
// Round to nearest, ties to even; a NaN stays one.
inline void narrow(float x, std::uint16_t& y) {
  const std::uint32_t bits = float_bits(x);
  const std::uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  y = static_cast<std::uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}

// ------------------------------------------------------------------ fp32, bf16

inline f32x16 load_some(const float* x, std::int64_t count) {
  return count >= 16 ? load_f32(x) : load_f32(x, static_cast<int>(count));
}

// Features that are narrowed at a time, all of them before the first is stored.
inline constexpr int kNarrowed = 64;

template <class Element>
inline void narrow_some(const float* x, std::int64_t count, Element (&some)[kNarrowed]) {
  if (count >= kNarrowed) {
    for (int i = 0; i < kNarrowed; ++i) narrow(x[i], some[i]);
  } else {
    for (int i = 0; i < kNarrowed; ++i) narrow(i < count ? x[i] : 0.0F, some[i]);
  }
}

template <class Element, int Unit>
void write_floats(const KVStorage& cache, std::byte* tile, std::int64_t position, const float* k, const float* v) {
  const std::int64_t size = cache.head_dim, stride = Unit * cache.tile_positions;
  const std::int64_t unit = least(Unit, cache.tile_positions);
  Element* key = reinterpret_cast<Element*>(tile) + Unit * position;
  Element* value = reinterpret_cast<Element*>(tile + cache.values) + position / unit * unit * size + position % unit;
  for (std::int64_t d = 0; d < size; d += kNarrowed) {
    const std::int64_t count = least(kNarrowed, size - d);
    Element keys[kNarrowed], values[kNarrowed];
    narrow_some(k + d, count, keys);
    narrow_some(v + d, count, values);
    for (std::int64_t i = 0; i < count; i += Unit, key += stride) std::memcpy(key, keys + i, Unit * sizeof(Element));
    for (std::int64_t i = 0; i < count; ++i, value += unit) *value = values[i];
  }
}

// ------------------------------------------------------------------ int8, int4

// The smallest float16 scale with scale * limit >= extent, near the nearest; NaN where there is none.
inline std::uint16_t scale_for(float extent, float limit) {
  std::uint16_t scale = to_half(extent / limit);
  if (from_half(scale) * limit < extent) ++scale;
  return scale >= kHalfInfinity ? kHalfNaN : scale;
}

// Codes of x [size] and their scale; codes are bytes holding code + 128.
inline std::uint16_t quantise_signed(const float* x, std::int64_t size, std::uint8_t* codes) {
  i32x16 top = set_i32(0);
  for (std::int64_t d = 0; d < size; d += 16) top = max(abs_bits(load_some(x + d, size - d)), top);
  const auto largest = static_cast<std::uint32_t>(reduce_max(top));
  const std::uint16_t half = largest >= 0x7F800000 ? kHalfNaN : scale_for(bits_float(largest), 127.0F);
  const float scale = from_half(half);
  if (!(scale > 0.0F)) {
    std::memset(codes, 128, static_cast<std::size_t>(size));
    return half;
  }
  const f32x16 divisor = set_f32(scale);
  for (std::int64_t d = 0; d < size; d += 16) {
    std::int32_t lanes[16];
    const i32x16 code = to_i32(clamp(divide(load_some(x + d, size - d), divisor), -127.0F, 127.0F));
    std::memcpy(lanes, &code, sizeof lanes);
    for (std::int64_t i = 0; i < least(16, size - d); ++i) codes[d + i] = static_cast<std::uint8_t>(lanes[i] + 128);
  }
  return half;
}

struct ScaleAndMinimum {
  std::uint16_t scale, minimum;
};

// Codes in [0, 15] of x [size].
inline ScaleAndMinimum quantise_small(const float* x, std::int64_t size, std::uint8_t* codes) {
  std::memset(codes, 0, static_cast<std::size_t>(size));
  i32x16 top = set_i32(0);
  f32x16 lowest = set_f32(x[0]), highest = lowest;
  for (std::int64_t d = 0; d < size; d += 16) {
    f32x16 some;
    if (size - d >= 16) {
      some = load_f32(x + d);
    } else {
      float lanes[16];
      for (std::int64_t i = 0; i < 16; ++i) lanes[i] = x[d + i < size ? d + i : 0];
      some = load_f32(lanes);
    }
    top = max(abs_bits(some), top);
    lowest = min(some, lowest);
    highest = max(some, highest);
  }
  if (reduce_max(top) >= 0x7F800000) return {kHalfNaN, kHalfNaN};
  const float low = 0.0F - lane_max(subtract(zero_f32(), lowest)), high = lane_max(highest);
  const std::uint16_t half_minimum = to_half(low);
  if ((half_minimum & 0x7FFF) >= kHalfInfinity) return {kHalfNaN, kHalfNaN};
  const float minimum = from_half(half_minimum), extent = high - minimum;
  const std::uint16_t half_scale = scale_for(extent > 0.0F ? extent : 0.0F, 15.0F);
  const float scale = from_half(half_scale);
  if (scale != scale) return {kHalfNaN, kHalfNaN};
  if (scale > 0.0F) {
    const f32x16 shift = set_f32(minimum), divisor = set_f32(scale);
    for (std::int64_t d = 0; d < size; d += 16) {
      std::int32_t lanes[16];
      const f32x16 steps = divide(subtract(load_some(x + d, size - d), shift), divisor);
      const i32x16 code = to_i32(clamp(steps, 0.0F, 15.0F));
      std::memcpy(lanes, &code, sizeof lanes);
      for (std::int64_t i = 0; i < least(16, size - d); ++i) codes[d + i] = static_cast<std::uint8_t>(lanes[i]);
    }
  }
  return {half_scale, half_minimum};
}

// Features of a head that are quantised at a time.
inline constexpr std::int64_t kMostFeatures = 512;

inline void write_key_codes(const KVStorage& cache, std::byte* tile, std::int64_t position, const float* k,
                            const float* factors) {
  const std::int64_t size = cache.head_dim, padded = round_up(size, 4);
  float scaled[kMostFeatures];
  std::uint8_t codes[kMostFeatures];
  if (factors != nullptr) {
    for (std::int64_t d = 0; d < size; ++d) scaled[d] = k[d] / factors[d];
    k = scaled;
  }
  reinterpret_cast<std::uint16_t*>(tile + cache.key_scales)[position] = quantise_signed(k, size, codes);
  for (std::int64_t d = size; d < padded; ++d) codes[d] = 128;
  for (std::int64_t d = 0; d < padded; d += 4) std::memcpy(tile + (d * kTile + 4 * position), codes + d, 4);
}

inline void write_int8(const KVStorage& cache, std::byte* tile, std::int64_t position, const float* k, const float* v,
                       const float* factors) {
  write_key_codes(cache, tile, position, k, factors);
  std::uint8_t codes[kMostFeatures];
  reinterpret_cast<std::uint16_t*>(tile + cache.value_scales)[position] = quantise_signed(v, cache.head_dim, codes);
  auto* values = reinterpret_cast<std::uint8_t*>(tile + cache.values) + value_element(cache, position, 0);
  for (std::int64_t d = 0; d < cache.head_dim; ++d) values[4 * d] = codes[d];
}

inline void write_small_values(const KVStorage& cache, std::byte* tile, std::int64_t position, const float* v) {
  auto* scales = reinterpret_cast<std::uint16_t*>(tile + cache.value_scales) + position;
  auto* minimums = reinterpret_cast<std::uint16_t*>(tile + cache.value_minimums) + position;
  auto* values = reinterpret_cast<std::uint8_t*>(tile + cache.values) + small_value_byte(cache, position, 0);
  const int shift = small_value_shift(position);
  const int others = 0xF0 >> shift;
  for (std::int64_t first = 0; first < cache.head_dim; first += kValueGroup, scales += kTile, minimums += kTile) {
    const std::int64_t count = least(kValueGroup, cache.head_dim - first);
    std::uint8_t codes[kValueGroup];
    const ScaleAndMinimum group = quantise_small(v + first, count, codes);
    *scales = group.scale;
    *minimums = group.minimum;
    for (std::int64_t d = 0; d < count; ++d) {
      std::uint8_t& byte = values[4 * (first + d)];
      byte = static_cast<std::uint8_t>((byte & others) | codes[d] << shift);
    }
  }
}

// ------------------------------------------------------------------ int4_full: keys

// A group's keys of one head, each feature over all positions; as `begun_element` says -> the group's tiles.
inline void write_key_group(const KVStorage& cache, const std::uint16_t* keys, std::byte* first) {
  std::byte* second = first + cache.tile_bytes;
  auto* scales = reinterpret_cast<std::uint16_t*>(first + cache.key_scales);
  auto* minimums = reinterpret_cast<std::uint16_t*>(second + cache.key_scales);
  for (std::int64_t d = 0; d < cache.head_dim; d += cache.unit) {
    std::uint32_t words[kKeyGroup] = {};
    for (std::int64_t i = 0; i < least(cache.unit, cache.head_dim - d); ++i) {
      float feature[kKeyGroup];
      std::uint8_t codes[kKeyGroup];
      for (std::int64_t place = 0; place < kKeyGroup; ++place)
        feature[place] = bits_float(std::uint32_t{keys[begun_element(cache, place, d + i)]} << 16);
      const ScaleAndMinimum group = quantise_small(feature, kKeyGroup, codes);
      scales[d + i] = group.scale;
      minimums[d + i] = group.minimum;
      for (std::int64_t place = 0; place < kKeyGroup; ++place) words[place] |= std::uint32_t{codes[place]} << 4 * i;
    }
    const std::int64_t at = key_element(cache, 0, d) / 2;
    std::memcpy(first + at, words, sizeof words / 2);
    std::memcpy(second + at, words + kTile, sizeof words / 2);
  }
}

// The keys of a step's tokens that are in one group, of one head.
inline void write_keys_of_group(const WriteKV& args, const KeyGroup& group, std::int64_t head) {
  const KVStorage& cache = args.cache;
  const std::int64_t size = cache.head_dim;
  auto* keys = reinterpret_cast<std::uint16_t*>(group.keys + args.layer * group.layer_bytes + head * begun_bytes(size));
  for (std::int64_t i = 0; i < group.tokens; ++i) {
    const float* k = args.k + ((group.first_token + i) * cache.kv_heads + head) * size;
    std::uint16_t* key = keys + begun_element(cache, group.place + i, 0);
    for (std::int64_t d = 0; d < size; d += kNarrowed) {
      const std::int64_t count = least(kNarrowed, size - d);
      std::uint16_t some[kNarrowed];
      narrow_some(k + d, count, some);
      for (std::int64_t pair = 0; pair < count; pair += 2, key += 2 * kTile) std::memcpy(key, some + pair, 4);
    }
  }
  if (!group.full) return;
  const std::int64_t block = group.slot / cache.block_size, place = group.slot % cache.block_size;
  write_key_group(cache, keys, tile_at(cache, block, args.layer, head, place));
}

// ------------------------------------------------------------------ tokens

inline void write_token(const KVStorage& cache, std::byte* tile, std::int64_t position, const float* k, const float* v,
                        const float* factors) {
  switch (cache.type) {
    case KVType::fp32: return write_floats<float, 1>(cache, tile, position, k, v);
    case KVType::bf16: return write_floats<std::uint16_t, 2>(cache, tile, position, k, v);
    case KVType::int8: return write_int8(cache, tile, position, k, v, factors);
    case KVType::int4:
      write_key_codes(cache, tile, position, k, factors);
      return write_small_values(cache, tile, position, v);
    case KVType::int4_full: return write_small_values(cache, tile, position, v);  // keys: group by group
  }
}

inline void write_tokens(const WriteKV& args, std::int64_t first, std::int64_t last) {
  const KVStorage& cache = args.cache;
  const std::int64_t size = cache.head_dim, pairs = (last - first) * cache.kv_heads;
  const auto place = [&](std::int64_t pair) {
    const std::int64_t slot = args.slots[first + pair / cache.kv_heads], offset = slot % cache.block_size;
    return tile_at(cache, slot / cache.block_size, args.layer, pair % cache.kv_heads, offset);
  };
  const auto position = [&](std::int64_t pair) {
    return args.slots[first + pair / cache.kv_heads] % cache.block_size % cache.tile_positions;
  };
  for (std::int64_t pair = 0; pair < pairs; ++pair) {
    const std::int64_t from = (first * cache.kv_heads + pair) * size, head = pair % cache.kv_heads;
    const float* factors =
        cache.key_factors == nullptr ? nullptr : cache.key_factors + (args.layer * cache.kv_heads + head) * size;
    write_token(cache, place(pair), position(pair), args.k + from, args.v + from, factors);
  }
}

// ------------------------------------------------------------------ reading back

inline float read_element(const std::byte* elements, KVType type, std::int64_t at) {
  if (type == KVType::fp32) return reinterpret_cast<const float*>(elements)[at];
  return bits_float(std::uint32_t{reinterpret_cast<const std::uint16_t*>(elements)[at]} << 16);
}

inline float read_code(const std::byte* codes, std::int64_t at, const std::byte* scales, std::int64_t position) {
  const int code = reinterpret_cast<const std::uint8_t*>(codes)[at] - 128;
  return static_cast<float>(code) * from_half(reinterpret_cast<const std::uint16_t*>(scales)[position]);
}

// Feature d of position `place` of a group that is full.
inline float read_small_key(const KVStorage& cache, const std::byte* first, std::int64_t place, std::int64_t d) {
  const std::byte* second = first + cache.tile_bytes;
  const std::byte* tile = place < kTile ? first : second;
  const float scale = from_half(reinterpret_cast<const std::uint16_t*>(first + cache.key_scales)[d]);
  const float minimum = from_half(reinterpret_cast<const std::uint16_t*>(second + cache.key_scales)[d]);
  const std::int64_t at = key_element(cache, place % kTile, d);  // in halves of bytes
  const int code = reinterpret_cast<const std::uint8_t*>(tile)[at / 2] >> 4 * (at % 2) & 15;
  return static_cast<float>(code) * scale + minimum;
}

// `place`: in the block whose first tile is given.
inline void read_token(const KVStorage& cache, const std::byte* block, std::int64_t place, float* k, float* v) {
  const std::int64_t position = place % cache.tile_positions;
  const std::byte* tile = block + place / cache.tile_positions * cache.tile_bytes;
  const std::byte* values = tile + cache.values;
  for (std::int64_t d = 0; d < cache.head_dim; ++d) {
    const std::int64_t key_at = key_element(cache, position, d);
    switch (cache.type) {
      case KVType::fp32:
      case KVType::bf16:
        k[d] = read_element(tile, cache.type, key_at);
        v[d] = read_element(values, cache.type, value_element(cache, position, d));
        break;
      case KVType::int8:
        k[d] = read_code(tile, key_at, tile + cache.key_scales, position);
        v[d] = read_code(values, value_element(cache, position, d), tile + cache.value_scales, position);
        break;
      case KVType::int4:
      case KVType::int4_full: {
        k[d] = cache.type == KVType::int4
                   ? read_code(tile, key_at, tile + cache.key_scales, position)
                   : read_small_key(cache, tile - place % kKeyGroup / kTile * cache.tile_bytes, place % kKeyGroup, d);
        const std::int64_t group = d / kValueGroup * kTile + position;
        const auto* scales = reinterpret_cast<const std::uint16_t*>(tile + cache.value_scales);
        const auto* minimums = reinterpret_cast<const std::uint16_t*>(tile + cache.value_minimums);
        const int byte = reinterpret_cast<const std::uint8_t*>(values)[small_value_byte(cache, position, d)];
        const int code = byte >> small_value_shift(position) & 15;
        v[d] = static_cast<float>(code) * from_half(scales[group]) + from_half(minimums[group]);
        break;
      }
    }
  }
}

inline void read_block(const ReadKV& args, std::int64_t index) {
  const KVStorage& cache = args.cache;
  for (std::int64_t place = 0; place < cache.block_size; ++place) {
    for (std::int64_t head = 0; head < cache.kv_heads; ++head) {
      const std::int64_t to = ((index * cache.block_size + place) * cache.kv_heads + head) * cache.head_dim;
      read_token(cache, tile_at(cache, args.blocks[index], args.layer, head, 0), place, args.k + to, args.v + to);
    }
  }
}

}  // namespace ropeway::ROPEWAY_ISA
