// Norms, rotary embedding and gated activation against double precision.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "buffer.h"
#include "kernels/elementwise.h"
#include "machine.h"
#include "numbers.h"
#include "random.h"

namespace ropeway::tests {
namespace {

const ElementwiseKernels& kernels(const Context& context) { return ROPEWAY_TABLE(elementwise_kernels, context.isa()); }

Buffer<float> random_floats(std::int64_t count, Random& random) {
  Buffer<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = 3.0F * random.normal();
  return values;
}

double wide(float x) { return static_cast<double>(x); }

TEST_CASE("rms_norm agrees with double precision, with a residual and without") {
  for (const Isa isa : isas()) {
    CAPTURE(name(isa));
    for_seeds(120, [&](std::uint64_t seed) {
      Random random(seed);
      const std::int64_t most = 1 + 3 * static_cast<std::int64_t>(seed);
      const std::int64_t size = seed % 40 == 39 ? 32768 + 17 : random.integer(1, most), rows = random.integer(0, 9);
      const Buffer<float> x = random_floats(rows * size, random), residual = random_floats(rows * size, random);
      const Buffer<float> weight = random_floats(size, random);
      Buffer<float> out(x.size()), sum(x.size());
      const bool with_residual = random.chance(0.5);
      Context& used = context(isa, static_cast<int>(random.integer(1, 4)));
      {
        const Call call(used);
        kernels(used).rms_norm(used, {x.data(), with_residual ? residual.data() : nullptr, weight.data(), out.data(),
                                      with_residual ? sum.data() : nullptr, rows, size, 1e-6F});
      }
      Worst worst;
      std::int64_t wrong_sums = 0;
      for (std::int64_t row = 0; row < rows; ++row) {
        const auto input = [&](std::int64_t i) {
          const auto at = static_cast<std::size_t>(row * size + i);
          return with_residual ? x[at] + residual[at] : x[at];
        };
        double squares = 0.0;
        for (std::int64_t i = 0; i < size; ++i) squares += wide(input(i)) * wide(input(i));
        const double scale = 1.0 / std::sqrt(squares / static_cast<double>(size) + 1e-6);
        for (std::int64_t i = 0; i < size; ++i) {
          const auto at = static_cast<std::size_t>(row * size + i);
          const double want = wide(input(i)) * scale * wide(weight[static_cast<std::size_t>(i)]);
          worst.see(row * size + i, wide(out[at]), want, 32.0 * kEpsilon * std::abs(want) + 1e-37);
          wrong_sums += with_residual && !same_bits(sum[at], input(i));
        }
      }
      CHECK_WORST(worst);
      CHECK(wrong_sums == 0);
    });
  }
}

TEST_CASE("rope turns the rotated features by their position's angle and leaves the others alone") {
  for (const Isa isa : isas()) {
    CAPTURE(name(isa));
    for_seeds(120, [&](std::uint64_t seed) {
      Random random(seed);
      const std::int64_t half = random.integer(1, 1 + static_cast<std::int64_t>(seed)), rotated = 2 * half;
      const std::int64_t size = rotated + random.integer(0, 20), heads = random.integer(1, 4);
      const std::int64_t tokens = random.integer(0, 12), table_positions = random.integer(1, 50);
      const Buffer<float> x = random_floats(tokens * heads * size, random);
      const Buffer<float> table = random_floats(table_positions * rotated, random);
      Buffer<std::int32_t> positions(static_cast<std::size_t>(tokens));
      for (std::int32_t& position : positions) {
        position = static_cast<std::int32_t>(random.integer(0, table_positions - 1));
      }
      Buffer<float> out(x.size());
      Context& used = context(isa, static_cast<int>(random.integer(1, 4)));
      {
        const Call call(used);
        kernels(used).rope(used, {x.data(), positions.data(), table.data(), out.data(), tokens, heads, size, rotated});
      }
      Worst worst;
      for (std::int64_t i = 0; i < static_cast<std::int64_t>(x.size()); ++i) {
        const std::int64_t feature = i % size, token = i / (heads * size);
        const auto value = [&](std::int64_t at) { return wide(x[static_cast<std::size_t>(at)]); };
        double want = value(i), allowed = 0.0;
        if (feature < rotated) {
          const std::int64_t pair = feature % half, low = i - feature + pair;
          const float* const row = table.data() + positions[static_cast<std::size_t>(token)] * rotated;
          const double c = wide(row[pair]), s = wide(row[half + pair]), a = value(low), b = value(low + half);
          want = feature < half ? a * c - b * s : b * c + a * s;
          allowed = 4.0 * kEpsilon * (std::abs(a) + std::abs(b)) * (std::abs(c) + std::abs(s));
        }
        worst.see(i, wide(out[static_cast<std::size_t>(i)]), want, allowed + 1e-37);
      }
      CHECK_WORST(worst);
    });
  }
}

TEST_CASE("silu_and_mul agrees with double precision from the smallest to the largest gate") {
  for (const Isa isa : isas()) {
    CAPTURE(name(isa));
    for_seeds(100, [&](std::uint64_t seed) {
      Random random(seed);
      const std::int64_t most = 20 * static_cast<std::int64_t>(seed);
      const std::int64_t count = seed % 50 == 49 ? 3 * 32768 + 5 : random.integer(0, most);
      Buffer<float> gate = random_floats(count, random);
      const Buffer<float> up = random_floats(count, random);
      for (float& value : gate) value *= static_cast<float>(std::pow(10.0, 6.0 * random.uniform() - 4.0));
      Buffer<float> out(gate.size());
      Context& used = context(isa, static_cast<int>(random.integer(1, 4)));
      {
        const Call call(used);
        kernels(used).silu_and_mul(used, {gate.data(), up.data(), out.data(), count});
      }
      Worst worst;
      for (std::size_t i = 0; i < gate.size(); ++i) {
        const double g = wide(gate[i]), want = g / (1.0 + std::exp(-g)) * wide(up[i]);
        // Where e^-gate overflows, the result is no larger than the smallest numbers.
        worst.see(static_cast<std::int64_t>(i), wide(out[i]), want, 16.0 * kEpsilon * std::abs(want) + 1e-34);
      }
      CHECK_WORST(worst);
    });
  }
}

TEST_CASE("silu_and_mul gives limits at the ends and NaN for NaN") {
  constexpr float infinity = std::numeric_limits<float>::infinity(), largest = std::numeric_limits<float>::max();
  for (const Isa isa : isas()) {
    CAPTURE(name(isa));
    const Buffer<float> gate = {0.0F, -0.0F, 1e-45F, -1e-45F, largest, -largest, infinity, NAN};
    const Buffer<float> up = {5.0F, 5.0F, 1.0F, 1.0F, 1.0F, 1.0F, 1.0F, 1.0F};
    Buffer<float> out(gate.size());
    Context& used = context(isa, 2);
    const Call call(used);
    kernels(used).silu_and_mul(used, {gate.data(), up.data(), out.data(), static_cast<std::int64_t>(gate.size())});
    for (const std::size_t i : {0, 1, 2, 3, 5}) CHECK(std::abs(out[i]) < 1e-37F);
    CHECK(out[4] == largest);
    CHECK(out[6] == infinity);
    CHECK(std::isnan(out[7]));
  }
}

}  // namespace
}  // namespace ropeway::tests
