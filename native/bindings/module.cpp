// ropeway.devices.cpu._native: the context of a device, and every kernel family's functions.
#include <stdexcept>
#include <string>
#include <vector>

#include <nanobind/stl/vector.h>

#include "bindings/arguments.h"
#include "families.h"

namespace ropeway {

#define ROPEWAY_BIND(family) void bind_##family(nb::module_& module);
ROPEWAY_FAMILIES(ROPEWAY_BIND)
#undef ROPEWAY_BIND

namespace {

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Isa isa : all_isas) {
    if (isa_available(isa)) names.emplace_back(isa_name(isa));
  }
  return names;
}

Isa parse_isa(const std::string& name) {
  if (name == "auto") return best_isa();
  std::string known = "auto";
  for (const Isa isa : all_isas) {
    if (!isa_available(isa)) continue;
    if (name == isa_name(isa)) return isa;
    known += std::string(", ") + isa_name(isa);
  }
  throw std::invalid_argument("instruction set \"" + name + "\" is not available here; choose one of: " + known);
}

Context* make_context(int threads, const std::string& isa) {
  if (threads < 1) throw std::invalid_argument("threads must be at least 1, not " + std::to_string(threads));
  return new Context(threads, parse_isa(isa));
}

}  // namespace
}  // namespace ropeway

NB_MODULE(_native, module) {
  using namespace ropeway;
  // Objects alive at the interpreter's exit, in a module's globals say, are no leak worth a page of warnings.
  nb::set_leak_warnings(false);
  module.doc() = "Native CPU kernels. Addresses are integers; see native/README.md.";
  module.def("available_isas", &available_isas, "Instruction sets usable on this machine, best last.");
  nb::class_<Context>(module, "Context", "Threads, scratch memory and instruction set of one device.")
      .def(nb::new_(&make_context), nb::arg("threads"), nb::arg("isa") = "auto")
      .def_prop_ro("threads", &Context::threads)
      .def_prop_ro("isa", [](const Context& context) { return std::string(isa_name(context.isa())); });
#define ROPEWAY_BIND(family) bind_##family(module);
  ROPEWAY_FAMILIES(ROPEWAY_BIND)
#undef ROPEWAY_BIND
}
