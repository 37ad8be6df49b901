#include "program/program.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>

#include "kernels/elementwise.h"
#include "kernels/linear.h"
#include "kernels/positions.h"

namespace ropeway {
namespace {

// The plan of the step being replayed; its tokens are the rows.
const AttentionPlan& plan_of(const Replay& replay) {
  if (replay.plan == nullptr || replay.plan->tokens != replay.rows) {
    throw std::invalid_argument("a program with attention needs the attention plan of its step of " +
                                std::to_string(replay.rows) + " rows");
  }
  return *replay.plan;
}

}  // namespace

void Program::add(Operation operation) {
  operations_.push_back(std::move(operation));
  nanoseconds_.push_back(0);
}

void Program::gather(const PackedMatrix& table, Buffer ids, Buffer out, std::int64_t first, bool part) {
  add([this, &table, ids, out, first, part](const Replay& replay) {
    const auto* rows = replay.at<const std::int32_t>(ids);
    ropeway::gather(context_, table, rows, replay.rows, replay.at(out), first, part);
  });
}

void Program::linear(Buffer x, const std::vector<ProgramPart>& parts, const Buffer* residual, bool gated,
                     const float* norm_weight, float norm_eps) {
  if (parts.empty() || parts.size() > kMostLinearParts) throw std::invalid_argument("a product has one to three parts");
  const LinearKernels& kernels = ROPEWAY_TABLE(linear_kernels, context_.isa());
  const bool adds = residual != nullptr;
  const Buffer added = adds ? *residual : x;
  add([=, this, &kernels](const Replay& replay) {
    LinearPart placed[kMostLinearParts];
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const ProgramPart& part = parts[i];
      placed[i] = {part.weight, part.bias, gated && i > 0 ? nullptr : replay.at(part.out)};
    }
    kernels.linear(context_, {
                                 .x = replay.at(x),
                                 .rows = replay.rows,
                                 .parts = placed,
                                 .part_count = static_cast<int>(parts.size()),
                                 .residual = adds ? replay.at(added) : nullptr,
                                 .gated = gated,
                                 .norm_weight = norm_weight,
                                 .norm_eps = norm_eps,
                             });
  });
}

void Program::rms_norm(Buffer x, const Buffer* residual, const float* weight, Buffer out, const Buffer* sum,
                       std::int64_t heads, std::int64_t size, float eps) {
  const ElementwiseKernels& kernels = ROPEWAY_TABLE(elementwise_kernels, context_.isa());
  const bool adds = residual != nullptr;
  const Buffer before = adds ? *residual : x, after = adds ? *sum : out;
  add([=, this, &kernels](const Replay& replay) {
    kernels.rms_norm(context_, {
                                   .x = replay.at(x),
                                   .residual = adds ? replay.at(before) : nullptr,
                                   .weight = weight,
                                   .out = replay.at(out),
                                   .sum = adds ? replay.at(after) : nullptr,
                                   .rows = replay.rows * heads,
                                   .size = size,
                                   .eps = eps,
                               });
  });
}

void Program::rope(Buffer x, Buffer positions, const float* table, Buffer out, std::int64_t heads, std::int64_t size,
                   std::int64_t rotated, std::int64_t table_positions) {
  const ElementwiseKernels& kernels = ROPEWAY_TABLE(elementwise_kernels, context_.isa());
  add([=, this, &kernels](const Replay& replay) {
    const auto* position = replay.at<const std::int32_t>(positions);
    check_positions(position, replay.rows, table_positions);
    kernels.rope(context_, {replay.at(x), position, table, replay.at(out), replay.rows, heads, size, rotated});
  });
}

void Program::silu_and_mul(Buffer gate, Buffer up, Buffer out, std::int64_t size) {
  const ElementwiseKernels& kernels = ROPEWAY_TABLE(elementwise_kernels, context_.isa());
  add([=, this, &kernels](const Replay& replay) {
    kernels.silu_and_mul(context_, {replay.at(gate), replay.at(up), replay.at(out), replay.rows * size});
  });
}

void Program::write_kv(const KVStorage& cache, std::int64_t layer, Buffer k, Buffer v) {
  const AttentionKernels& kernels = ROPEWAY_TABLE(attention_kernels, context_.isa());
  add([=, this, &kernels, &cache](const Replay& replay) {
    kernels.write_kv(context_, plan_of(replay).writing(cache, layer, replay.at(k), replay.at(v)));
  });
}

void Program::attention(const KVStorage& cache, std::int64_t layer, Buffer q, Buffer out, std::int64_t heads,
                        float scale, std::int64_t window) {
  const AttentionKernels& kernels = ROPEWAY_TABLE(attention_kernels, context_.isa());
  add([=, this, &kernels, &cache](const Replay& replay) {
    kernels.attention(context_,
                      plan_of(replay).reading(cache, layer, replay.at(q), replay.at(out), heads, scale, window));
  });
}

void Program::run(std::size_t begin, std::size_t end, const Replay& replay, std::size_t arena_bytes,
                  std::size_t inputs) {
  const auto needed = static_cast<std::size_t>(replay.rows * row_bytes_);
  if (needed > arena_bytes) {
    throw std::invalid_argument("a step of " + std::to_string(replay.rows) + " rows needs an arena of " +
                                std::to_string(needed) + " bytes; this one has " + std::to_string(arena_bytes));
  }
  if (inputs != inputs_) {
    throw std::invalid_argument("the program takes " + std::to_string(inputs_) + " inputs, not " +
                                std::to_string(inputs));
  }
  if (replay.rows == 0) return;
  const Call call(context_);
  end = std::min(end, operations_.size());
  if (!timed_) {
    for (std::size_t i = begin; i < end; ++i) operations_[i](replay);
    return;
  }
  using Clock = std::chrono::steady_clock;
  Clock::time_point before = Clock::now();
  for (std::size_t i = begin; i < end; ++i) {
    operations_[i](replay);
    const Clock::time_point after = Clock::now();
    nanoseconds_[i] += std::chrono::duration_cast<std::chrono::nanoseconds>(after - before).count();
    before = after;
  }
}

void Program::set_timed(bool timed) {
  timed_ = timed;
  std::fill(nanoseconds_.begin(), nanoseconds_.end(), 0);
}

}  // namespace ropeway
