// Sampling, a tile per row. The vocabulary is walked with sixteen lanes; nothing ever sorts it. Top-k keeps a short
// list of candidates above a rising threshold; top-p closes in on the probability where the sum is reached.
//
// A NaN counts as -infinity, +infinity as the largest float. If nothing but -infinity is left, token 0 is chosen,
// with a log-probability of -infinity.
#include "kernels/sampling.h"

#include <cstring>

#include "kernels/parallel.h"
#include "kernels/sampling_row.h"
#include "kernels/simd_math.h"

namespace ropeway::ROPEWAY_ISA {
namespace {

constexpr float kLargest = 0x1.fffffep+127F;
constexpr std::int64_t kFewCandidates = 1024;  // cheap to look at one by one
constexpr int kClosings = 16;

inline f32x16 clean(f32x16 x) { return min(max(x, set_f32(-kInfinity)), set_f32(kLargest)); }

class Row {
 public:
  Row(const Sampling& args, std::int64_t row, const Scratch& scratch)
      : args_(args),
        row_(row),
        scratch_(scratch),
        size_(args.vocabulary),
        padded_(round_up(size_, 16)),
        logits_(args.logits + row * args.stride),
        mask_(args.mask_of == nullptr || args.mask_of[row] < 0 ? nullptr
                                                               : args.masks + args.mask_of[row] * args.mask_words) {}

  void sample() {
    const float temperature = args_.temperature[row_];
    const bool greedy = !(temperature > 0.0F);
    const bool reports = args_.logprobs != nullptr && args_.top_logprobs[row_] >= 0;
    const bool penalized = args_.repetition_penalty[row_] != 1.0F || args_.presence_penalty[row_] != 0.0F ||
                           args_.frequency_penalty[row_] != 0.0F;
    if (greedy && !reports && !penalized && mask_ == nullptr && args_.bias_start[row_] == args_.bias_start[row_ + 1]) {
      args_.token_ids[row_] = best_logit();
      if (args_.logprobs != nullptr) report_nothing();
      return;
    }
    copy_logits();
    if (penalized) penalize();
    add_biases();
    if (mask_ != nullptr) mask_out();
    peak_ = largest_value();
    std::int64_t chosen = mask_ != nullptr ? first_allowed() : 0;
    if (peak_ > -kInfinity) chosen = greedy ? first_with(peak_) : draw(temperature);
    args_.token_ids[row_] = static_cast<std::int32_t>(chosen);
    if (args_.logprobs == nullptr) return;
    reports ? report(chosen) : report_nothing();
  }

 private:
  // ---------------------------------------------------------------- logits

  std::int32_t best_logit() const {
    f32x16 peaks = set_f32(-kInfinity);
    std::int64_t i = 0;
    for (; i + 16 <= size_; i += 16) peaks = max(clean(load_f32(logits_ + i)), peaks);
    float peak = lane_max(peaks);
    for (; i < size_; ++i) peak = clean_one(logits_[i]) > peak ? clean_one(logits_[i]) : peak;
    if (peak == -kInfinity) return 0;
    for (i = 0; i + 16 <= size_; i += 16) {
      const unsigned hits = equal_mask(clean(load_f32(logits_ + i)), set_f32(peak));
      if (hits != 0) return static_cast<std::int32_t>(i + __builtin_ctz(hits));
    }
    while (clean_one(logits_[i]) != peak) ++i;
    return static_cast<std::int32_t>(i);
  }

  static float clean_one(float x) { return x > kLargest ? kLargest : x == x ? x : -kInfinity; }

  void copy_logits() {
    std::int64_t i = 0;
    for (; i + 16 <= size_; i += 16) store_f32(scratch_.values + i, clean(load_f32(logits_ + i)));
    for (; i < size_; ++i) scratch_.values[i] = clean_one(logits_[i]);
    for (; i < padded_; ++i) scratch_.values[i] = -kInfinity;
  }

