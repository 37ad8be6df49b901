// Writing keys and values into the paged cache, and attention over it.
//
// The cache is one array of blocks; a block holds `block_size` consecutive positions of one sequence, for all layers
// and heads, so that a block is copied, swapped or dropped as one piece:
//
//   block  = [layer][kv head] { keys | values }
//   keys   = [block_size / tile][head_dim][tile]     tile = min(16, block_size): 16 scores fill 16 lanes
//   values = [block_size][head_dim]
//
// Work of a step is a list of `AttentionTask`s (attention_plan.h), the same for all layers.
#pragma once

#include "core/context.h"

namespace ropeway {

// Keys are summed in spans of this many absolute positions, whoever asks: see attention.cpp.
inline constexpr std::int64_t kSpan = 256;

struct KVStorage {
  std::byte* data;
  std::int64_t layers, kv_heads, head_dim, block_size;
  bool bf16;  // else float32
};

struct WriteKV {
  KVStorage cache;
  std::int64_t layer;
  const float* k;             // [tokens, kv_heads, head_dim]
  const float* v;             // [tokens, kv_heads, head_dim]
  const std::int64_t* slots;  // [tokens]: block * block_size + offset in the block
  std::int64_t tokens;
};

// Consecutive tokens of a row over a range of spans.
struct AttentionItem {
  std::int32_t row, first_token, tokens;
  std::int32_t first_position;  // of the first token
  std::int32_t span_begin, span_end;
  std::int32_t merge;  // index of the `AttentionMerge` its results go to, or -1: it sees all spans of its tokens
};

// Tokens whose spans are spread over several items: partial results are kept per span and merged by the last one.
struct AttentionMerge {
  std::int32_t first_token, tokens, spans, items;
  std::int64_t offset;  // in (token, span) pairs: where its partial results start
};

struct AttentionTask {
  std::int32_t item, head_begin, head_end;  // kv heads
};

struct Attention {
  KVStorage cache;
  std::int64_t layer;
  const float* q;  // [tokens, heads, head_dim]
  float* out;      // [tokens, heads, head_dim]
  std::int64_t heads;
  float scale;
  std::int64_t window;              // 0: none
  const std::int32_t* block_table;  // [rows, table_stride]
  std::int64_t table_stride;
  const AttentionTask* tasks;
  std::int64_t task_count;
  const AttentionItem* items;
  const AttentionMerge* merges;
  std::int64_t merge_count, partial_count;  // partial_count: (token, span) pairs of all merges
  std::int64_t most_tokens;                 // of an item
};

struct AttentionKernels {
  void (*write_kv)(Context& context, const WriteKV& args);
  void (*attention)(Context& context, const Attention& args);
};

ROPEWAY_DECLARE_TABLE(AttentionKernels, attention_kernels)

}  // namespace ropeway
