#define DOCTEST_CONFIG_IMPLEMENT
// The tests have their own way to say what crashed, and sanitizers theirs.
#define DOCTEST_CONFIG_NO_POSIX_SIGNALS
#include <doctest/doctest.h>

#include <cstdio>

#include "machine.h"

int main(int argc, char** argv) {
  std::printf("instruction sets:");
  for (const ropeway::Isa isa : ropeway::tests::isas()) std::printf(" %s", ropeway::isa_name(isa));
  std::printf("\n");
  std::fflush(stdout);
  if (ropeway::tests::isas().empty()) return 1;
  return doctest::Context(argc, argv).run();
}
