// Sampling against the same in double precision, for parameters from one end to the other.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "buffer.h"
#include "machine.h"
#include "numbers.h"
#include "random.h"
#include "sampling_reference.h"

namespace ropeway::tests {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity(), largest = std::numeric_limits<float>::max();

std::int32_t up_to(std::int64_t most, Random& random, std::int64_t least = 0) {
  return static_cast<std::int32_t>(random.integer(least, most));
}

// Columns of exactly the size that a kernel is told.
struct Batch {
  std::int64_t vocabulary, stride, positions, slot_count;
  Buffer<float> logits, temperature, top_p, min_p, repetition, presence, frequency, bias_values;
  Buffer<std::int64_t> seeds;
  Buffer<std::int32_t> top_k, tokens, slots, prompt_lengths, lengths, bias_start, bias_ids, top_logprobs;
  Buffer<std::int32_t> token_ids, top_ids;
  Buffer<float> logprobs, top_values;
  Buffer<std::int32_t> mask_of;  // empty: there are no masks
  Buffer<std::uint32_t> masks;
  std::int64_t mask_words = 0;
  std::int64_t top = 0;
  bool reports = false;

  Batch(std::int64_t rows, std::int64_t vocabulary, Random& random)
      : vocabulary(vocabulary),
        stride(vocabulary + random.integer(0, 5)),
        positions(random.integer(1, 60)),
        slot_count(rows + 2) {
    const auto count = static_cast<std::size_t>(rows);
    const std::int64_t cells = rows == 0 ? 0 : (rows - 1) * stride + vocabulary;
    logits = Buffer<float>(static_cast<std::size_t>(cells));
    const float spread = random.chance(0.5) ? 1.0F : 5.0F;
    for (std::int64_t row = 0; row < rows; ++row)
      for (std::int64_t id = 0; id < vocabulary; ++id) logit(row, id) = spread * random.normal();
    temperature = fill<float>(count, 1.0F);
    top_p = fill<float>(count, 1.0F);
    min_p = fill<float>(count, 0.0F);
    repetition = fill<float>(count, 1.0F);
    presence = fill<float>(count, 0.0F);
    frequency = fill<float>(count, 0.0F);
    top_k = fill<std::int32_t>(count, 0);
    top_logprobs = fill<std::int32_t>(count, -1);
    bias_start = fill<std::int32_t>(count + 1, 0);
    tokens = Buffer<std::int32_t>(static_cast<std::size_t>(slot_count * positions));
    for (std::int32_t& token : tokens) token = up_to(std::min<std::int64_t>(vocabulary, 40), random, -1);
    slots = fill<std::int32_t>(count, 0);
    lengths = fill<std::int32_t>(count, 0);
    prompt_lengths = fill<std::int32_t>(count, 0);
    seeds = Buffer<std::int64_t>(count);
    for (std::size_t row = 0; row < count; ++row) {
      seeds[row] = static_cast<std::int64_t>(random.bits());
      slots[row] = static_cast<std::int32_t>(random.integer(0, slot_count - 1));
      lengths[row] = static_cast<std::int32_t>(random.integer(1, positions));
      prompt_lengths[row] = static_cast<std::int32_t>(random.integer(0, lengths[row]));
    }
  }

  std::int64_t rows() const { return static_cast<std::int64_t>(temperature.size()); }
  float& logit(std::int64_t row, std::int64_t id) { return logits[static_cast<std::size_t>(row * stride + id)]; }

  Sampling arguments() {
    top = 0;
    for (const std::int32_t wanted : top_logprobs) {
      top = std::max<std::int64_t>(top, wanted);
      reports = reports || wanted >= 0;
    }
    token_ids = Buffer<std::int32_t>(temperature.size());
    logprobs = Buffer<float>(reports ? temperature.size() : 0);
    top_ids = Buffer<std::int32_t>(temperature.size() * static_cast<std::size_t>(top));
    top_values = Buffer<float>(top_ids.size());
    return {
        .logits = logits.data(),
        .rows = rows(),
        .vocabulary = vocabulary,
        .stride = stride,
        .temperature = temperature.data(),
        .top_k = top_k.data(),
        .top_p = top_p.data(),
        .min_p = min_p.data(),
        .repetition_penalty = repetition.data(),
        .presence_penalty = presence.data(),
        .frequency_penalty = frequency.data(),
        .seeds = seeds.data(),
        .tokens = tokens.data(),
        .positions = positions,
        .slots = slots.data(),
        .prompt_lengths = prompt_lengths.data(),
        .lengths = lengths.data(),
        .bias_start = bias_start.data(),
        .bias_ids = bias_ids.data(),
        .bias_values = bias_values.data(),
        .top_logprobs = top_logprobs.data(),
        .mask_of = mask_of.size() == 0 ? nullptr : mask_of.data(),
        .masks = masks.data(),
        .mask_words = mask_words,
        .token_ids = token_ids.data(),
        .logprobs = reports ? logprobs.data() : nullptr,
        .top_ids = top_ids.data(),
        .top_values = top_values.data(),
        .top = top,
    };
  }