  // Repetition: every token of prompt and output, once. Presence and frequency: those of the output.
  void penalize() {
    const float repetition = args_.repetition_penalty[row_];
    const float presence = args_.presence_penalty[row_], frequency = args_.frequency_penalty[row_];
    const std::int32_t* history = args_.tokens + args_.slots[row_] * args_.positions;
    const std::int64_t length = args_.lengths[row_] < args_.positions ? args_.lengths[row_] : args_.positions;
    const std::int64_t prompt = args_.prompt_lengths[row_];
    const auto known = [&](std::int32_t token) { return token >= 0 && token < size_; };
    std::int32_t* counts = scratch_.counts;
    for (std::int64_t i = 0; i < length; ++i)
      if (known(history[i])) counts[history[i]] = 0;
    for (std::int64_t i = prompt; i < length; ++i)
      if (known(history[i])) ++counts[history[i]];
    for (std::int64_t i = 0; i < length; ++i) {
      const std::int32_t token = history[i];
      if (!known(token) || counts[token] < 0) continue;
      float value = scratch_.values[token];
      value = value > 0.0F ? value / repetition : value * repetition;
      if (counts[token] > 0) value -= presence + frequency * static_cast<float>(counts[token]);
      scratch_.values[token] = clean_one(value);
      counts[token] = -1;  // done
    }
  }

  void add_biases() {
    for (std::int64_t i = args_.bias_start[row_]; i < args_.bias_start[row_ + 1]; ++i) {
      const std::int32_t token = args_.bias_ids[i];
      if (token < 0 || token >= size_) continue;
      scratch_.values[token] = clean_one(scratch_.values[token] + args_.bias_values[i]);
    }
  }

  // The mask's bits of tokens [32 * word, 32 * word + 32).
  std::uint32_t allowed(std::int64_t word) const { return word < args_.mask_words ? mask_[word] : 0; }

  void mask_out() {
    for (std::int64_t word = 0; word * 32 < size_; ++word) {
      const std::uint32_t bits = allowed(word);
      if (bits == ~std::uint32_t{0}) continue;
      float* values = scratch_.values + word * 32;
      const std::int64_t lanes = size_ - word * 32 < 32 ? size_ - word * 32 : 32;
      for (std::int64_t i = 0; i < lanes; ++i)
        if ((bits >> i & 1) == 0) values[i] = -kInfinity;
    }
  }

  std::int64_t first_allowed() const {
    for (std::int64_t word = 0; word * 32 < size_; ++word) {
      if (allowed(word) == 0) continue;
      const std::int64_t id = word * 32 + __builtin_ctz(allowed(word));
      return id < size_ ? id : 0;
    }
    return 0;
  }

  float largest_value() const {
    f32x16 peaks = set_f32(-kInfinity);
    for (std::int64_t i = 0; i < padded_; i += 16) peaks = max(load_f32(scratch_.values + i), peaks);
    return lane_max(peaks);
  }

  std::int64_t first_with(float value) const {
    for (std::int64_t i = 0;; i += 16) {
      const unsigned hits = equal_mask(load_f32(scratch_.values + i), set_f32(value));
      if (hits != 0) return i + __builtin_ctz(hits);
    }
  }

  // ---------------------------------------------------------------- weights

  f32x16 weights_of(f32x16 values, float sharpness) const {
    return exp_f32(mul(subtract(values, set_f32(peak_)), set_f32(sharpness)));
  }

  // Fills weights and their sums per block; returns the sum of all.
  double weigh_all(float sharpness) {
    for (std::int64_t i = 0; i < padded_; i += 16)
      store_f32(scratch_.weights + i, weights_of(load_f32(scratch_.values + i), sharpness));
    return sum_blocks(scratch_.weights);
  }

