#include "sampling_reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>

namespace ropeway::tests {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

float clean(float x) { return std::isnan(x) ? -infinity : std::min(x, std::numeric_limits<float>::max()); }

bool allowed(const Sampling& args, std::int64_t row, std::int64_t id) {
  if (args.mask_of == nullptr || args.mask_of[row] < 0) return true;
  if (id / 32 >= args.mask_words) return false;
  return (args.masks[args.mask_of[row] * args.mask_words + id / 32] >> (id % 32) & 1) != 0;
}

struct Weighted {
  std::int64_t id;
  double weight, error;  // relative to the likeliest; what float32 may have made of it
};

}  // namespace

double philox_uniform(std::uint64_t seed, std::uint64_t counter) {
  std::uint32_t c[4] = {static_cast<std::uint32_t>(counter), static_cast<std::uint32_t>(counter >> 32), 0, 0};
  std::uint32_t key[2] = {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53} * c[0], b = std::uint64_t{0xCD9E8D57} * c[2];
    const std::uint32_t next[4] = {static_cast<std::uint32_t>(b >> 32) ^ c[1] ^ key[0], static_cast<std::uint32_t>(b),
                                   static_cast<std::uint32_t>(a >> 32) ^ c[3] ^ key[1], static_cast<std::uint32_t>(a)};
    std::copy_n(next, 4, c);
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return static_cast<double>(c[0] >> 8) * 0x1p-24;
}

std::vector<float> penalized_logits(const Sampling& args, std::int64_t row) {
  std::vector<float> values;
  for (std::int64_t id = 0; id < args.vocabulary; ++id) values.push_back(clean(args.logits[row * args.stride + id]));
  const float repetition = args.repetition_penalty[row], presence = args.presence_penalty[row],
              frequency = args.frequency_penalty[row];
  if (repetition != 1.0F || presence != 0.0F || frequency != 0.0F) {
    std::map<std::int32_t, int> counts;  // in the output, of every token of the history
    for (std::int64_t i = 0; i < std::min<std::int64_t>(args.lengths[row], args.positions); ++i) {
      const std::int32_t token = args.tokens[args.slots[row] * args.positions + i];
      if (token >= 0 && token < args.vocabulary) counts[token] += i >= args.prompt_lengths[row];
    }
    for (const auto& [token, count] : counts) {
      float& value = values[static_cast<std::size_t>(token)];
      value = value > 0.0F ? value / repetition : value * repetition;
      if (count > 0) value -= presence + frequency * static_cast<float>(count);
      value = clean(value);
    }
  }
  for (std::int64_t i = args.bias_start[row]; i < args.bias_start[row + 1]; ++i) {
    const std::int32_t token = args.bias_ids[i];
    if (token < 0 || token >= args.vocabulary) continue;
    float& value = values[static_cast<std::size_t>(token)];
    value = clean(value + args.bias_values[i]);
  }
  for (std::int64_t id = 0; id < args.vocabulary; ++id) {
    if (!allowed(args, row, id)) values[static_cast<std::size_t>(id)] = -infinity;
  }
  return values;
}

SampledRow sample_row(const Sampling& args, std::int64_t row) {
  const std::vector<float> values = penalized_logits(args, row);
  const auto value = [&](std::int64_t id) { return values[static_cast<std::size_t>(id)]; };
  std::vector<std::int64_t> ranked(values.size());
  std::iota(ranked.begin(), ranked.end(), 0);
  std::stable_sort(ranked.begin(), ranked.end(), [&](std::int64_t a, std::int64_t b) { return value(a) > value(b); });
  const double peak = static_cast<double>(value(ranked[0]));

  SampledRow result = {ranked[0], true, 0.0, {}, {}};
  if (peak == -INFINITY) {  // nothing is left: what the mask allows at all
    for (std::int64_t id = args.vocabulary - 1; id >= 0; --id)
      if (allowed(args, row, id)) result.token = id;
  }
  double mass = 0.0;
  for (const float v : values) mass += std::isinf(peak) ? 0.0 : std::exp(static_cast<double>(v) - peak);
  const auto logprob = [&](std::int64_t id) {
    return value(id) == -infinity ? -INFINITY : static_cast<double>(value(id)) - peak - std::log(mass);
  };
  for (std::int64_t i = 0; i < args.top; ++i) {
    result.top_ids.push_back(static_cast<std::int32_t>(ranked[static_cast<std::size_t>(i)]));
    result.top_logprobs.push_back(logprob(ranked[static_cast<std::size_t>(i)]));
  }

  const float temperature = args.temperature[row];
  if (temperature > 0.0F && !std::isinf(peak)) {
    std::vector<Weighted> kept;
    const std::int64_t k = args.top_k[row] > 0 ? args.top_k[row] : args.vocabulary;
    const double sharpness = std::min(1.0 / static_cast<double>(temperature), 0x1.fffffep127);
    for (const std::int64_t id : ranked) {
      if (static_cast<std::int64_t>(kept.size()) == k || value(id) == -infinity) break;
      const double below = static_cast<double>(value(id)) - peak;
      if (below < -static_cast<double>(std::numeric_limits<float>::max())) break;  // no float32: as good as -infinity
      const double x = below * sharpness, weight = std::exp(x);
      // The kernel's e^x is 0 from about -104 on.
      kept.push_back({id, weight, 3e-7 * weight * (std::abs(x) + 2.0) + 1e-44});
    }
    const auto sum = [&](std::size_t count, double Weighted::* what) {
      double total = 0.0;
      for (std::size_t i = 0; i < count; ++i) total += kept[i].*what;
      return total;
    };
    if (const double top_p = static_cast<double>(args.top_p[row]); top_p < 1.0) {
      const double total = sum(kept.size(), &Weighted::weight), target = top_p * total;
      const double allowed = sum(kept.size(), &Weighted::error) + 1e-6 * total;
      std::size_t count = 0;
      double reached = 0.0;
      while (count < kept.size() && (count == 0 || reached < target)) {
        if (count > 0 && target - reached < allowed) result.certain = false;
        reached += kept[count++].weight;
      }
      if (count < kept.size() && reached - target < allowed) result.certain = false;
      kept.resize(count);
    }
    if (const double min_p = std::min(static_cast<double>(args.min_p[row]), 1.0); min_p > 0.0) {
      for (const Weighted& token : kept) {
        if (token.weight < 1.0 && std::abs(token.weight - min_p) <= token.error) result.certain = false;
      }
      std::erase_if(kept, [&](const Weighted& token) { return token.weight < min_p && token.weight < 1.0; });
    }
    const double total = sum(kept.size(), &Weighted::weight);
    const double allowed = sum(kept.size(), &Weighted::error) + 1e-6 * total;
    std::sort(kept.begin(), kept.end(), [](const Weighted& a, const Weighted& b) { return a.id < b.id; });
    const double target = total * philox_uniform(static_cast<std::uint64_t>(args.seeds[row]),
                                                 static_cast<std::uint64_t>(args.lengths[row]));
    double passed = 0.0;
    for (const Weighted& token : kept) {
      if (std::abs(passed - target) < allowed && passed > 0.0) result.certain = false;
      if (passed > target) break;
      if (token.weight > 0.0) result.token = token.id;
      passed += token.weight;
    }
    if (passed - target < allowed) result.certain = false;
    if (kept.size() == 1) result.token = kept[0].id;
  }
  result.logprob = logprob(result.token);
  return result;
}

}  // namespace ropeway::tests
