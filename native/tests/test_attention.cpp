// Attention over the paged cache, from the plan to the result: random sequences in random blocks, in random steps,
// against exact math; and bit against bit, however the steps are cut.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "machine.h"
#include "numbers.h"
#include "paged_cache.h"

namespace ropeway::tests {
namespace {

const AttentionKernels& kernels(const Context& context) { return ROPEWAY_TABLE(attention_kernels, context.isa()); }

// Sequences of one shape, and a cache in which every value that nobody has written is a NaN.
class World {
 public:
  World(const CacheShape& shape, std::vector<Sequence> sequences, Random& random)
      : shape_(shape), sequences_(std::move(sequences)), done_(sequences_.size(), 0), outputs_(sequences_.size()) {
    const std::int64_t size = shape.block_size;
    std::int64_t wanted = random.integer(0, 3);
    for (const Sequence& sequence : sequences_) wanted += (sequence.length + size - 1) / size - sequence.shared / size;
    num_blocks_ = std::max<std::int64_t>(wanted, 1);
    std::vector<std::int32_t> places(static_cast<std::size_t>(num_blocks_));
    for (std::size_t i = 0; i < places.size(); ++i) places[i] = static_cast<std::int32_t>(i);
    random.shuffle(places);
    for (std::size_t i = 0; i < sequences_.size(); ++i) {
      const Sequence& sequence = sequences_[i];
      outputs_[i].resize(sequence.q.size(), NAN);
      std::vector<std::int32_t>& blocks = blocks_.emplace_back();
      if (sequence.shared > 0) blocks.assign(blocks_[0].begin(), blocks_[0].begin() + sequence.shared / size);
      while (static_cast<std::int64_t>(blocks.size()) * size < sequence.length) {
        blocks.push_back(places.back());
        places.pop_back();
      }
    }
    cache_ = Buffer<std::byte>(static_cast<std::size_t>(num_blocks_ * storage().block_bytes), 64);
    if (shape.type == KVType::int4_full)
      begun_ = std::make_unique<BegunKeys>(shape.layers, shape.kv_heads, shape.head_dim);
  }

  bool finished() const {
    for (std::size_t i = 0; i < sequences_.size(); ++i)
      if (done_[i] < sequences_[i].length) return false;
    return true;
  }

  // Some of the sequences go on by some tokens, at most `most` each.
  void step(Context& context, std::int64_t layer, float scale, std::int64_t most, Random& random) {
    std::vector<StepRow> rows;
    std::vector<std::size_t> owners;
    std::vector<std::int32_t> slots;
    for (std::size_t i = 0; i < sequences_.size(); ++i) {
      const Sequence& sequence = sequences_[i];
      const bool waits = done_[i] == 0 && done_[0] < sequence.shared;  // for the prefix
      if (done_[i] == sequence.length || waits || random.chance(0.3)) continue;
      if (done_[i] < sequence.shared) {
        done_[i] = sequence.shared;
        std::copy_n(outputs_[0].begin(), sequence.shared * shape_.heads() * shape_.head_dim, outputs_[i].begin());
        if (done_[i] == sequence.length) continue;
      }
      const std::int64_t left = sequence.length - done_[i];
      const std::int64_t some = random.chance(0.3) ? 1 : random.integer(1, std::min(left, most));
      const std::int64_t count = random.chance(0.1) ? 0 : some;
      const std::int64_t length = done_[i] + count;
      const std::int64_t used = (length + shape_.block_size - 1) / shape_.block_size;
      rows.push_back({count, length, {blocks_[i].begin(), blocks_[i].begin() + used}});
      owners.push_back(i);
      slots.push_back(static_cast<std::int32_t>(i));
      forget_old_blocks(rows.back(), random);
    }
    const Step step = make_step(rows, shape_.block_size, num_blocks_, shape_.kv_heads, random);
    AttentionStep view = step.view();
    view.begun = begun_.get();
    if (random.chance(0.5)) view.slots = slots.data();
    const AttentionPlan plan(view, context.threads());
    check_plan(plan, step);
    merges_ += plan.merges.size();

    const auto tokens = static_cast<std::int64_t>(step.positions.size());
    const std::int64_t q_size = shape_.heads() * shape_.head_dim, kv_size = shape_.kv_heads * shape_.head_dim;
    Buffer<float> q(static_cast<std::size_t>(tokens * q_size)), out(q.size());
    Buffer<float> k(static_cast<std::size_t>(tokens * kv_size)), v(k.size());
    std::int64_t token = 0;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      const Sequence& sequence = sequences_[owners[r]];
      const std::int64_t from = rows[r].length - rows[r].count;
      std::copy_n(sequence.q.data() + from * q_size, rows[r].count * q_size, q.data() + token * q_size);
      std::copy_n(sequence.k.data() + from * kv_size, rows[r].count * kv_size, k.data() + token * kv_size);
      std::copy_n(sequence.v.data() + from * kv_size, rows[r].count * kv_size, v.data() + token * kv_size);
      token += rows[r].count;
    }
    {
      const Call call(context);
      kernels(context).write_kv(context, plan.writing(storage(), layer, k.data(), v.data()));
      kernels(context).attention(context, plan.reading(storage(), layer, q.data(), out.data(), shape_.heads(), scale,
                                                       shape_.window));
    }
    token = 0;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      const std::int64_t from = rows[r].length - rows[r].count;
      std::copy_n(out.data() + token * q_size, rows[r].count * q_size, outputs_[owners[r]].data() + from * q_size);
      done_[owners[r]] = rows[r].length;
      token += rows[r].count;
    }
  }

