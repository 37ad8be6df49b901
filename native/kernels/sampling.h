// Choosing the next token of every row from its logits.
#pragma once

#include "core/context.h"

namespace ropeway {

// Columns have an entry per row unless said otherwise; devices/base.py, `SampleInputs`, tells what they mean.
struct Sampling {
  const float* logits;  // [rows, vocabulary], rows `stride` apart
  std::int64_t rows, vocabulary, stride;
  const float* temperature;
  const std::int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const float* repetition_penalty;
  const float* presence_penalty;
  const float* frequency_penalty;
  const std::int64_t* seeds;
  const std::int32_t* tokens;  // [slots, positions]
  std::int64_t positions;
  const std::int32_t* slots;
  const std::int32_t* prompt_lengths;
  const std::int32_t* lengths;
  const std::int32_t* bias_start;  // [rows + 1]
  const std::int32_t* bias_ids;
  const float* bias_values;
  const std::int32_t* top_logprobs;
  const std::int32_t* mask_of;  // null: no row has a mask
  const std::uint32_t* masks;   // [masks, mask_words]
  std::int64_t mask_words;

  std::int32_t* token_ids;
  float* logprobs;           // null: nobody asked
  std::int32_t* top_ids;     // [rows, top]
  float* top_values;         // [rows, top]
  std::int64_t top;          // at most the vocabulary
};

struct SamplingKernels {
  void (*sample)(Context& context, const Sampling& args);
};

ROPEWAY_DECLARE_TABLE(SamplingKernels, sampling_kernels)

}  // namespace ropeway
