#include "core/rows.h"

#include "bindings/arguments.h"

namespace ropeway {
namespace {

TokenTable table_of(Address tokens, std::int64_t slots, std::int64_t positions, std::int64_t stride) {
  return {pointer<std::int32_t>(tokens), slots, positions, stride};
}

}  // namespace

// All of them take a microsecond or so: the interpreter's lock is kept, since getting it back could take longer.
void bind_rows(nb::module_& module) {
  module.def(
      "read_tokens",
      [](Address tokens, std::int64_t slots, std::int64_t positions, std::int64_t stride, Address slot,
         Address position, std::int64_t count, Address out) {
        read_tokens(table_of(tokens, slots, positions, stride), pointer<const std::int32_t>(slot),
                    pointer<const std::int32_t>(position), count, pointer<std::int32_t>(out));
      });
  module.def(
      "write_tokens",
      [](Address tokens, std::int64_t slots, std::int64_t positions, std::int64_t stride, Address slot,
         Address position, std::int64_t count, Address values) {
        write_tokens(table_of(tokens, slots, positions, stride), pointer<const std::int32_t>(slot),
                     pointer<const std::int32_t>(position), count, pointer<const std::int32_t>(values));
      });
  module.def(
      "take",
      [](Address x, std::int64_t rows, std::int64_t size, Address index, std::int64_t count, Address out) {
        take(pointer<const float>(x), rows, size, pointer<const std::int32_t>(index), count, pointer<float>(out));
      });
}

}  // namespace ropeway