  // At most `samples` places of every sequence, the last position among them.
  void check_exact(Context& context, std::int64_t layer, float scale, std::int64_t samples, Random& random) {
    Worst worst;
    for (std::size_t i = 0; i < sequences_.size(); ++i) {
      const Sequence stored = as_stored(context, layer, i);
      for (std::int64_t sample = 0; sample < samples; ++sample) {
        const std::int64_t position = sample == 0 ? stored.length - 1 : random.integer(0, stored.length - 1);
        const std::int64_t head = random.integer(0, shape_.heads() - 1);
        const Sequence read = as_read(stored, sequences_[i], position);
        const std::vector<double> want = exact_attention(shape_, read, position, head, scale);
        for (std::int64_t d = 0; d < shape_.head_dim; ++d) {
          const std::int64_t at = (position * shape_.heads() + head) * shape_.head_dim + d;
          const double expected = want[static_cast<std::size_t>(d)];
          // With a bf16 cache, the weights of the sum are rounded to bfloat16, too; with codes, to codes.
          const double relative[] = {1e-4, 1e-2, 1e-3, 1e-3, 1e-3}, least[] = {2e-5, 2e-2, 1e-3, 1e-3, 1e-3};
          const auto type = static_cast<std::size_t>(shape_.type);
          const double tolerance = relative[type] * std::abs(expected) + least[type];
          worst.see(at, static_cast<double>(outputs_[i][static_cast<std::size_t>(at)]), expected, tolerance);
        }
      }
    }
    CHECK_WORST(worst);
  }

  // What no token has been written to is as it was.
  void check_unwritten() const {
    if (quantised(shape_.type)) return;  // whose codes may be any byte
    std::int64_t written = 0, tokens = 0;
    const bool bf16 = shape_.type == KVType::bf16;
    const std::size_t element = bf16 ? 2 : 4;
    for (std::size_t at = 0; at < cache_.size(); at += element) {
      const auto* const value = cache_.data() + at;
      written += std::any_of(value, value + element, [](std::byte byte) { return byte != std::byte{0xFF}; });
    }
    for (const Sequence& sequence : sequences_) tokens += sequence.length - sequence.shared;
    const std::int64_t padding = bf16 ? shape_.head_dim % 2 : 0;  // keys are written in pairs of features
    CHECK(written >= tokens * shape_.kv_heads * 2 * shape_.head_dim);
    CHECK(written <= tokens * shape_.kv_heads * (2 * shape_.head_dim + padding));
  }

  const std::vector<std::vector<float>>& outputs() const { return outputs_; }
  std::size_t merges() const { return merges_; }  // results that several tasks had a part in

 private:
  KVStorage storage() {
    return make_kv_storage(cache_.data(), shape_.layers, shape_.kv_heads, shape_.head_dim, shape_.block_size,
                           shape_.type, nullptr, begun_.get());
  }

  // A sequence with the keys and values that the cache has of it; of types without codes, the given ones.
  Sequence as_stored(Context& context, std::int64_t layer, std::size_t i) {
    Sequence sequence = sequences_[i];
    if (!quantised(shape_.type)) return sequence;
    const auto count = static_cast<std::int64_t>(blocks_[i].size());
    Buffer<float> k(static_cast<std::size_t>(count * shape_.block_size * shape_.kv_heads * shape_.head_dim));
    Buffer<float> v(k.size());
    const Call call(context);
    kernels(context).read_kv(context, {storage(), layer, blocks_[i].data(), count, k.data(), v.data()});
    std::copy_n(k.begin(), sequence.k.size(), sequence.k.begin());
    std::copy_n(v.begin(), sequence.v.size(), sequence.v.begin());
    return sequence;
  }

