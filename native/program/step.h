// A step of a captured model, from token ids in their rows to logits, as one call: nothing between its kernels needs
// the interpreter's lock, which the thread that settles the step before may hold just then.
#pragma once

#include <cstdint>
#include <vector>

#include "core/rows.h"
#include "program/program.h"

namespace ropeway {

// A program, where it runs, and its result: `features` floats per row at `result`.
struct PlacedProgram {
  Program* program;
  std::byte* arena;
  std::size_t arena_bytes;
  Buffer result;
  std::int64_t features;
};

// Refers to columns, tables, arenas and programs; whoever makes it keeps them until `run` is over.
class Step {
 public:
  // `slots`: [tokens]. `sampled`: [samples], the rows that sample; null: all of them, in their order.
  Step(Context& context, const TokenTable& table, const std::int32_t* slots, const AttentionStep& attention,
       const PlacedProgram& forward, const PlacedProgram& logits, const std::int32_t* sampled, std::int64_t samples)
      : context_(context),
        table_(table),
        slots_(slots),
        attention_(attention),
        forward_(forward),
        logits_(logits),
        sampled_(sampled),
        samples_(samples) {}

  // Once. Throws what planning and the programs throw.
  void run();

  // Nanoseconds that reading tokens, planning attention and taking rows took.
  const std::vector<std::int64_t>& nanoseconds() const { return nanoseconds_; }

 private:
  Context& context_;
  TokenTable table_;
  const std::int32_t* slots_;
  AttentionStep attention_;
  PlacedProgram forward_, logits_;
  const std::int32_t* sampled_;
  std::int64_t samples_;
  std::vector<std::int64_t> nanoseconds_ = {0, 0, 0};
};

}  // namespace ropeway
