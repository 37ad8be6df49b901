#include "kernels/elementwise.h"

#include "bindings/arguments.h"
#include "kernels/positions.h"

namespace ropeway {
namespace {

const ElementwiseKernels& kernels(const Context& context) { return ROPEWAY_TABLE(elementwise_kernels, context.isa()); }

void rms_norm(Context& context, Address x, Address residual, Address weight, Address out, Address sum,
              std::int64_t rows, std::int64_t size, float eps) {
  const Call call(context);
  kernels(context).rms_norm(context, {pointer<const float>(x), pointer<const float>(residual),
                                      pointer<const float>(weight), pointer<float>(out), pointer<float>(sum), rows,
                                      size, eps});
}

void rope(Context& context, Address x, Address positions, Address table, Address out, std::int64_t tokens,
          std::int64_t heads, std::int64_t size, std::int64_t rotated, std::int64_t table_positions) {
  const Call call(context);
  const auto* position = pointer<const std::int32_t>(positions);
  check_positions(position, tokens, table_positions);
  kernels(context).rope(context, {pointer<const float>(x), position, pointer<const float>(table), pointer<float>(out),
                                  tokens, heads, size, rotated});
}

void silu_and_mul(Context& context, Address gate, Address up, Address out, std::int64_t count) {
  const Call call(context);
  kernels(context).silu_and_mul(
      context, {pointer<const float>(gate), pointer<const float>(up), pointer<float>(out), count});
}

}  // namespace

void bind_elementwise(nb::module_& module) {
  module.def("rms_norm", &rms_norm, Released());
  module.def("rope", &rope, Released());
  module.def("silu_and_mul", &silu_and_mul, Released());
}

}  // namespace ropeway