  double sum_blocks(const float* weights) {
    double total = 0.0;
    for (std::int64_t start = 0; start < padded_; start += kBlock) {
      const std::int64_t stop = start + kBlock < padded_ ? start + kBlock : padded_;
      f32x16 even = zero_f32(), odd = zero_f32();
      std::int64_t i = start;
      for (; i + 32 <= stop; i += 32) {
        even = add(even, load_f32(weights + i));
        odd = add(odd, load_f32(weights + i + 16));
      }
      if (i < stop) even = add(even, load_f32(weights + i));
      scratch_.sums[start / kBlock] = static_cast<double>(lane_sum(add(even, odd)));
      total += scratch_.sums[start / kBlock];
    }
    return total;
  }

  void weigh_candidates(std::int64_t count, float sharpness) {
    for (std::int64_t i = 0; i < count; i += 16) {
      const std::int64_t lanes = i + 16 < count ? 16 : count - i;
      float values[16] = {};
      for (std::int64_t j = 0; j < lanes; ++j) values[j] = scratch_.candidates[i + j].value;
      store_f32(values, weights_of(load_f32(values), sharpness));
      for (std::int64_t j = 0; j < lanes; ++j) scratch_.weights[scratch_.candidates[i + j].id] = values[j];
    }
  }

  double candidate_weight(std::int64_t i) const {
    return static_cast<double>(scratch_.weights[scratch_.candidates[i].id]);
  }

  // ---------------------------------------------------------------- candidates

  // The k best (fewer, if fewer are above -infinity); of equal ones those with lower ids. In no order.
  std::int64_t select_top(std::int64_t k) {
    Candidate* candidates = scratch_.candidates;
    const std::int64_t room = 4 * k + 1024 < padded_ ? 4 * k + 1024 : padded_;
    float threshold = -kInfinity;
    std::int64_t count = 0;
    for (std::int64_t i = 0; i < padded_; i += 16) {
      for (unsigned above = greater_mask(load_f32(scratch_.values + i), set_f32(threshold)); above != 0;
           above &= above - 1) {
        const std::int64_t id = i + __builtin_ctz(above);
        candidates[count++] = {scratch_.values[id], static_cast<std::int32_t>(id)};
      }
      if (count <= room || count <= k) continue;
      select_candidates(candidates, count, k);
      count = k;
      threshold = candidates[0].value;
      for (std::int64_t j = 1; j < k; ++j)
        if (candidates[j].value < threshold) threshold = candidates[j].value;
    }
    if (count <= k) return count;
    select_candidates(candidates, count, k);
    return k;
  }

  struct Share {
    double mass;
    std::int64_t count;
  };

  // Of all weights of at least `threshold` (> 0): their sum and their number.
  Share share_from(float threshold) const {
    Share share = {0.0, 0};
    for (std::int64_t start = 0; start < padded_; start += kBlock) {
      const std::int64_t stop = start + kBlock < padded_ ? start + kBlock : padded_;
      f32x16 sum = zero_f32();
      for (std::int64_t i = start; i < stop; i += 16) {
        const f32x16 weights = load_f32(scratch_.weights + i);
        sum = add(sum, zero_where_less(weights, weights, set_f32(threshold)));
        share.count += 16 - __builtin_popcount(greater_mask(set_f32(threshold), weights));
      }
      share.mass += static_cast<double>(lane_sum(sum));
    }
    return share;
  }

  // Candidates are all with a weight in [low, high), in id order.
  std::int64_t collect(float low, float high) {
    std::int64_t count = 0;
    for (std::int64_t i = 0; i < padded_; i += 16) {
      const f32x16 weights = load_f32(scratch_.weights + i);
      for (unsigned inside = greater_mask(set_f32(high), weights) & ~greater_mask(set_f32(low), weights); inside != 0;
           inside &= inside - 1) {
        const std::int64_t id = i + __builtin_ctz(inside);
        scratch_.candidates[count++] = {scratch_.values[id], static_cast<std::int32_t>(id)};
      }
    }
    return count;
  }

  void keep_from(float threshold) {
    for (std::int64_t i = 0; i < padded_; i += 16) {
      const f32x16 weights = load_f32(scratch_.weights + i);
      store_f32(scratch_.kept + i, zero_where_less(weights, weights, set_f32(threshold)));
    }
  }

