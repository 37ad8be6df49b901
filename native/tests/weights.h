// Random matrices of every layout: as a file has them, packed, and as exact numbers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "buffer.h"
#include "core/packed.h"
#include "random.h"

namespace ropeway::tests {

struct WeightKind {
  Layout layout;
  int group = 0;
  bool half_scales = false, minimums = false;
  int digits = 0;

  bool grouped() const { return group != 0; }
  std::string name() const;
};

// Every combination that the kernels are compiled for.
const std::vector<WeightKind>& weight_kinds();

struct Weights {
  WeightKind kind;
  std::int64_t n, k, row_stride;
  // As a file has them; between the rows of `values` lie NaNs.
  Buffer<std::byte> values, scales, minimums;
  // As the kernels have them.
  Buffer<std::byte> data, packed_scales, packed_minimums;
  PackedMatrix matrix;

  double value(std::int64_t row, std::int64_t i) const;  // grouped kinds: `scale * code + minimum`, as float32 has it
  int code(std::int64_t row, std::int64_t i) const;
  float scale(std::int64_t row, std::int64_t group) const;
  float minimum(std::int64_t row, std::int64_t group) const;
};

Weights random_weights(Context& context, const WeightKind& kind, std::int64_t n, std::int64_t k, Random& random);

// The sizes that `kind` allows nearest above k.
std::int64_t allowed_k(const WeightKind& kind, std::int64_t k);

// Where the kernels read inputs: what the product of a row is made of.
struct Inputs {
  std::vector<float> values;         // [k]: dense kinds: as multiplied
  std::vector<int> codes;            // [k]: grouped kinds
  std::vector<float> scales;         // [ceil(k / 32)]
};
Inputs prepare(const WeightKind& kind, const float* x, std::int64_t k);

// Output `row` of a product: its value, and the sum of its terms' magnitudes.
struct Product {
  double value, magnitude;
};
Product product(const Weights& weights, std::int64_t row, const Inputs& inputs);

}  // namespace ropeway::tests
