#include "machine.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace ropeway::tests {
namespace {

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

char running[128] = "";

void say_what_ran() { [[maybe_unused]] const auto written = write(STDERR_FILENO, running, std::strlen(running)); }

[[maybe_unused]] void say_what_crashed(int signal) {
  say_what_ran();
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

}  // namespace

const std::vector<Isa>& isas() {
  static const std::vector<Isa> chosen = [] {
    const std::string wanted = "," + variable("ROPEWAY_TEST_ISAS") + ",";
    std::vector<Isa> list;
    for (const Isa isa : all_isas) {
      const bool named = wanted == ",," || wanted.find("," + std::string(isa_name(isa)) + ",") != std::string::npos;
      if (named && isa_available(isa)) list.push_back(isa);
    }
    return list;
  }();
  return chosen;
}

Context& context(Isa isa, int threads) {
  static std::map<std::pair<Isa, int>, std::unique_ptr<Context>> contexts;
  auto& place = contexts[{isa, threads}];
  if (place == nullptr) place = std::make_unique<Context>(threads, isa);
  return *place;
}

void for_seeds(std::int64_t usual, const std::function<void(std::uint64_t)>& body) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_set_death_callback(&say_what_ran);
#else
  std::signal(SIGSEGV, &say_what_crashed);
  for (const int signal : {SIGBUS, SIGFPE, SIGILL, SIGABRT}) std::signal(signal, &say_what_crashed);
#endif
  const auto run = [&](std::uint64_t seed) {
    std::snprintf(running, sizeof running, "\ncrashed at ROPEWAY_TEST_SEED=%llu\n",
                  static_cast<unsigned long long>(seed));
    INFO("ROPEWAY_TEST_SEED=", seed);
    body(seed);
    running[0] = '\0';
  };
  if (const std::string only = variable("ROPEWAY_TEST_SEED"); !only.empty()) {
    run(std::stoull(only));
    return;
  }
  const std::string share = variable("ROPEWAY_TEST_SHARE");
  const double factor = share.empty() ? 1.0 : std::stod(share);
  const auto count = std::max<std::int64_t>(1, static_cast<std::int64_t>(static_cast<double>(usual) * factor));
  for (std::int64_t seed = 0; seed < count; ++seed) run(static_cast<std::uint64_t>(seed));
}

}  // namespace ropeway::tests
