#include "program/program.h"
#include "program/step.h"

#include <optional>
#include <tuple>
#include <vector>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/arguments.h"

namespace ropeway {
namespace {

using Place = std::int64_t;  // of a `Buffer`

// (weight, bias, out) of a part.
using Part = std::tuple<const PackedMatrix*, Address, Place>;

void add_linear(Program& program, Place x, const std::vector<Part>& parts, std::optional<Place> residual, bool gated,
                Address norm_weight, float norm_eps) {
  std::vector<ProgramPart> described;
  for (const auto& [weight, bias, out] : parts) described.push_back({weight, pointer<const float>(bias), {out}});
  const Buffer added{residual.value_or(0)};
  program.linear({x}, described, residual ? &added : nullptr, gated, pointer<const float>(norm_weight), norm_eps);
}

void add_rms_norm(Program& program, Place x, std::optional<Place> residual, Address weight, Place out,
                  std::optional<Place> sum, std::int64_t heads, std::int64_t size, float eps) {
  const Buffer before{residual.value_or(0)}, after{sum.value_or(0)};
  program.rms_norm({x}, residual ? &before : nullptr, pointer<const float>(weight), {out}, sum ? &after : nullptr,
                   heads, size, eps);
}

void run(Program& program, std::size_t begin, std::size_t end, Address arena, std::size_t arena_bytes,
         std::int64_t rows, const std::vector<Address>& inputs, const AttentionPlan* plan) {
  const nb::gil_scoped_release released;
  std::vector<const void*> pointers;
  for (const Address input : inputs) pointers.push_back(pointer<const void>(input));
  program.run(begin, end, {pointer<std::byte>(arena), rows, pointers.data(), plan}, arena_bytes, pointers.size());
}

// (program, arena, its bytes, place of the result, features of the result).
using Placed = std::tuple<Program*, Address, std::size_t, Place, std::int64_t>;

PlacedProgram placed(const Placed& given) {
  const auto& [program, arena, bytes, result, features] = given;
  return {program, pointer<std::byte>(arena), bytes, {result}, features};
}

Step* make_step(Context& context, const KVStorage& cache, std::int64_t num_blocks, Address tokens, std::int64_t slots,
                std::int64_t positions, std::int64_t stride, Address slot_of_token, Address position_of_token,
                Address query_start, Address kv_lengths, Address block_table, Address slot_of_row, std::int64_t rows,
                std::int64_t count, std::int64_t table_stride, std::int64_t table_blocks, const Placed& forward,
                const Placed& logits, Address sampled, std::int64_t samples) {
  const AttentionStep attention = {
      .positions = pointer<const std::int32_t>(position_of_token),
      .query_start = pointer<const std::int32_t>(query_start),
      .kv_lengths = pointer<const std::int32_t>(kv_lengths),
      .block_table = pointer<const std::int32_t>(block_table),
      .rows = rows,
      .tokens = count,
      .table_stride = table_stride,
      .table_blocks = table_blocks,
      .block_size = cache.block_size,
      .num_blocks = num_blocks,
      .kv_heads = cache.kv_heads,
      .begun = cache.begun,
      .slots = pointer<const std::int32_t>(slot_of_row),
  };
  return new Step(context, {pointer<std::int32_t>(tokens), slots, positions, stride},
                  pointer<const std::int32_t>(slot_of_token), attention, placed(forward), placed(logits),
                  pointer<const std::int32_t>(sampled), samples);
}

}  // namespace

void bind_program(nb::module_& module) {
  nb::class_<Program>(module, "Program", "Kernel calls to replay; refers to matrices, vectors and caches, owns none.")
      .def(nb::init<Context&, std::int64_t, std::size_t>(), nb::keep_alive<1, 2>())
      .def("gather",
           [](Program& program, const PackedMatrix& table, Place ids, Place out, std::int64_t first, bool part) {
             program.gather(table, {ids}, {out}, first, part);
           })
      .def("linear", &add_linear, nb::arg("x"), nb::arg("parts"), nb::arg("residual").none(), nb::arg("gated"),
           nb::arg("norm_weight"), nb::arg("norm_eps"))
      .def("rms_norm", &add_rms_norm, nb::arg("x"), nb::arg("residual").none(), nb::arg("weight"), nb::arg("out"),
           nb::arg("total").none(), nb::arg("heads"), nb::arg("size"), nb::arg("eps"))
      .def("rope",
           [](Program& program, Place x, Place positions, Address table, Place out, std::int64_t heads,
              std::int64_t size, std::int64_t rotated, std::int64_t table_positions) {
             program.rope({x}, {positions}, pointer<const float>(table), {out}, heads, size, rotated, table_positions);
           })
      .def("silu_and_mul",
           [](Program& program, Place gate, Place up, Place out, std::int64_t size) {
             program.silu_and_mul({gate}, {up}, {out}, size);
           })
      .def("write_kv", [](Program& program, const KVStorage& cache, std::int64_t layer, Place k,
                          Place v) { program.write_kv(cache, layer, {k}, {v}); })
      .def("attention",
           [](Program& program, const KVStorage& cache, std::int64_t layer, Place q, Place out, std::int64_t heads,
              float scale, std::int64_t window) {
             program.attention(cache, layer, {q}, {out}, heads, scale, window);
           })
      .def("run", &run, nb::arg("begin"), nb::arg("end"), nb::arg("arena"), nb::arg("arena_bytes"), nb::arg("rows"),
           nb::arg("inputs"), nb::arg("plan").none())
      .def("set_timed", &Program::set_timed)
      .def_prop_ro("size", &Program::size)
      .def_prop_ro("nanoseconds", &Program::nanoseconds);
  nb::class_<Step>(module, "Step", "A step of a captured model; refers to everything it is given.")
      .def(nb::new_(&make_step), nb::arg("context"), nb::arg("cache"), nb::arg("num_blocks"), nb::arg("tokens"),
           nb::arg("slots"), nb::arg("positions"), nb::arg("stride"), nb::arg("slot_of_token"),
           nb::arg("position_of_token"), nb::arg("query_start"), nb::arg("kv_lengths"), nb::arg("block_table"),
           nb::arg("slot_of_row"), nb::arg("rows"), nb::arg("count"), nb::arg("table_stride"), nb::arg("table_blocks"),
           nb::arg("forward"), nb::arg("logits"), nb::arg("sampled"), nb::arg("samples"))
      .def("run", &Step::run, Released())
      .def_prop_ro("nanoseconds", &Step::nanoseconds);
}

}  // namespace ropeway