  void keep_candidates(std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int32_t id = scratch_.candidates[i].id;
      scratch_.kept[id] = scratch_.weights[id];
    }
  }

  // Keeps the likeliest tokens whose weights sum up to `target`, but none below min_p. Two thresholds close in on the
  // weight where the target is met, until the tokens between them are few enough to be looked at one by one.
  void keep_likely(double target, float min_p) {
    // Weights go down to the smallest float, so a target of nothing is the likeliest token.
    if (!(target > 0x1p-149)) target = 0x1p-149;
    constexpr float thresholds[] = {0x1p-6F, 0x1p-12F, 0x1p-20F, 0x1p-149F};
    float high = 2.0F, low = 2.0F;  // above all weights
    Share above = {0.0, 0}, from_low = {0.0, 0};
    for (const float threshold : thresholds) {
      high = low;
      above = from_low;
      low = threshold > min_p ? threshold : min_p;
      from_low = share_from(low);
      if (from_low.mass >= target || low == min_p) break;
    }
    if (from_low.mass < target) return keep_from(low);
    for (int i = 0; i < kClosings && from_low.count - above.count > kFewCandidates; ++i) {
      const float middle = __builtin_sqrtf(low) * __builtin_sqrtf(high);
      if (!(low < middle && middle < high)) break;
      const Share from_middle = share_from(middle);
      if (from_middle.mass >= target) {
        low = middle;
        from_low = from_middle;
      } else {
        high = middle;
        above = from_middle;
      }
    }
    const std::int64_t count =
        select_mass(scratch_.candidates, collect(low, high), scratch_.weights, target - above.mass);
    keep_from(high);
    keep_candidates(count);
  }

  // ---------------------------------------------------------------- drawing

  std::int64_t draw(float temperature) {
    const float inverse = 1.0F / temperature;
    const float sharpness = inverse < kLargest ? inverse : kLargest;
    const float top_p = args_.top_p[row_];
    const float min_p = args_.min_p[row_] < 1.0F ? args_.min_p[row_] : 1.0F;
    if (args_.top_k[row_] > 0 && args_.top_k[row_] < size_) return draw_top(args_.top_k[row_], sharpness, top_p, min_p);
    const double total = weigh_all(sharpness);
    if (top_p < 1.0F) {
      keep_likely(static_cast<double>(top_p) * total, min_p);
    } else if (min_p > 0.0F) {
      keep_from(min_p);
    } else {
      return draw_from(scratch_.weights, total);
    }
    return draw_from(scratch_.kept, sum_blocks(scratch_.kept));
  }

  std::int64_t draw_top(std::int64_t k, float sharpness, float top_p, float min_p) {
    std::int64_t count = select_top(k);
    weigh_candidates(count, sharpness);
    if (top_p < 1.0F) {
      double total = 0.0;
      for (std::int64_t i = 0; i < count; ++i) total += candidate_weight(i);
      count = select_mass(scratch_.candidates, count, scratch_.weights, static_cast<double>(top_p) * total);
    }
    if (min_p > 0.0F) count = drop_below(min_p, count);
    if (count <= kFewCandidates) return draw_from_few(count);
    std::memset(scratch_.kept, 0, sizeof(float) * static_cast<std::size_t>(padded_));
    keep_candidates(count);
    return draw_from(scratch_.kept, sum_blocks(scratch_.kept));
  }

  // The largest weight is 1, and min_p at most 1, so one is left.
  std::int64_t drop_below(float min_p, std::int64_t count) {
    std::int64_t left = 0;
    for (std::int64_t i = 0; i < count; ++i)
      if (scratch_.weights[scratch_.candidates[i].id] >= min_p) scratch_.candidates[left++] = scratch_.candidates[i];
    return left;
  }

  double uniform() const {
    return static_cast<double>(philox_uniform(static_cast<std::uint64_t>(args_.seeds[row_]),
                                              static_cast<std::uint64_t>(args_.lengths[row_])));
  }

