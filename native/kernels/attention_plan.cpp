#include "kernels/attention_plan.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

namespace ropeway {
namespace {

// Tokens of an item: enough to share the reading of a span, few enough to spread a chunk over the threads.
constexpr std::int64_t most_tile = 32, least_tile = 8;

// Cost of one kv head: a unit per (key, token), and some per key for reading it.
constexpr double cost_of_a_key = 4.0;
double cost(std::int64_t keys, std::int64_t tokens) {
  return static_cast<double>(keys) * (static_cast<double>(tokens) + cost_of_a_key);
}

// Heads of a row below this are one task, a few tens of microseconds: from head to head, what comes next is known and
// fetched.
constexpr double least_task_cost = 5120.0;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

[[noreturn]] void refuse(std::int64_t row, const std::string& what) {
  throw std::invalid_argument("attention plan, row " + std::to_string(row) + ": " + what);
}

}  // namespace

AttentionPlan::AttentionPlan(const AttentionStep& step, int threads)
    : block_table(step.block_table), table_stride(step.table_stride), tokens(step.tokens), kv_heads(step.kv_heads) {
  slots.resize(static_cast<std::size_t>(step.tokens));
  double total = 0.0;
  std::int64_t expected = 0;
  for (std::int64_t row = 0; row < step.rows; ++row) {
    if (step.query_start[row] != expected) refuse(row, "query_start has a gap or runs backwards");
    add_row(step, row);
    expected = step.query_start[row + 1];
    const std::int64_t count = expected - step.query_start[row];
    if (count > 0) total += cost(step.kv_lengths[row], count);  // else the length is nobody's, and may be anything
  }
  if (expected != step.tokens) {
    throw std::invalid_argument("attention plan: rows hold " + std::to_string(expected) + " tokens, the step has " +
                                std::to_string(step.tokens));
  }

  if (step.begun != nullptr) add_groups(step);

  const double workers = threads;
  const auto tiles = [&](std::int64_t tile) {
    std::int64_t count = 0;
    for (std::int64_t row = 0; row < step.rows; ++row)
      count += ceil_div(step.query_start[row + 1] - step.query_start[row], tile);
    return static_cast<double>(count * kv_heads);
  };
  std::int64_t tile = most_tile;
  while (tile > least_tile && tiles(tile) < 4.0 * workers) tile /= 2;

  total *= static_cast<double>(kv_heads);
  items.reserve(static_cast<std::size_t>(step.rows));
  const double most_cost = threads > 1 ? total / (3.0 * workers) : total;
  for (std::int64_t row = 0; row < step.rows; ++row) add_items(step, row, tile, most_cost);
  add_tasks(std::min(least_task_cost, total / (16.0 * workers)));
}

WriteKV AttentionPlan::writing(const KVStorage& cache, std::int64_t layer, const float* k, const float* v) const {
  return {cache, layer, k, v, slots.data(), tokens, groups.data(), static_cast<std::int64_t>(groups.size())};
}

Attention AttentionPlan::reading(const KVStorage& cache, std::int64_t layer, const float* q, float* out,
                                 std::int64_t heads, float scale, std::int64_t window) const {
  return {
      .cache = cache,
      .layer = layer,
      .q = q,
      .out = out,
      .heads = heads,
      .scale = scale,
      .window = window,
      .block_table = block_table,
      .table_stride = table_stride,
      .tasks = tasks.data(),
      .task_count = static_cast<std::int64_t>(tasks.size()),
      .items = items.data(),
      .merges = merges.data(),
      .merge_count = static_cast<std::int64_t>(merges.size()),
      .partial_count = partial_count,
      .most_tokens = most_tokens,
      .groups = groups.data(),
  };
}

// Checks a row and fills in the places of its tokens.
void AttentionPlan::add_row(const AttentionStep& step, std::int64_t row) {
  const std::int64_t first = step.query_start[row], last = step.query_start[row + 1];
  if (first < 0 || last < first || last > step.tokens) refuse(row, "query_start has a gap or runs backwards");
  if (first == last) return;
  const std::int64_t length = step.kv_lengths[row];
  if (step.positions[first] < 0 || step.positions[first] + (last - first) != length) {
    refuse(row, "positions start at " + std::to_string(step.positions[first]) + " and count " +
                    std::to_string(last - first) + ", which does not end at the length " + std::to_string(length));
  }
  const std::int64_t blocks = ceil_div(length, step.block_size);
  if (blocks > step.table_blocks) {
    refuse(row, std::to_string(length) + " tokens need " + std::to_string(blocks) + " blocks; the table has " +
                    std::to_string(step.table_blocks));
  }
  const std::int32_t* table = step.block_table + row * step.table_stride;
  std::uint32_t largest = 0;  // a negative entry counts as a huge one
  for (std::int64_t i = 0; i < blocks; ++i) largest = std::max(largest, static_cast<std::uint32_t>(table[i]));
  if (largest >= static_cast<std::uint64_t>(step.num_blocks)) {
    refuse(row, "block " + std::to_string(static_cast<std::int32_t>(largest)) + " is not one of the cache's " +
                    std::to_string(step.num_blocks));
  }
  for (std::int64_t token = first; token < last; ++token) {
    const std::int64_t position = length - (last - token);
    if (step.positions[token] != position) {
      refuse(row, "token " + std::to_string(token - first) + " is at position " +
                      std::to_string(step.positions[token]) + ", not " + std::to_string(position));
    }
    slots[static_cast<std::size_t>(token)] =
        table[position / step.block_size] * step.block_size + position % step.block_size;
  }
}

void AttentionPlan::add_groups(const AttentionStep& step) {
  step.begun->next_plan();
  const std::int64_t layer_bytes = step.begun->layer_bytes();
  std::int64_t whole_groups = 0;
  for (std::int64_t row = 0; row < step.rows; ++row) {
    const std::int64_t first_token = step.query_start[row], count = step.query_start[row + 1] - first_token;
    if (count == 0) continue;
    const std::int64_t last = step.kv_lengths[row] - 1, first = last + 1 - count;
    const std::int32_t* table = step.block_table + row * step.table_stride;
    const std::int64_t slot = step.slots == nullptr ? -1 : step.slots[row];
    const BegunKeys::Row kept = step.begun->add_row(first, last, table, step.block_size, slot);
    for (std::int64_t position = first; position <= last;) {
      const std::int64_t start = position / kKeyGroup * kKeyGroup, end = std::min(start + kKeyGroup, last + 1);
      const bool full = end == start + kKeyGroup;
      const bool whole = start >= first && full;
      whole_groups += whole;
      groups.push_back({
          .first_token = first_token + position - first,
          .tokens = end - position,
          .place = position - start,
          .slot = table[start / step.block_size] * step.block_size + start % step.block_size,
          .full = full,
          .keys = start < first ? kept.before : kept.after,
          .layer_bytes = whole ? 0 : layer_bytes,
      });
      position = end;
    }
  }
  whole_groups_ = aligned_bytes(whole_groups * layer_bytes);
  std::byte* next = whole_groups_.get();
  for (KeyGroup& group : groups) {
    if (group.layer_bytes > 0) continue;
    group.keys = next;
    next += layer_bytes;
  }
}

void AttentionPlan::add_items(const AttentionStep& step, std::int64_t row, std::int64_t tile, double most_cost) {
  const std::int64_t first = step.query_start[row], last = step.query_start[row + 1];
  for (std::int64_t token = first, count = 0; token < last; token += count) {
    count = std::min(tile, last - token);
    if (step.begun != nullptr) {  // an item's tokens are in one group
      const std::int64_t place = step.positions[token] % kKeyGroup;
      count = std::min(count, kKeyGroup - place);
      group_ += place == 0 || token == first;
    }
    const std::int64_t keys = step.kv_lengths[row] - (last - token) + count;
    const std::int64_t spans = ceil_div(keys, kSpan);
    const double whole = cost(keys, count);
    const auto wanted = static_cast<std::int64_t>(whole / most_cost + 0.999);
    const std::int64_t pieces = std::clamp<std::int64_t>(wanted, 1, spans);
    most_tokens = std::max(most_tokens, count);
    AttentionItem item{
        .row = static_cast<std::int32_t>(row),
        .first_token = static_cast<std::int32_t>(token),
        .tokens = static_cast<std::int32_t>(count),
        .first_position = static_cast<std::int32_t>(keys - count),
        .span_begin = 0,
        .span_end = static_cast<std::int32_t>(spans),
        .merge = -1,
        .group = static_cast<std::int32_t>(group_),
    };
    if (pieces > 1) {
      item.merge = static_cast<std::int32_t>(merges.size());
      merges.push_back(
          {item.first_token, item.tokens, item.span_end, static_cast<std::int32_t>(pieces), partial_count});
      partial_count += count * spans;
    }
    for (std::int64_t piece = 0; piece < pieces; ++piece) {
      item.span_begin = static_cast<std::int32_t>(piece * spans / pieces);
      item.span_end = static_cast<std::int32_t>((piece + 1) * spans / pieces);
      items.push_back(item);
      costs_.push_back(whole * static_cast<double>(item.span_end - item.span_begin) / static_cast<double>(spans));
    }
  }
}

// Heaviest first, so that the last tasks to be claimed are small ones.
void AttentionPlan::add_tasks(double least_cost) {
  std::vector<std::int32_t> order(items.size());
  std::iota(order.begin(), order.end(), 0);
  const auto cost_of = [&](std::int32_t item) { return costs_[static_cast<std::size_t>(item)]; };
  std::sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return cost_of(a) != cost_of(b) ? cost_of(a) > cost_of(b) : a < b;
  });
  tasks.reserve(items.size() * static_cast<std::size_t>(kv_heads));
  for (const std::int32_t item : order) {
    const auto fitting = static_cast<std::int64_t>(least_cost / cost_of(item) + 0.999);
    const std::int64_t heads = std::clamp<std::int64_t>(fitting, 1, kv_heads);
    for (std::int64_t head = 0; head < kv_heads; head += heads) {
      const std::int64_t end = std::min(head + heads, kv_heads);
      tasks.push_back({item, static_cast<std::int32_t>(head), static_cast<std::int32_t>(end)});
    }
  }
}

}  // namespace ropeway
