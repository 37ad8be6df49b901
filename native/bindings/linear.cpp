#include "kernels/linear.h"

#include <stdexcept>
#include <tuple>
#include <vector>

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/arguments.h"
#include "core/measure.h"
#include "core/packed.h"

namespace ropeway {
namespace {

Layout parse_layout(const std::string& name) {
  if (name == "fp32") return Layout::fp32;
  if (name == "bf16") return Layout::bf16;
  if (name == "fp16") return Layout::fp16;
  if (name == "int8") return Layout::int8;
  if (name == "int4") return Layout::int4;
  throw std::invalid_argument("unknown layout \"" + name + "\"");
}

// A shape first; memory for it is allocated in Python and set by `place`.
PackedMatrix* describe(const std::string& layout, std::int64_t n, std::int64_t k, int group, bool half_scales,
                       int activation_digits) {
  return new PackedMatrix{parse_layout(layout), n, k, group, half_scales, activation_digits, nullptr, nullptr, nullptr};
}

void place(PackedMatrix& matrix, Address data, Address scales, Address minimums) {
  matrix.data = pointer<const void>(data);
  matrix.scales = pointer<const void>(scales);
  matrix.minimums = pointer<const void>(minimums);
}

void bind_pack(Context& context, const PackedMatrix& matrix, Address values, std::int64_t row_stride, Address scales,
               Address minimums) {
  const Call call(context);
  pack(context, matrix,
       {pointer<const void>(values), row_stride, pointer<const void>(scales), pointer<const void>(minimums)});
}

void bind_gather(Context& context, const PackedMatrix& matrix, Address ids, std::int64_t count, Address out,
                 std::int64_t first, bool part) {
  const Call call(context);
  gather(context, matrix, pointer<const std::int32_t>(ids), count, pointer<float>(out), first, part);
}

// (weight, bias, out) of a part.
using Part = std::tuple<const PackedMatrix*, Address, Address>;

void bind_product(Context& context, Address x, std::int64_t rows, const std::vector<Part>& parts, Address residual,
                  bool gated, Address norm_weight, float norm_eps) {
  LinearPart described[kMostLinearParts];
  if (parts.empty() || parts.size() > kMostLinearParts) throw std::invalid_argument("a product has one to three parts");
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const auto& [weight, bias, out] = parts[i];
    described[i] = {weight, pointer<const float>(bias), pointer<float>(out)};
  }
  const nb::gil_scoped_release released;
  const Call call(context);
  ROPEWAY_TABLE(linear_kernels, context.isa())
      .linear(context, {pointer<const float>(x), rows, described, static_cast<int>(parts.size()),
                        pointer<const float>(residual), gated, pointer<const float>(norm_weight), norm_eps});
}

std::uint64_t bind_read_memory(Context& context, Address memory, std::size_t bytes, int streams, int ahead) {
  const Call call(context);
  return read_memory(context, pointer<const void>(memory), bytes, {streams, ahead});
}

}  // namespace

void bind_linear(nb::module_& module) {
  nb::class_<PackedMatrix>(module, "PackedMatrix", "A matrix packed for `linear` and `gather`; owns no memory.")
      .def(nb::new_(&describe), nb::arg("layout"), nb::arg("n"), nb::arg("k"), nb::arg("group"), nb::arg("half_scales"),
           nb::arg("activation_digits"))
      .def_prop_ro("data_bytes", &data_bytes)
      .def_prop_ro("scale_bytes", &scale_bytes)
      .def("place", &place, nb::arg("data"), nb::arg("scales"), nb::arg("minimums"));
  module.def("pack", &bind_pack, Released(), nb::arg("context"), nb::arg("matrix"), nb::arg("values"),
             nb::arg("row_stride"), nb::arg("scales"), nb::arg("minimums"));
  module.def("gather", &bind_gather, Released());
  module.def("linear", &bind_product);
  module.def("read_memory", &bind_read_memory, Released());
  module.def("advise_large_pages",
             [](Address memory, std::size_t bytes) { advise_large_pages(pointer<void>(memory), bytes); });
}

}  // namespace ropeway
