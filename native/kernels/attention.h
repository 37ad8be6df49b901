// Writing keys and values into the paged cache, and attention over it.
//
// The cache is one array of blocks; a block holds `block_size` consecutive positions of one sequence, for all layers
// and heads, so that a block is copied, swapped or dropped as one piece. It is cut into tiles of 16 positions (or of
// block_size, where that is smaller), each with all that is needed to read it:
//
//   block = [layer][kv head][block_size / positions] tile
//   tile  = { keys | values | key scales | value scales | value minimums }
//
//   keys     [head_dim / u][positions][u]    16 scores fill 16 lanes, and u features are multiplied at once
//   values   [positions / u][head_dim][u]    16 features fill 16 lanes, and u positions are multiplied at once
//
//            element          u                 scales
//   fp32     float32          1
//   bf16     bfloat16         2
//   int8     code + 128       4                 float16 [positions], keys and values
//   int4     keys as int8; values [positions / 8][head_dim][4], byte j: positions j (low half) and j + 4 (high half);
//            their scales and minimums float16 [groups of 64 features][positions]
//   int4_full  keys [head_dim / 8][positions][4], four bits a feature, the first lowest; of the two tiles of a group of
//            32 positions, the first has the scales of its features where the others have scales of positions, float16
//            [head_dim], the second their minimums; values as int4
//
// head_dim is rounded up to a multiple of u in the keys (of 8 in int4_full). So with 16 positions every 64 bytes hold
// what sixteen lanes multiply in one step (of int4_full's keys, in eight). Quantised tiles are rounded up to 64 bytes.
//
// Keys of int4_full can be quantised only when their group is full, and a query reads its own group's in bfloat16:
// those lie elsewhere, as `KeyGroup`s say.
//
// Work of a step is a list of `AttentionTask`s (attention_plan.h), the same for all layers.
#pragma once

#include "core/context.h"

namespace ropeway {

// Keys are summed in spans of this many absolute positions, whoever asks: see attention.cpp.
inline constexpr std::int64_t kSpan = 256;
// Positions of a tile, and features of a 4-bit value that share a scale and a minimum.
inline constexpr std::int64_t kTile = 16, kValueGroup = 64;
// Positions over which a feature of 4-bit keys has one scale: two tiles.
inline constexpr std::int64_t kKeyGroup = 2 * kTile;

enum class KVType { fp32, bf16, int8, int4, int4_full };

class BegunKeys;

// Where the cache lies and how; filled in by `make_kv_storage`, the one source of offsets.
struct KVStorage {
  std::byte* data;
  std::int64_t layers, kv_heads, head_dim, block_size;
  KVType type;
  const float* key_factors;  // [layers, kv_heads, head_dim]: keys are divided, queries multiplied by them; or null
  BegunKeys* begun;          // of int4_full; else null
  std::int64_t tile_positions, unit;
  std::int64_t values, key_scales, value_scales, value_minimums;  // offsets in a tile, bytes
  std::int64_t tile_bytes, head_bytes, block_bytes;
};

// Quantised types: block_size at least kTile; int4_full: at least kKeyGroup.
KVStorage make_kv_storage(std::byte* data, std::int64_t layers, std::int64_t kv_heads, std::int64_t head_dim,
                          std::int64_t block_size, KVType type, const float* key_factors, BegunKeys* begun = nullptr);

inline bool quantised(KVType type) { return type != KVType::fp32 && type != KVType::bf16; }
// Whether values are of 4 bits, in groups of features.
inline bool small_values(KVType type) { return type == KVType::int4 || type == KVType::int4_full; }

// Bytes of a group's keys of one layer and head in bfloat16: two tiles as those of bf16.
inline std::int64_t begun_bytes(std::int64_t head_dim) { return (head_dim + 1) / 2 * 4 * kKeyGroup; }

// Tokens of a step whose keys are in one group of kKeyGroup positions; of int4_full.
struct KeyGroup {
  std::int64_t first_token, tokens;
  std::int64_t place;  // in the group, of the first token
  std::int64_t slot;   // block * block_size + offset, of the group's first position
  bool full;           // with the step's tokens: then it is quantised
  std::byte* keys;     // bfloat16, layer after layer, in each [kv_heads, begun_bytes]
  std::int64_t layer_bytes;  // 0 where a layer's keys take the place of those of the layer before
};

struct WriteKV {
  KVStorage cache;
  std::int64_t layer;
  const float* k;             // [tokens, kv_heads, head_dim]
  const float* v;             // [tokens, kv_heads, head_dim]
  const std::int64_t* slots;  // [tokens]: block * block_size + offset in the block
  std::int64_t tokens;
  const KeyGroup* groups;  // of int4_full: where its keys go; null for other types
  std::int64_t group_count;
};

// Keys and values as attention reads them, keys divided by their factors.
struct ReadKV {
  KVStorage cache;
  std::int64_t layer;
  const std::int32_t* blocks;  // [count]
  std::int64_t count;
  float* k;  // [count * block_size, kv_heads, head_dim]
  float* v;  // [count * block_size, kv_heads, head_dim]
};

// Consecutive tokens of a row over a range of spans.
struct AttentionItem {
  std::int32_t row, first_token, tokens;
  std::int32_t first_position;  // of the first token
  std::int32_t span_begin, span_end;
  std::int32_t merge;  // index of the `AttentionMerge` its results go to, or -1: it sees all spans of its tokens
  std::int32_t group;  // index of the `KeyGroup` that its tokens belong to, or -1: the cache holds all keys
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
  const KeyGroup* groups;
};

struct AttentionKernels {
  void (*write_kv)(Context& context, const WriteKV& args);
  void (*read_kv)(Context& context, const ReadKV& args);
  void (*attention)(Context& context, const Attention& args);
};

ROPEWAY_DECLARE_TABLE(AttentionKernels, attention_kernels)

}  // namespace ropeway
