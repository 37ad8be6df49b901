// Rows times packed weights, in every layout: against exact sums, and bit against bit whatever is computed together.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/elementwise.h"
#include "kernels/linear.h"
#include "machine.h"
#include "numbers.h"
#include "weights.h"

namespace ropeway::tests {
namespace {

Buffer<float> random_floats(std::int64_t count, Random& random) {
  Buffer<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = random.normal();
  return values;
}

void run(Context& context, const Linear& args) {
  const Call call(context);
  ROPEWAY_TABLE(linear_kernels, context.isa()).linear(context, args);
}

Buffer<float> linear(Context& context, const Weights& w, const Buffer<float>& x, const Buffer<float>* bias) {
  const auto rows = static_cast<std::int64_t>(x.size()) / w.k;
  Buffer<float> out(static_cast<std::size_t>(rows * w.n));
  const LinearPart part = {&w.matrix, bias == nullptr ? nullptr : bias->data(), out.data()};
  run(context, {.x = x.data(), .rows = rows, .parts = &part, .part_count = 1, .residual = nullptr, .gated = false,
                .norm_weight = nullptr, .norm_eps = 0.0F});
  return out;
}

Buffer<float> rows_of(const Buffer<float>& x, std::int64_t size, std::int64_t first, std::int64_t count) {
  Buffer<float> part(static_cast<std::size_t>(count * size));
  std::copy_n(x.data() + first * size, count * size, part.data());
  return part;
}

void check_exact(const Weights& w, const Buffer<float>& x, const Buffer<float>* bias, const Buffer<float>& out) {
  // A term may be rounded twice, each addition once.
  const std::int64_t terms = w.kind.grouped() ? 2 * (w.k / w.kind.group) : w.k;
  Worst worst;
  for (std::int64_t row = 0; row < static_cast<std::int64_t>(x.size()) / w.k; ++row) {
    const Inputs inputs = prepare(w.kind, x.data() + row * w.k, w.k);
    for (std::int64_t n = 0; n < w.n; ++n) {
      Product want = product(w, n, inputs);
      if (bias != nullptr) {
        want.value += static_cast<double>((*bias)[static_cast<std::size_t>(n)]);
        want.magnitude += std::abs(static_cast<double>((*bias)[static_cast<std::size_t>(n)]));
      }
      const double allowed = static_cast<double>(terms + 4) * kEpsilon * want.magnitude + 1e-37;
      worst.see(row * w.n + n, static_cast<double>(out[static_cast<std::size_t>(row * w.n + n)]), want.value, allowed);
    }
  }
  CHECK_WORST(worst);
}

void check_same_bits(const Buffer<float>& a, const float* b) {
  std::size_t differing = 0;
  for (std::size_t i = 0; i < a.size(); ++i) differing += same_bits(a[i], b[i]) ? 0 : 1;
  CHECK(differing == 0);
}

TEST_CASE("linear is exact up to rounding for every layout, and a row's bits are the same in every batch") {
  constexpr std::int64_t most_rows = 40;
  for (const Isa isa : isas()) {
    for (const WeightKind& kind : weight_kinds()) {
      CAPTURE(name(isa));
      CAPTURE(kind.name());
      Random random(7);
      const std::int64_t n = 67, k = allowed_k(kind, 83);
      const Weights w = random_weights(context(isa, 2), kind, n, k, random);
      const Buffer<float> x = random_floats(most_rows * k, random), bias = random_floats(n, random);
      const Buffer<float> all = linear(context(isa, 1), w, x, &bias);
      check_exact(w, x, &bias, all);
      for (std::int64_t rows = 0; rows <= most_rows; ++rows) {
        CAPTURE(rows);
        const std::int64_t first = most_rows - rows;
        const int threads = static_cast<int>(1 + rows % 4);
        check_same_bits(linear(context(isa, threads), w, rows_of(x, k, first, rows), &bias), all.data() + first * n);
      }
      for (std::int64_t row = 0; row < most_rows; ++row) {
        CAPTURE(row);
        check_same_bits(linear(context(isa, 1), w, rows_of(x, k, row, 1), &bias), all.data() + row * n);
      }
    }
  }
}

TEST_CASE("linear is exact up to rounding for random shapes") {
  for (const Isa isa : isas()) {
    CAPTURE(name(isa));
    for_seeds(150, [&](std::uint64_t seed) {
      Random random(seed);
      const WeightKind& kind = weight_kinds()[seed % weight_kinds().size()];
      CAPTURE(kind.name());
      const std::int64_t size = 1 + static_cast<std::int64_t>(seed);
      const std::int64_t n = random.integer(1, std::min<std::int64_t>(2 * size, 150));
      const std::int64_t k = allowed_k(kind, random.integer(1, std::min<std::int64_t>(4 * size, 400)));
      const std::int64_t rows = random.integer(0, std::min<std::int64_t>(size, 130));
      CAPTURE(n);
      CAPTURE(k);
      CAPTURE(rows);
      const Weights w = random_weights(context(isa, 2), kind, n, k, random);
      const Buffer<float> x = random_floats(rows * k, random), bias = random_floats(n, random);
      const Buffer<float>* const added = random.chance(0.5) ? &bias : nullptr;
      const Buffer<float> out = linear(context(isa, static_cast<int>(random.integer(1, 4))), w, x, added);
      check_exact(w, x, added, out);
      if (rows > 0) {
        const std::int64_t row = random.integer(0, rows - 1);
        check_same_bits(linear(context(isa, 1), w, rows_of(x, k, row, 1), added), out.data() + row * n);
      }
    });
  }
}

TEST_CASE("linear is exact up to rounding where k takes several blocks and rows several tiles") {
  for (const Isa isa : isas()) {
    for (const WeightKind& kind : weight_kinds()) {
      if (kind.grouped() && !kind.half_scales) continue;  // the blocks are the same
      CAPTURE(name(isa));
      CAPTURE(kind.name());
      Random random(11);
      const std::int64_t n = 33, k = allowed_k(kind, kind.grouped() ? 2 * 8192 + 16 : 2049);
      const Weights w = random_weights(context(isa, 2), kind, n, k, random);
      const Buffer<float> x = random_floats(3 * k, random);
      check_exact(w, x, nullptr, linear(context(isa, 3), w, x, nullptr));
      const std::int64_t short_k = allowed_k(kind, 33), rows = 205;
      const Weights low = random_weights(context(isa, 2), kind, 130, short_k, random);
      const Buffer<float> many = random_floats(rows * short_k, random);
      const Buffer<float> out = linear(context(isa, 4), low, many, nullptr);
      check_exact(low, many, nullptr, out);
      check_same_bits(linear(context(isa, 1), low, rows_of(many, short_k, 101, 1), nullptr), out.data() + 101 * 130);
    }
  }
}

TEST_CASE("a row of zeros gives zeros, huge and tiny values no NaN, and a NaN or an infinity stays in its row") {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  for (const Isa isa : isas()) {
    for (const WeightKind& kind : weight_kinds()) {
      CAPTURE(name(isa));
      CAPTURE(kind.name());
      Random random(13);
      const std::int64_t n = 35, k = allowed_k(kind, 96), rows = 15;
      const Weights w = random_weights(context(isa, 2), kind, n, k, random);
      Buffer<float> x = random_floats(rows * k, random);
      const auto row = [&](std::int64_t r) { return x.data() + r * k; };
      std::fill_n(row(1), k, 0.0F);
      std::fill_n(row(3), k, 1e-42F);
      for (std::int64_t i = 0; i < k; ++i) row(5)[i] *= 1e30F;
      for (std::int64_t i = 0; i < k; ++i) row(7)[i] *= 1e-30F;
      row(9)[k / 2] = std::numeric_limits<float>::quiet_NaN();
      row(11)[k - 1] = infinity;
      row(13)[0] = -infinity;
      const Buffer<float> out = linear(context(isa, 2), w, x, nullptr);
      for (std::int64_t r = 0; r < rows; ++r) {
        CAPTURE(r);
        const Buffer<float> one = rows_of(x, k, r, 1), row_out = rows_of(out, n, r, 1);
        check_same_bits(linear(context(isa, 1), w, one, nullptr), row_out.data());
        if (r == 3) continue;  // an instruction set may take denormals for zeros
        if (r != 9 && r != 11 && r != 13) {
          check_exact(w, one, nullptr, row_out);
          continue;
        }
        for (const float value : row_out) CHECK_FALSE(std::isfinite(value));
      }
      for (const float value : rows_of(out, n, 1, 1)) CHECK(value == 0.0F);
    }
  }
}

Buffer<float> normed(Context& context, const Buffer<float>& x, const Buffer<float>& weight, float eps) {
  const auto size = static_cast<std::int64_t>(weight.size()), rows = static_cast<std::int64_t>(x.size()) / size;
  Buffer<float> out(x.size());
  const Call call(context);
  ROPEWAY_TABLE(elementwise_kernels, context.isa())
      .rms_norm(context, {x.data(), nullptr, weight.data(), out.data(), nullptr, rows, size, eps});
  return out;
}

TEST_CASE("products computed as one have the bits of those computed one after the other") {
  for (const Isa isa : isas()) {
    CAPTURE(name(isa));
    for_seeds(150, [&](std::uint64_t seed) {
      Random random(seed);
      const std::int64_t most = 2 + static_cast<std::int64_t>(seed);
      const std::int64_t rows = random.integer(1, std::min<std::int64_t>(most, 110));
      const bool gated = random.chance(0.3);
      const int part_count = gated ? 2 : static_cast<int>(random.integer(1, 3));
      const bool grouped = random.chance(0.5);
      std::vector<WeightKind> kinds;
      for (const WeightKind& kind : weight_kinds())
        if (kind.grouped() == grouped) kinds.push_back(kind);
      const std::int64_t k = (grouped ? 32 : 1) * random.integer(1, std::min<std::int64_t>(most, grouped ? 6 : 150));
      const std::int64_t first_n = random.integer(1, std::min<std::int64_t>(2 * most, 100));
      Context& used = context(isa, static_cast<int>(random.integer(1, 4)));

      std::vector<Weights> weights;
      std::vector<Buffer<float>> biases, outs;
      std::vector<LinearPart> parts;
      for (int i = 0; i < part_count; ++i) {
        const std::int64_t n = i == 0 || gated ? first_n : random.integer(1, std::min<std::int64_t>(2 * most, 100));
        weights.push_back(random_weights(used, random.pick(kinds), n, k, random));
        biases.push_back(random_floats(n, random));
        outs.emplace_back(static_cast<std::size_t>(gated && i == 1 ? 0 : rows * n));
      }
      const Buffer<float> x = random_floats(rows * k, random), norm_weight = random_floats(k, random);
      const Buffer<float> residual = random_floats(rows * first_n, random);
      const bool with_bias = random.chance(0.5), with_norm = random.chance(0.5);
      const bool with_residual = part_count == 1 && random.chance(0.5), in_place = with_residual && random.chance(0.5);
      if (in_place) std::copy(residual.begin(), residual.end(), outs[0].begin());
      for (std::size_t i = 0; i < weights.size(); ++i) {
        parts.push_back({&weights[i].matrix, with_bias ? biases[i].data() : nullptr, outs[i].data()});
      }
      run(used, {.x = x.data(), .rows = rows, .parts = parts.data(), .part_count = part_count,
                 .residual = !with_residual ? nullptr : in_place ? outs[0].data() : residual.data(), .gated = gated,
                 .norm_weight = with_norm ? norm_weight.data() : nullptr, .norm_eps = 1e-5F});

      const Buffer<float> inputs = with_norm ? normed(used, x, norm_weight, 1e-5F) : rows_of(x, k, 0, rows);
      std::vector<Buffer<float>> wanted;
      for (std::size_t i = 0; i < weights.size(); ++i) {
        wanted.push_back(linear(used, weights[i], inputs, with_bias ? &biases[i] : nullptr));
      }
      if (with_residual) {
        for (std::size_t i = 0; i < wanted[0].size(); ++i) wanted[0][i] += residual[i];
      }
      if (gated) {
        const Call call(used);
        ROPEWAY_TABLE(elementwise_kernels, isa)
            .silu_and_mul(used, {wanted[0].data(), wanted[1].data(), wanted[0].data(), rows * first_n});
      }
      for (std::size_t i = 0; i < (gated ? 1 : weights.size()); ++i) check_same_bits(outs[i], wanted[i].data());
    });
  }
}

}  // namespace
}  // namespace ropeway::tests
