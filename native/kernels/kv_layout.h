// Addresses inside the paged cache; attention.h has the picture.
#pragma once

#include "kernels/attention.h"

namespace ropeway::ROPEWAY_ISA {

inline std::int64_t key_tile(const KVStorage& cache) { return cache.block_size < 16 ? cache.block_size : 16; }

// Elements of the keys (or of the values) of one head in one block.
inline std::int64_t head_elements(const KVStorage& cache) { return cache.block_size * cache.head_dim; }

template <class Element>
inline Element* block_keys(const KVStorage& cache, std::int64_t block, std::int64_t layer, std::int64_t head) {
  const std::int64_t part = (block * cache.layers + layer) * cache.kv_heads + head;
  return reinterpret_cast<Element*>(cache.data) + part * 2 * head_elements(cache);
}

template <class Element>
inline Element* block_values(const KVStorage& cache, std::int64_t block, std::int64_t layer, std::int64_t head) {
  return block_keys<Element>(cache, block, layer, head) + head_elements(cache);
}

}  // namespace ropeway::ROPEWAY_ISA