  // What the query at a position reads: of int4_full, its own group's keys are in bfloat16.
  Sequence as_read(Sequence stored, const Sequence& given, std::int64_t position) const {
    if (shape_.type != KVType::int4_full) return stored;
    const std::int64_t size = shape_.kv_heads * shape_.head_dim, own = position / kKeyGroup * kKeyGroup * size;
    for (std::int64_t at = own; at < (position + 1) * size; ++at) {
      const auto number = static_cast<std::size_t>(at);
      stored.k[number] = from_bf16(to_bf16(given.k[number]));
    }
    return stored;
  }

  // A block that no query of the row sees may be anybody's by now: its entry names another one.
  void forget_old_blocks(StepRow& row, Random& random) const {
    if (shape_.window == 0) return;
    const std::int64_t oldest_query = row.length - row.count;
    for (std::size_t i = 0; i < row.blocks.size(); ++i) {
      const std::int64_t end = (static_cast<std::int64_t>(i) + 1) * shape_.block_size;
      if (end <= oldest_query + 1 - shape_.window && random.chance(0.5)) {
        row.blocks[i] = static_cast<std::int32_t>(random.integer(0, num_blocks_ - 1));
      }
    }
  }

  // Every token of every row is in items that cover its spans once, and every item's heads are in tasks once.
  void check_plan(const AttentionPlan& plan, const Step& step) const {
    std::vector<std::int64_t> covered(step.positions.size(), 0), heads(plan.items.size(), 0);
    std::int64_t wrong = 0;
    for (const AttentionItem& item : plan.items) {
      for (std::int32_t token = item.first_token; token < item.first_token + item.tokens; ++token) {
        wrong += step.positions[static_cast<std::size_t>(token)] != item.first_position + token - item.first_token;
        covered[static_cast<std::size_t>(token)] += item.span_end - item.span_begin;
      }
      wrong += item.tokens > plan.most_tokens;
      if (begun_ != nullptr) {
        const KeyGroup& group = plan.groups[static_cast<std::size_t>(item.group)];
        wrong += item.first_position % kKeyGroup < group.place;
        wrong += item.first_position % kKeyGroup + item.tokens > group.place + group.tokens;
      }
      wrong += item.merge >= static_cast<std::int32_t>(plan.merges.size());
    }
    for (std::size_t token = 0; token < covered.size(); ++token) {
      wrong += covered[token] < step.positions[token] / kSpan + 1;
    }
    for (const AttentionTask& task : plan.tasks) {
      heads[static_cast<std::size_t>(task.item)] += task.head_end - task.head_begin;
    }
    for (const std::int64_t count : heads) wrong += count != shape_.kv_heads;
    CHECK(wrong == 0);
  }

  CacheShape shape_;
  std::vector<Sequence> sequences_;
  std::vector<std::int64_t> done_;
  std::vector<std::vector<float>> outputs_;
  std::vector<std::vector<std::int32_t>> blocks_;
  std::int64_t num_blocks_ = 0;
  std::size_t merges_ = 0;
  Buffer<std::byte> cache_;
  std::unique_ptr<BegunKeys> begun_;
};

// Types that an instruction set has kernels for.
std::vector<KVType> types(Isa isa) {
  if (name(isa) == "neon_dotprod") return {KVType::fp32, KVType::bf16};
  return {KVType::fp32, KVType::bf16, KVType::int8, KVType::int4, KVType::int4_full};
}

CacheShape random_shape(KVType type, Random& random) {
  const std::vector<std::int64_t> sizes = {1, 5, 8, 16, 20, 32, 48, 64, 80, 128};
  const std::int64_t least_block = type == KVType::int4_full ? 5 : quantised(type) ? 4 : 0;
  return {
      .type = type,
      .layers = random.integer(1, 2),
      .kv_heads = random.integer(1, 3),
      .group = random.integer(1, 5),
      .head_dim = random.pick(sizes),
      .block_size = std::int64_t{1} << random.integer(least_block, 9),
      .window = random.chance(0.4) ? random.integer(1, 400) : 0,
  };
}

std::vector<Sequence> random_sequences(const CacheShape& shape, std::uint64_t seed, Random& random) {
  const std::int64_t most = 2 + 6 * static_cast<std::int64_t>(seed);
  std::vector<Sequence> sequences;
  for (std::int64_t i = random.integer(1, 4); i > 0; --i) {
    sequences.push_back(random_sequence(shape, random.integer(1, std::min<std::int64_t>(most, 700)), random));
    if (sequences.size() == 1 || random.chance(0.5)) continue;
    const std::int64_t common = std::min(sequences.back().length, sequences[0].length);
    const std::int64_t shared = random.integer(0, common / shape.block_size) * shape.block_size;
    share_prefix(shape, sequences.back(), sequences[0], shared);
  }
  return sequences;
}

