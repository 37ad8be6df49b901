// Tiles from a lambda: `parallel(context, tiles, [&](std::int64_t tile, int worker) { ... })`.
#pragma once

#include "core/context.h"

namespace ropeway::ROPEWAY_ISA {

template <class Body>
inline void parallel(Context& context, std::int64_t tiles, const Body& body) {
  context.run(
      tiles, [](void* job, std::int64_t tile, int worker) { (*static_cast<const Body*>(job))(tile, worker); },
      const_cast<Body*>(&body));
}

}  // namespace ropeway::ROPEWAY_ISA
