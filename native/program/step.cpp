#include "program/step.h"

#include <chrono>

namespace ropeway {
namespace {

using Clock = std::chrono::steady_clock;

// Since `before`, which becomes now.
std::int64_t lap(Clock::time_point& before) {
  const Clock::time_point now = Clock::now();
  const auto passed = std::chrono::duration_cast<std::chrono::nanoseconds>(now - before).count();
  before = now;
  return passed;
}

void replay(const PlacedProgram& placed, std::int64_t rows, const std::vector<const void*>& inputs,
            const AttentionPlan* plan) {
  placed.program->run(0, placed.program->size(), {placed.arena, rows, inputs.data(), plan}, placed.arena_bytes,
                      inputs.size());
}

}  // namespace

void Step::run() {
  Clock::time_point before = Clock::now();
  const std::int64_t tokens = attention_.tokens;
  std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens));
  read_tokens(table_, slots_, attention_.positions, tokens, ids.data());
  nanoseconds_[0] = lap(before);
  const AttentionPlan plan(attention_, context_.threads());
  nanoseconds_[1] = lap(before);
  replay(forward_, tokens, {ids.data(), attention_.positions}, &plan);
  if (samples_ == 0) return;

  const auto* hidden = reinterpret_cast<const float*>(forward_.arena + tokens * forward_.result.value);
  std::vector<float> taken;
  before = Clock::now();
  if (sampled_ != nullptr) {
    taken.resize(static_cast<std::size_t>(samples_ * forward_.features));
    take(hidden, tokens, forward_.features, sampled_, samples_, taken.data());
    hidden = taken.data();
  }
  nanoseconds_[2] = lap(before);
  replay(logits_, samples_, {hidden}, nullptr);
}

}  // namespace ropeway
