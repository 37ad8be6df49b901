#include "kernels/quantize.h"

#include "bindings/arguments.h"

namespace ropeway {

void bind_quantize(nb::module_& module) {
  module.def(
      "quantize",
      [](Context& context, Address values, const std::string& from, std::int64_t n, std::int64_t k,
         std::int64_t row_stride, Address codes, Address scales, Address minimums) {
        const Call call(context);
        const Layout element = from == "fp32" ? Layout::fp32 : from == "bf16" ? Layout::bf16 : Layout::fp16;
        return ROPEWAY_TABLE(quantize_kernels, context.isa())
            .quantize(context, {pointer<const void>(values), element, n, k, row_stride, pointer<std::int8_t>(codes),
                                pointer<std::uint16_t>(scales), pointer<std::uint16_t>(minimums)});
      },
      Released());
}

}  // namespace ropeway
