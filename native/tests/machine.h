// What the tests run on: instruction sets and threads; how long random tests go on.
//
//   ROPEWAY_TEST_ISAS=portable,avx2   these alone (default: all that this machine has)
//   ROPEWAY_TEST_SHARE=0.1            a tenth of the usual number of random cases
//   ROPEWAY_TEST_SEED=123             one random case alone, of every test
//   ROPEWAY_TEST_HEAP=1               buffers from the heap, for valgrind
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/context.h"

namespace ropeway::tests {

const std::vector<Isa>& isas();

inline std::string name(Isa isa) { return isa_name(isa); }

// The same one for the same arguments.
Context& context(Isa isa, int threads);

// Calls body(seed) for `usual` seeds (see above), small cases first: seeds count up from 0, and a case's size is to
// grow with its seed. A crash prints the seed.
void for_seeds(std::int64_t usual, const std::function<void(std::uint64_t)>& body);

}  // namespace ropeway::tests
