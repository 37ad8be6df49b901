#include "paged_cache.h"

#include <algorithm>
#include <cmath>

#include "numbers.h"

namespace ropeway::tests {

Step make_step(const std::vector<StepRow>& rows, std::int64_t block_size, std::int64_t num_blocks,
               std::int64_t kv_heads, Random& random) {
  Step step;
  std::int64_t tokens = 0, widest = 0;
  for (const StepRow& row : rows) {
    tokens += row.count;
    widest = std::max(widest, static_cast<std::int64_t>(row.blocks.size()));
  }
  step.rows = static_cast<std::int64_t>(rows.size());
  step.table_blocks = widest + random.integer(0, 2);
  step.table_stride = step.table_blocks + random.integer(0, 2);
  step.block_size = block_size;
  step.num_blocks = num_blocks;
  step.kv_heads = kv_heads;
  step.positions = Buffer<std::int32_t>(static_cast<std::size_t>(tokens));
  step.query_start = Buffer<std::int32_t>(rows.size() + 1);
  step.kv_lengths = Buffer<std::int32_t>(rows.size());
  const std::int64_t entries = step.rows == 0 ? 0 : (step.rows - 1) * step.table_stride + step.table_blocks;
  step.block_table = Buffer<std::int32_t>(static_cast<std::size_t>(entries));
  std::fill(step.block_table.begin(), step.block_table.end(), INT32_MIN);
  std::int64_t token = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const StepRow& row = rows[i];
    step.query_start[i] = static_cast<std::int32_t>(token);
    step.kv_lengths[i] = static_cast<std::int32_t>(row.length);
    std::copy(row.blocks.begin(), row.blocks.end(),
              step.block_table.data() + static_cast<std::int64_t>(i) * step.table_stride);
    for (std::int64_t j = 0; j < row.count; ++j) {
      step.positions[static_cast<std::size_t>(token++)] = static_cast<std::int32_t>(row.length - row.count + j);
    }
  }
  step.query_start[rows.size()] = static_cast<std::int32_t>(token);
  return step;
}

Sequence random_sequence(const CacheShape& shape, std::int64_t length, Random& random) {
  const auto values = [&](std::int64_t heads) {
    std::vector<float> list(static_cast<std::size_t>(length * heads * shape.head_dim));
    for (float& value : list) value = random.normal();
    return list;
  };
  return {.length = length, .q = values(shape.heads()), .k = values(shape.kv_heads), .v = values(shape.kv_heads)};
}

void share_prefix(const CacheShape& shape, Sequence& sequence, const Sequence& prefix, std::int64_t shared) {
  sequence.shared = shared;
  std::copy_n(prefix.q.begin(), shared * shape.heads() * shape.head_dim, sequence.q.begin());
  std::copy_n(prefix.k.begin(), shared * shape.kv_heads * shape.head_dim, sequence.k.begin());
  std::copy_n(prefix.v.begin(), shared * shape.kv_heads * shape.head_dim, sequence.v.begin());
}

std::vector<double> exact_attention(const CacheShape& shape, const Sequence& sequence, std::int64_t position,
                                    std::int64_t head, float scale) {
  const bool bf16 = shape.type == KVType::bf16;
  const auto stored = [&](float x) { return static_cast<double>(bf16 ? from_bf16(to_bf16(x)) : x); };
  const std::int64_t size = shape.head_dim, kv_head = head / shape.group;
  const std::int64_t first = shape.window == 0 ? 0 : std::max<std::int64_t>(0, position + 1 - shape.window);
  const float* const q = sequence.q.data() + (position * shape.heads() + head) * size;
  const auto at = [&](const std::vector<float>& x, std::int64_t key) {
    return x.data() + (key * shape.kv_heads + kv_head) * size;
  };
  std::vector<double> weights;
  double peak = -INFINITY, total = 0.0;
  for (std::int64_t key = first; key <= position; ++key) {
    double score = 0.0;
    for (std::int64_t d = 0; d < size; ++d) score += stored(q[d]) * stored(at(sequence.k, key)[d]);
    weights.push_back(score * static_cast<double>(scale));
    peak = std::max(peak, weights.back());
  }
  std::vector<double> out(static_cast<std::size_t>(size), 0.0);
  for (std::int64_t key = first; key <= position; ++key) {
    const double weight = std::exp(weights[static_cast<std::size_t>(key - first)] - peak);
    total += weight;
    for (std::int64_t d = 0; d < size; ++d) out[static_cast<std::size_t>(d)] += weight * stored(at(sequence.v, key)[d]);
  }
  for (double& value : out) value /= total;
  return out;
}

}  // namespace ropeway::tests
