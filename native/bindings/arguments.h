// How kernel arguments come from Python: addresses as plain integers (0: absent), nothing inspected. The Python
// modules beside `_native` own the tensors, check shapes and types, and keep them alive during the call.
#pragma once

#include <cstdint>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "core/context.h"

namespace ropeway {

namespace nb = nanobind;

using Address = std::uintptr_t;

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

// For every function that runs a kernel: others may run Python meanwhile.
using Released = nb::call_guard<nb::gil_scoped_release>;

}  // namespace ropeway
