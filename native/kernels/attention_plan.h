// The work of a step, planned once and used by every layer: which tokens meet which keys, in which tasks.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention.h"
#include "kernels/begun_keys.h"

namespace ropeway {

struct AttentionStep {
  const std::int32_t* positions;    // [tokens]
  const std::int32_t* query_start;  // [rows + 1]
  const std::int32_t* kv_lengths;   // [rows]
  const std::int32_t* block_table;  // [rows, table_stride]
  std::int64_t rows, tokens, table_stride, table_blocks;
  std::int64_t block_size, num_blocks, kv_heads;
  BegunKeys* begun = nullptr;           // of the cache
  const std::int32_t* slots = nullptr;  // [rows], of a cache with begun keys: see `BegunKeys`; null: unknown
};

struct AttentionPlan {
  // Throws std::invalid_argument where the step contradicts itself or the cache. Plans are made in the order in which
  // steps run.
  AttentionPlan(const AttentionStep& step, int threads);

  // Arguments of the kernels for one layer: k, v [tokens, kv_heads, head_dim]; q, out [tokens, heads, head_dim].
  WriteKV writing(const KVStorage& cache, std::int64_t layer, const float* k, const float* v) const;
  Attention reading(const KVStorage& cache, std::int64_t layer, const float* q, float* out, std::int64_t heads,
                    float scale, std::int64_t window) const;

  const std::int32_t* block_table;
  std::int64_t table_stride, tokens, kv_heads;
  std::int64_t most_tokens = 0;    // of an item
  std::int64_t partial_count = 0;  // (token, span) pairs of all merges
  std::vector<std::int64_t> slots;  // [tokens]: block * block_size + offset
  std::vector<AttentionItem> items;
  std::vector<AttentionMerge> merges;
  std::vector<AttentionTask> tasks;
  std::vector<KeyGroup> groups;  // of int4_full, row after row

 private:
  void add_row(const AttentionStep& step, std::int64_t row);
  void add_groups(const AttentionStep& step);
  void add_items(const AttentionStep& step, std::int64_t row, std::int64_t tile, double most_cost);
  void add_tasks(double least_cost);

  std::vector<double> costs_;  // [items]: of one kv head
  std::int64_t group_ = -1;    // of the item added last
  AlignedBytes whole_groups_;  // keys of those that begin and end in this step, of one layer
};

}  // namespace ropeway
