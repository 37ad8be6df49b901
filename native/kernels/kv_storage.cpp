#include "kernels/attention.h"

namespace ropeway {
namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace

KVStorage make_kv_storage(std::byte* data, std::int64_t layers, std::int64_t kv_heads, std::int64_t head_dim,
                          std::int64_t block_size, KVType type, const float* key_factors) {
  const std::int64_t positions = block_size < kTile ? block_size : kTile;
  const bool quantised = type == KVType::int8 || type == KVType::int4;
  const std::int64_t unit = quantised ? 4 : type == KVType::bf16 ? 2 : 1;
  const std::int64_t element = quantised ? 1 : 4 / unit;
  const std::int64_t half = sizeof(std::uint16_t);
  KVStorage cache{};
  cache.data = data;
  cache.layers = layers;
  cache.kv_heads = kv_heads;
  cache.head_dim = head_dim;
  cache.block_size = block_size;
  cache.type = type;
  cache.key_factors = key_factors;
  cache.tile_positions = positions;
  cache.unit = unit;
  cache.values = ceil_div(head_dim, unit) * unit * positions * element;
  cache.key_scales = cache.values + head_dim * positions * element / (type == KVType::int4 ? 2 : 1);
  const std::int64_t groups = type == KVType::int4 ? ceil_div(head_dim, kValueGroup) : 1;
  cache.value_scales = cache.key_scales + (quantised ? half * positions : 0);
  cache.value_minimums = cache.value_scales + (quantised ? half * positions * groups : 0);
  const std::int64_t bytes = cache.value_minimums + (type == KVType::int4 ? half * positions * groups : 0);
  cache.tile_bytes = quantised ? ceil_div(bytes, 64) * 64 : bytes;
  cache.head_bytes = block_size / positions * cache.tile_bytes;
  cache.block_bytes = layers * kv_heads * cache.head_bytes;
  return cache;
}

}  // namespace ropeway
