#include "core/shared_group.h"

#include "bindings/arguments.h"

namespace ropeway {

void bind_shared_group(nb::module_& module) {
  nb::class_<SharedGroup>(module, "SharedGroup", "Collectives between processes of one host; refers to their memory.")
      .def(nb::new_([](Address memory, int rank, int size) {
             return new SharedGroup(pointer<std::byte>(memory), rank, size);
           }),
           nb::arg("memory"), nb::arg("rank"), nb::arg("size"))
      .def_static("bytes", &SharedGroup::bytes, nb::arg("size"))
      .def(
          "all_reduce", [](SharedGroup& group, Address x, std::int64_t count) {
            group.all_reduce(pointer<float>(x), count);
          },
          Released())
      .def(
          "all_gather", [](SharedGroup& group, Address x, std::int64_t bytes, Address out) {
            group.all_gather(pointer<const std::byte>(x), bytes, pointer<std::byte>(out));
          },
          Released())
      .def(
          "broadcast", [](SharedGroup& group, Address x, std::int64_t bytes) {
            group.broadcast(pointer<std::byte>(x), bytes);
          },
          Released())
      .def("fail", &SharedGroup::fail);
}

}  // namespace ropeway
