// A forward pass as data: a list of kernel calls whose number of rows is known only when they run.
//
// Activations live in an arena that is given at replay. A buffer is an offset per row: with r rows it lies in
// [r * offset, r * (offset + row bytes)), so buffers that do not overlap for one row do not for any number of them, and
// a small step touches little memory. Offsets are multiples of 64 bytes, as the arena's address must be.
//
// A program knows nothing of collectives: whoever replays it runs the operations up to one, does it, and goes on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "core/context.h"
#include "core/packed.h"
#include "kernels/attention_plan.h"

namespace ropeway {

// Where an operation finds its rows: in the arena, or in one of the inputs given at replay.
struct Buffer {
  std::int64_t value;  // an offset in bytes per row; input i is -1 - i
};

// A `LinearPart` whose output's address is not known yet.
struct ProgramPart {
  const PackedMatrix* weight;
  const float* bias;
  Buffer out;
};

// What a replay is given.
struct Replay {
  std::byte* arena;
  std::int64_t rows;
  const void* const* inputs;
  const AttentionPlan* plan;  // null where no operation needs one

  template <class T = float>
  T* at(Buffer buffer) const {
    if (buffer.value >= 0) return reinterpret_cast<T*>(arena + rows * buffer.value);
    return static_cast<T*>(const_cast<void*>(inputs[-1 - buffer.value]));
  }
};

// Matrices, vectors and tables are referred to, not kept: their owner outlives the program. Shapes are not checked.
class Program {
 public:
  // `row_bytes`: what all buffers of one row take. `inputs`: how many a replay must give.
  Program(Context& context, std::int64_t row_bytes, std::size_t inputs)
      : context_(context), row_bytes_(row_bytes), inputs_(inputs) {}

  // out [rows, k]; `first` and `part` as in core/packed.h.
  void gather(const PackedMatrix& table, Buffer ids, Buffer out, std::int64_t first, bool part);
  // As `Linear` in kernels/linear.h says. `residual`: null for none.
  void linear(Buffer x, const std::vector<ProgramPart>& parts, const Buffer* residual, bool gated,
              const float* norm_weight, float norm_eps);
  // x [rows * heads, size]; residual and sum, [rows * heads, size], or neither.
  void rms_norm(Buffer x, const Buffer* residual, const float* weight, Buffer out, const Buffer* sum,
                std::int64_t heads, std::int64_t size, float eps);
  void rope(Buffer x, Buffer positions, const float* table, Buffer out, std::int64_t heads, std::int64_t size,
            std::int64_t rotated, std::int64_t table_positions);
  void silu_and_mul(Buffer gate, Buffer up, Buffer out, std::int64_t size);
  void write_kv(const KVStorage& cache, std::int64_t layer, Buffer k, Buffer v);
  void attention(const KVStorage& cache, std::int64_t layer, Buffer q, Buffer out, std::int64_t heads, float scale,
                 std::int64_t window);

  // Runs operations [begin, end). Throws std::invalid_argument where the arena is too small or the plan is another
  // step's, and what the kernels throw.
  void run(std::size_t begin, std::size_t end, const Replay& replay, std::size_t arena_bytes, std::size_t inputs);

  std::size_t size() const { return operations_.size(); }

  // Whether replays measure every operation, and the nanoseconds each took since this was last called.
  void set_timed(bool timed);
  const std::vector<std::int64_t>& nanoseconds() const { return nanoseconds_; }

 private:
  using Operation = std::function<void(const Replay&)>;
  void add(Operation operation);

  Context& context_;
  std::int64_t row_bytes_;
  std::size_t inputs_;
  std::vector<Operation> operations_;
  std::vector<std::int64_t> nanoseconds_;  // [operations]
  bool timed_ = false;
};

}  // namespace ropeway
