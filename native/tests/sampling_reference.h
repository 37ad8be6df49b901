// Sampling in double precision, token by token, as devices/base.py tells it.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/sampling.h"

namespace ropeway::tests {

// u in [0, 1) of Philox4x32-10 (Salmon et al., SC 2011).
double philox_uniform(std::uint64_t seed, std::uint64_t counter);

struct SampledRow {
  std::int64_t token;
  bool certain;  // no rounding of the kernel's could have made it another one
  double logprob;
  std::vector<std::int32_t> top_ids;
  std::vector<double> top_logprobs;
};

// Logits after penalties, biases and masks: in float32, exactly what the kernel goes on with.
std::vector<float> penalized_logits(const Sampling& args, std::int64_t row);

SampledRow sample_row(const Sampling& args, std::int64_t row);

}  // namespace ropeway::tests