// Returns the layer that was computed.
std::int64_t finish(World& world, Isa isa, const CacheShape& shape, float scale, std::int64_t most, Random& random) {
  const std::int64_t layer = random.integer(0, shape.layers - 1);
  while (!world.finished()) {
    world.step(context(isa, static_cast<int>(random.integer(1, 4))), layer, scale, most, random);
  }
  return layer;
}

TEST_CASE("attention agrees with exact math in any steps, and a query's bits depend on none of them") {
  for (const Isa isa : isas()) {
    CAPTURE(name(isa));
    const std::vector<KVType> known = types(isa);
    for_seeds(120, [&](std::uint64_t seed) {
      Random random(seed);
      const CacheShape shape = random_shape(known[seed % known.size()], random);
      CAPTURE(static_cast<int>(shape.type));
      CAPTURE(shape.kv_heads);
      CAPTURE(shape.group);
      CAPTURE(shape.head_dim);
      CAPTURE(shape.block_size);
      CAPTURE(shape.window);
      const float scale = 1.0F / std::sqrt(static_cast<float>(shape.head_dim));
      const std::vector<Sequence> sequences = random_sequences(shape, seed, random);
      World chunked(shape, sequences, random);
      const std::int64_t layer = finish(chunked, isa, shape, scale, random.integer(1, 100), random);
      chunked.check_exact(context(isa, 1), layer, scale, 4, random);
      chunked.check_unwritten();
      World whole(shape, sequences, random);
      finish(whole, isa, shape, scale, 1000, random);
      std::int64_t differing = 0;
      for (std::size_t i = 0; i < sequences.size(); ++i) {
        for (std::size_t at = 0; at < sequences[i].q.size(); ++at) {
          differing += !same_bits(chunked.outputs()[i][at], whole.outputs()[i][at]);
        }
      }
      CHECK(differing == 0);
    });
  }
}

TEST_CASE("long contexts are shared out over the threads without a difference") {
  for (const Isa isa : isas()) {
    CAPTURE(name(isa));
    const std::vector<KVType> known = types(isa);
    for_seeds(10, [&](std::uint64_t seed) {
      Random random(seed);
      const CacheShape shape = {known[seed % known.size()], 1, 2, 2, 32, 32, seed >= known.size() ? 900 : 0};
      std::vector<Sequence> sequences;
      sequences.push_back(random_sequence(shape, 1300, random));
      const float scale = 0.2F;
      std::vector<std::vector<float>> outputs;
      for (const int threads : {1, 2, 4}) {
        Random cuts(seed);
        World world(shape, sequences, cuts);
        while (!world.finished()) world.step(context(isa, threads), 0, scale, cuts.chance(0.5) ? 1 : 400, cuts);
        CHECK((world.merges() > 0) == (threads > 1));
        world.check_exact(context(isa, 1), 0, scale, 12, random);
        outputs.push_back(world.outputs()[0]);
      }
      for (std::size_t i = 1; i < outputs.size(); ++i) {
        CHECK(std::memcmp(outputs[0].data(), outputs[i].data(), outputs[0].size() * sizeof(float)) == 0);
      }
    });
  }
}

TEST_CASE("large scores leave one key alone") {
  for (const Isa isa : isas()) {
    CAPTURE(name(isa));
    for (const KVType type : {KVType::fp32, KVType::bf16}) {
      Random random(5);
      const CacheShape shape = {type, 1, 1, 3, 64, 16, 0};
      std::vector<Sequence> sequences;
      sequences.push_back(random_sequence(shape, 600, random));
      for (float& value : sequences[0].q) value *= 1000.0F;
      World world(shape, sequences, random);
      finish(world, isa, shape, 30.0F, 80, random);
      Worst worst;
      for (std::int64_t sample = 0; sample < 40; ++sample) {
        const std::int64_t position = random.integer(0, 599);
        const std::vector<double> want = exact_attention(shape, sequences[0], position, 1, 30.0F);
        for (std::int64_t d = 0; d < 64; ++d) {
          const std::int64_t at = (position * 3 + 1) * 64 + d;
          const float got = world.outputs()[0][static_cast<std::size_t>(at)];
          worst.see(at, static_cast<double>(got), want[static_cast<std::size_t>(d)], 1e-3);
        }
      }
      CHECK_WORST(worst);
    }
  }
}

}  // namespace
}  // namespace ropeway::tests
