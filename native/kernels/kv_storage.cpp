#include "kernels/attention.h"

namespace ropeway {
namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace

KVStorage make_kv_storage(std::byte* data, std::int64_t layers, std::int64_t kv_heads, std::int64_t head_dim,
                          std::int64_t block_size, KVType type, const float* key_factors, BegunKeys* begun) {
  const std::int64_t positions = block_size < kTile ? block_size : kTile;
  const bool codes = quantised(type), full = type == KVType::int4_full;
  const std::int64_t unit = full ? 8 : codes ? 4 : type == KVType::bf16 ? 2 : 1;
  const std::int64_t value_bits = small_values(type) ? 4 : codes ? 8 : 32 / unit, half = sizeof(std::uint16_t);
  KVStorage cache{};
  cache.data = data;
  cache.layers = layers;
  cache.kv_heads = kv_heads;
  cache.head_dim = head_dim;
  cache.block_size = block_size;
  cache.type = type;
  cache.key_factors = key_factors;
  cache.begun = begun;
  cache.tile_positions = positions;
  cache.unit = unit;
  cache.values = ceil_div(head_dim, unit) * 4 * positions;
  cache.key_scales = cache.values + head_dim * positions * value_bits / 8;
  const std::int64_t groups = small_values(type) ? ceil_div(head_dim, kValueGroup) : 1;
  cache.value_scales = cache.key_scales + (codes ? half * (full ? head_dim : positions) : 0);
  cache.value_minimums = cache.value_scales + (codes ? half * positions * groups : 0);
  const std::int64_t bytes = cache.value_minimums + (small_values(type) ? half * positions * groups : 0);
  cache.tile_bytes = codes ? ceil_div(bytes, 64) * 64 : bytes;
  cache.head_bytes = block_size / positions * cache.tile_bytes;
  cache.block_bytes = layers * kv_heads * cache.head_bytes;
  return cache;
}

}  // namespace ropeway