 private:
  template <class T>
  static Buffer<T> fill(std::size_t count, T value) {
    Buffer<T> buffer(count);
    std::fill(buffer.begin(), buffer.end(), value);
    return buffer;
  }
};

struct Tally {
  std::int64_t rows = 0, uncertain = 0;
};

void check_batch(Context& context, Batch& batch, Tally& tally) {
  const Sampling args = batch.arguments();
  {
    const Call call(context);
    ROPEWAY_TABLE(sampling_kernels, context.isa()).sample(context, args);
  }
  Worst worst;
  std::int64_t wrong_ids = 0, silent = 0;
  for (std::int64_t row = 0; row < args.rows; ++row) {
    CAPTURE(row);
    CAPTURE(args.vocabulary);
    CAPTURE(args.temperature[row]);
    CAPTURE(args.top_k[row]);
    CAPTURE(args.top_p[row]);
    CAPTURE(args.min_p[row]);
    const SampledRow want = sample_row(args, row);
    const std::int64_t chosen = args.token_ids[row];
    ++tally.rows;
    REQUIRE((chosen >= 0 && chosen < args.vocabulary));
    const std::vector<float> values = penalized_logits(args, row);
    if (want.certain) {
      CHECK(chosen == want.token);
    } else {
      ++tally.uncertain;
      CHECK(values[static_cast<std::size_t>(chosen)] > -infinity);
    }
    if (args.logprobs == nullptr) continue;
    if (args.top_logprobs[row] < 0) {
      silent += std::isnan(args.logprobs[row]) ? 0 : 1;
      for (std::int64_t i = row * args.top; i < (row + 1) * args.top; ++i) {
        silent += args.top_ids[i] != -1 || !std::isnan(args.top_values[i]);
      }
      continue;
    }
    const auto see = [&](std::int64_t at, float got, double expected) {
      if (expected < -static_cast<double>(largest)) expected = -INFINITY;  // no float32
      worst.see(at, static_cast<double>(got), expected, 2e-5 + 1e-6 * std::abs(expected));
    };
    if (chosen == want.token) see(row, args.logprobs[row], want.logprob);
    for (std::int64_t i = 0; i < args.top; ++i) {
      wrong_ids += args.top_ids[row * args.top + i] != want.top_ids[static_cast<std::size_t>(i)];
      see(row * args.top + i, args.top_values[row * args.top + i], want.top_logprobs[static_cast<std::size_t>(i)]);
    }
  }
  CHECK(wrong_ids == 0);
  CHECK(silent == 0);
  CHECK_WORST(worst);
}

void add_biases(Batch& batch, const std::vector<float>& choices, Random& random) {
  std::vector<std::int32_t> ids;
  std::vector<float> values;
  for (std::int64_t row = 0; row < batch.rows(); ++row) {
    for (std::int64_t i = random.integer(0, 6); i > 0; --i) {
      ids.push_back(static_cast<std::int32_t>(random.integer(-1, batch.vocabulary)));
      values.push_back(random.pick(choices));
    }
    batch.bias_start[static_cast<std::size_t>(row) + 1] = static_cast<std::int32_t>(ids.size());
  }
  batch.bias_ids = Buffer<std::int32_t>(ids);
  batch.bias_values = Buffer<float>(values);
}

// Some rows get a mask: of few tokens, of most, of none; perhaps shorter than the vocabulary.
void add_masks(Batch& batch, Random& random) {
  const std::int64_t whole = (batch.vocabulary + 31) / 32, count = random.integer(1, 4);
  batch.mask_words = random.chance(0.2) ? random.integer(1, whole) : whole;
  batch.mask_of = Buffer<std::int32_t>(static_cast<std::size_t>(batch.rows()));
  for (std::int32_t& mask : batch.mask_of) mask = up_to(count - 1, random, -1);
  batch.masks = Buffer<std::uint32_t>(static_cast<std::size_t>(count * batch.mask_words));
  const double share = random.pick<double>({0.0, 0.02, 0.5, 0.98, 1.0});
  for (std::uint32_t& word : batch.masks) {
    word = 0;
    for (int bit = 0; bit < 32; ++bit) word |= static_cast<std::uint32_t>(random.chance(share)) << bit;
  }
}

std::int64_t random_vocabulary(std::uint64_t seed, Random& random) {
  if (seed % 25 == 24) return random.integer(2000, 40000);
  return random.integer(1, 3 + 4 * static_cast<std::int64_t>(seed));
}

TEST_CASE("the reference's random numbers are those of Philox4x32-10") {
  CHECK(philox_uniform(0, 0) == 0x6627E8 * 0x1p-24);
  CHECK(philox_uniform(0xFFFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF) >= 0.0);
}

TEST_CASE("sampled tokens and log-probabilities are those of double precision") {
  for (const Isa isa : isas()) {
    CAPTURE(name(isa));
    Tally tally;
    for_seeds(250, [&](std::uint64_t seed) {
      Random random(seed);
      Batch batch(random.integer(0, 9), random_vocabulary(seed, random), random);
      for (std::size_t row = 0; row < batch.temperature.size(); ++row) {
        batch.temperature[row] = random.chance(0.2) ? 0.0F : static_cast<float>(0.2 + 1.5 * random.uniform());
        if (random.chance(0.4)) batch.top_k[row] = static_cast<std::int32_t>(random.integer(1, batch.vocabulary + 2));
        if (random.chance(0.4)) batch.top_p[row] = static_cast<float>(random.uniform());
        if (random.chance(0.3)) batch.min_p[row] = static_cast<float>(random.uniform() * random.uniform());
        if (random.chance(0.3)) batch.repetition[row] = static_cast<float>(0.5 + random.uniform());
        if (random.chance(0.3)) batch.presence[row] = random.normal();
        if (random.chance(0.3)) batch.frequency[row] = random.normal();
        if (random.chance(0.4)) batch.top_logprobs[row] = up_to(std::min<std::int64_t>(batch.vocabulary, 20), random);
      }
      if (random.chance(0.5)) add_biases(batch, {-infinity, -1.0F, 0.5F, 4.0F, 100.0F}, random);
      if (batch.rows() > 0 && random.chance(0.4)) add_masks(batch, random);
      check_batch(context(isa, static_cast<int>(random.integer(1, 4))), batch, tally);
    });
    CHECK(tally.uncertain * 10 <= tally.rows);  // or little would be compared
  }
}

TEST_CASE("sampling keeps its rules at the ends of every parameter") {
  for (const Isa isa : isas()) {
    CAPTURE(name(isa));
    Tally tally;
    for_seeds(250, [&](std::uint64_t seed) {
      Random random(seed);
      Batch batch(random.integer(1, 9), random_vocabulary(seed, random), random);
      for (std::int64_t r = 0; r < batch.rows(); ++r) {
        const auto row = static_cast<std::size_t>(r);
        batch.temperature[row] = random.pick<float>({0.0F, -1.0F, NAN, 1e-45F, 1e-38F, 1e-6F, 1.0F, 1e6F, 3e38F});
        const auto all = static_cast<std::int32_t>(batch.vocabulary);
        batch.top_k[row] = random.pick<std::int32_t>({0, 1, 2, INT32_MAX, -1, all});
        batch.top_p[row] = random.pick<float>({0.0F, 1e-45F, 1e-7F, 0.5F, 0x1.fffffep-1F, 1.0F, 2.0F});
        batch.min_p[row] = random.pick<float>({0.0F, 1e-45F, 1e-7F, 0x1.fffffep-1F, 1.0F, 2.0F});
        batch.repetition[row] = random.pick<float>({1.0F, 1.0F, 1e-38F, 1e38F, 2.0F});
        batch.presence[row] = random.pick<float>({0.0F, 0.0F, 1e38F, -1e38F, 2.0F});
        batch.frequency[row] = random.pick<float>({0.0F, 0.0F, largest, -largest, 2.0F});
        batch.top_logprobs[row] = random.pick<std::int32_t>({-1, 0, 1, std::min(all, 300)});
        const std::vector<float> odd = {infinity, -infinity, NAN, largest, -largest, 0.0F, 1e-45F};
        const double share = random.pick<double>({0.0, 0.1, 1.0});
        const bool alike = random.chance(0.2);
        const float one = random.pick(odd);
        for (std::int64_t id = 0; id < batch.vocabulary; ++id) {
          if (alike || random.chance(share)) batch.logit(r, id) = alike ? one : random.pick(odd);
        }
      }
      add_biases(batch, {-infinity, infinity, NAN, largest, -largest, 0.0F}, random);
      if (random.chance(0.5)) add_masks(batch, random);
      check_batch(context(isa, static_cast<int>(random.integer(1, 4))), batch, tally);
    });
  }
}

TEST_CASE("ties go to the lowest ids, in top-k and top-p as in greedy choice") {
  for (const Isa isa : isas()) {
    CAPTURE(name(isa));
    Tally tally;
    for_seeds(100, [&](std::uint64_t seed) {
      Random random(seed);
      Batch batch(random.integer(1, 5), random_vocabulary(seed, random), random);
      for (std::int64_t r = 0; r < batch.rows(); ++r) {
        const auto row = static_cast<std::size_t>(r);
        for (std::int64_t id = 0; id < batch.vocabulary; ++id) {
          batch.logit(r, id) = static_cast<float>(up_to(3, random));
        }
        batch.temperature[row] = random.chance(0.3) ? 0.0F : 1.0F;
        if (random.chance(0.5)) batch.top_k[row] = static_cast<std::int32_t>(random.integer(1, batch.vocabulary));
        if (random.chance(0.5)) batch.top_p[row] = static_cast<float>(random.uniform());
        batch.top_logprobs[row] = up_to(std::min<std::int64_t>(batch.vocabulary, 1500), random);
      }
      check_batch(context(isa, static_cast<int>(random.integer(1, 4))), batch, tally);
    });
  }
}

}  // namespace
}  // namespace ropeway::tests