  std::int64_t draw_from_few(std::int64_t count) {
    sort_candidates(scratch_.candidates, count, ById());
    double total = 0.0;
    for (std::int64_t i = 0; i < count; ++i) total += candidate_weight(i);
    const double target = uniform() * total;
    double passed = 0.0;
    std::int64_t chosen = 0;
    for (std::int64_t i = 0; i < count && passed <= target; ++i) {
      const double weight = candidate_weight(i);
      if (weight > 0.0) chosen = scratch_.candidates[i].id;
      passed += weight;
    }
    return chosen;
  }

  // In id order over the whole vocabulary, after `sum_blocks`. Should rounding let the target lie past the end of its
  // block, the block's last token with any weight is chosen.
  std::int64_t draw_from(const float* weights, double total) const {
    const double target = uniform() * total;
    double passed = 0.0, before = 0.0;
    std::int64_t block = 0;  // the last one with any weight among those needed to pass the target
    for (std::int64_t i = 0; i * kBlock < padded_ && passed <= target; ++i) {
      if (scratch_.sums[i] > 0.0) {
        block = i;
        before = passed;
      }
      passed += scratch_.sums[i];
    }
    passed = before;
    std::int64_t chosen = 0;
    const std::int64_t stop = (block + 1) * kBlock < size_ ? (block + 1) * kBlock : size_;
    for (std::int64_t id = block * kBlock; id < stop && passed <= target; ++id) {
      if (weights[id] > 0.0F) chosen = id;
      passed += static_cast<double>(weights[id]);
    }
    return chosen;
  }

  // ---------------------------------------------------------------- log-probabilities

  void report(std::int64_t chosen) {
    const double log_total = peak_ > -kInfinity ? __builtin_log(weigh_all(1.0F)) : 0.0;
    const auto logprob = [&](float value) {
      if (value == -kInfinity) return -kInfinity;
      return static_cast<float>(static_cast<double>(value) - static_cast<double>(peak_) - log_total);
    };
    args_.logprobs[row_] = logprob(scratch_.values[chosen]);
    if (args_.top == 0) return;
    std::int32_t* ids = args_.top_ids + row_ * args_.top;
    float* values = args_.top_values + row_ * args_.top;
    std::int64_t count = select_top(args_.top);
    sort_candidates(scratch_.candidates, count, ByRank());
    for (std::int64_t i = 0; i < count; ++i) {
      ids[i] = scratch_.candidates[i].id;
      values[i] = logprob(scratch_.candidates[i].value);
    }
    // Fewer tokens than asked for are possible at all: the impossible ones follow, in id order.
    for (std::int64_t id = 0; count < args_.top; ++id) {
      if (scratch_.values[id] != -kInfinity) continue;
      ids[count] = static_cast<std::int32_t>(id);
      values[count++] = -kInfinity;
    }
  }

  void report_nothing() {
    args_.logprobs[row_] = __builtin_nanf("");
    for (std::int64_t i = row_ * args_.top; i < (row_ + 1) * args_.top; ++i) {
      args_.top_ids[i] = -1;
      args_.top_values[i] = __builtin_nanf("");
    }
  }

  const Sampling& args_;
  const std::int64_t row_;
  const Scratch& scratch_;
  const std::int64_t size_, padded_;
  const float* const logits_;
  const std::uint32_t* const mask_;  // null: everything is allowed
  float peak_ = -kInfinity;
};

void sample(Context& context, const Sampling& args) {
  const std::int64_t padded = round_up(args.vocabulary, 16);
  const std::size_t bytes = (Scratch::bytes(padded) + 63) / 64 * 64;
  std::byte* memory = context.scratch(bytes * static_cast<std::size_t>(context.threads()));
  parallel(context, args.rows, [&](std::int64_t row, int worker) {
    const Scratch scratch(memory + static_cast<std::size_t>(worker) * bytes, padded);
    Row(args, row, scratch).sample();
  });
}

}  // namespace

const SamplingKernels sampling_kernels = {.sample = &sample};

}  // namespace ropeway::ROPEWAY_ISA
