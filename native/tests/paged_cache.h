// Steps of sequences over a paged cache, with exact attention to hold the kernels against.
#pragma once

#include <cstdint>
#include <vector>

#include "buffer.h"
#include "kernels/attention_plan.h"
#include "random.h"

namespace ropeway::tests {

// The columns of one step, each of exactly the size it is said to have.
struct Step {
  Buffer<std::int32_t> positions, query_start, kv_lengths, block_table;
  std::int64_t rows = 0, table_stride = 0, table_blocks = 0;
  std::int64_t block_size = 0, num_blocks = 0, kv_heads = 0;

  AttentionStep view() const {
    return {
        .positions = positions.data(),
        .query_start = query_start.data(),
        .kv_lengths = kv_lengths.data(),
        .block_table = block_table.data(),
        .rows = rows,
        .tokens = static_cast<std::int64_t>(positions.size()),
        .table_stride = table_stride,
        .table_blocks = table_blocks,
        .block_size = block_size,
        .num_blocks = num_blocks,
        .kv_heads = kv_heads,
    };
  }
};

// A row of a step: the last `count` of `length` positions, with the blocks that hold all of them.
struct StepRow {
  std::int64_t count, length;
  std::vector<std::int32_t> blocks;
};

// What a table holds past a row's blocks is no block.
Step make_step(const std::vector<StepRow>& rows, std::int64_t block_size, std::int64_t num_blocks,
               std::int64_t kv_heads, Random& random);

struct CacheShape {
  KVType type;
  std::int64_t layers, kv_heads, group, head_dim, block_size;
  std::int64_t window;  // 0: none

  std::int64_t heads() const { return kv_heads * group; }
};

// Queries, keys and values of a whole sequence by position; the first `shared` positions are another sequence's.
struct Sequence {
  std::int64_t length, shared = 0;
  std::vector<float> q;     // [length, heads, head_dim]
  std::vector<float> k, v;  // [length, kv_heads, head_dim]
};

Sequence random_sequence(const CacheShape& shape, std::int64_t length, Random& random);

// Its first `shared` positions become those of `prefix`.
void share_prefix(const CacheShape& shape, Sequence& sequence, const Sequence& prefix, std::int64_t shared);

// Attention at `position`, head `head`: head_dim numbers. Of bf16, queries, keys and values are rounded first; those of
// quantised types are taken as they are.
std::vector<double> exact_attention(const CacheShape& shape, const Sequence& sequence, std::int64_t position,
                                    std::int64_t head, float scale);

}  // namespace ropeway::tests
