#include "kernels/sampling.h"

#include "bindings/arguments.h"

namespace ropeway {
namespace {

void sample(Context& context, Address logits, std::int64_t rows, std::int64_t vocabulary, std::int64_t stride,
            Address temperature, Address top_k, Address top_p, Address min_p, Address repetition_penalty,
            Address presence_penalty, Address frequency_penalty, Address seeds, Address tokens, std::int64_t positions,
            Address slots, Address prompt_lengths, Address lengths, Address bias_start, Address bias_ids,
            Address bias_values, Address top_logprobs, Address mask_of, Address masks, std::int64_t mask_words,
            Address token_ids, Address logprobs, Address top_ids,
            Address top_values, std::int64_t top) {
  const Call call(context);
  ROPEWAY_TABLE(sampling_kernels, context.isa())
      .sample(context, {
                           .logits = pointer<const float>(logits),
                           .rows = rows,
                           .vocabulary = vocabulary,
                           .stride = stride,
                           .temperature = pointer<const float>(temperature),
                           .top_k = pointer<const std::int32_t>(top_k),
                           .top_p = pointer<const float>(top_p),
                           .min_p = pointer<const float>(min_p),
                           .repetition_penalty = pointer<const float>(repetition_penalty),
                           .presence_penalty = pointer<const float>(presence_penalty),
                           .frequency_penalty = pointer<const float>(frequency_penalty),
                           .seeds = pointer<const std::int64_t>(seeds),
                           .tokens = pointer<const std::int32_t>(tokens),
                           .positions = positions,
                           .slots = pointer<const std::int32_t>(slots),
                           .prompt_lengths = pointer<const std::int32_t>(prompt_lengths),
                           .lengths = pointer<const std::int32_t>(lengths),
                           .bias_start = pointer<const std::int32_t>(bias_start),
                           .bias_ids = pointer<const std::int32_t>(bias_ids),
                           .bias_values = pointer<const float>(bias_values),
                           .top_logprobs = pointer<const std::int32_t>(top_logprobs),
                           .mask_of = pointer<const std::int32_t>(mask_of),
                           .masks = pointer<const std::uint32_t>(masks),
                           .mask_words = mask_words,
                           .token_ids = pointer<std::int32_t>(token_ids),
                           .logprobs = pointer<float>(logprobs),
                           .top_ids = pointer<std::int32_t>(top_ids),
                           .top_values = pointer<float>(top_values),
                           .top = top,
                       });
}

}  // namespace

void bind_sampling(nb::module_& module) { module.def("sample", &sample, Released()); }

}  // namespace ropeway
