// Attention in fixed order. Absolute positions are cut into spans of 256 keys. For every query and span: scores, the
// softmax's weights relative to the span's largest score, their sum, and the weighted values. Spans are then merged
// one after the other, from the first to the last (Milakov and Gimelshein, "Online normalizer calculation for
// softmax", 2018; Dao et al., "FlashAttention", 2022). Neither the tokens computed together, nor the blocks' places,
// nor who computes which span has a part in it, so a query's result is the same bits however it is computed.
#include "kernels/attention.h"

#include <cstring>

#include "kernels/kv_span.h"
#include "kernels/parallel.h"

namespace ropeway::ROPEWAY_ISA {
namespace {

constexpr float kLog2E = 0x1.715476p+0F;

// From this many queries on, converting a span's keys and values to float32 once pays.
constexpr std::int64_t kPackFrom = 16;

// ------------------------------------------------------------------ writing

inline void narrow(float x, float& y) { y = x; }
// Round to nearest, ties to even; a NaN stays one.
inline void narrow(float x, std::uint16_t& y) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const std::uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  y = static_cast<std::uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}

template <class Element>
void write_tokens(const WriteKV& args, std::int64_t first, std::int64_t last) {
  const KVStorage& cache = args.cache;
  const std::int64_t size = cache.head_dim, tile = key_tile(cache);
  for (std::int64_t head = 0; head < cache.kv_heads; ++head) {
    for (std::int64_t token = first; token < last; ++token) {
      const std::int64_t block = args.slots[token] / cache.block_size, place = args.slots[token] % cache.block_size;
      const float* k = args.k + (token * cache.kv_heads + head) * size;
      const float* v = args.v + (token * cache.kv_heads + head) * size;
      Element* keys = block_keys<Element>(cache, block, args.layer, head) + place / tile * tile * size + place % tile;
      Element* values = block_values<Element>(cache, block, args.layer, head) + place * size;
      for (std::int64_t d = 0; d < size; ++d) narrow(k[d], keys[d * tile]);
      for (std::int64_t d = 0; d < size; ++d) narrow(v[d], values[d]);
    }
  }
}

void write_kv(Context& context, const WriteKV& args) {
  const std::int64_t step = most_of(1, 16384 / (args.cache.kv_heads * args.cache.head_dim));
  parallel(context, (args.tokens + step - 1) / step, [&](std::int64_t tile, int) {
    const std::int64_t first = tile * step, last = least(first + step, args.tokens);
    args.cache.bf16 ? write_tokens<std::uint16_t>(args, first, last) : write_tokens<float>(args, first, last);
  });
}

// ------------------------------------------------------------------ merging spans

// A query's result so far: values weighted relative to `most`, and the sum of the weights; `total` 0: nothing yet.
struct Running {
  float* values;  // [width]
  float most, total;
};

// The same of one span joins it.
void merge_span(Running& running, const float* values, float most, float total, std::int64_t width) {
  if (total == 0.0F) return;  // nothing visible there
  if (running.total == 0.0F) {
    std::memcpy(running.values, values, sizeof(float) * static_cast<std::size_t>(width));
    running.most = most;
    running.total = total;
    return;
  }
  const float peak = most > running.most ? most : running.most;
  float factors[16] = {running.most - peak, most - peak};
  store_f32(factors, exp2_f32(load_f32(factors)));
  const f32x16 old_factor = set_f32(factors[0]), new_factor = set_f32(factors[1]);
  for (std::int64_t d = 0; d < width; d += 16) {
    store_f32(running.values + d,
              fma(load_f32(values + d), new_factor, mul(load_f32(running.values + d), old_factor)));
  }
  running.most = peak;
  running.total = running.total * factors[0] + total * factors[1];
}

void write_result(const Running& running, float* out, std::int64_t size) {
  const f32x16 share = set_f32(1.0F / running.total);
  std::int64_t d = 0;
  for (; d + 16 <= size; d += 16) store_f32(out + d, mul(load_f32(running.values + d), share));
  if (d < size) store_f32(out + d, mul(load_f32(running.values + d), share), static_cast<int>(size - d));
}

// ------------------------------------------------------------------ a task

template <int N>
struct Count {
  static constexpr int value = N;
};

// Calls body(Count<count>{}), 1 <= count <= kPanel.
template <int N = kPanel, class Body>
inline void with_count(int count, const Body& body) {
  if constexpr (N > 1) {
    if (count < N) return with_count<N - 1>(count, body);
  }
  body(Count<N>{});
}

struct Scratch {
  float* q;        // panels of [head_dim][queries]
  float* running;  // [queries][width]
  Running* results;  // [queries]
  float* scores;   // [kPanel][kSpan]
  float* sums;     // [kPanel][width]
  float* keys;     // [kSpan / 16][head_dim][16]
  float* values;   // [kSpan][width]
};

class HeadTask {
 public:
  HeadTask(const Attention& args, const AttentionItem& item, std::int64_t head, const Scratch& scratch,
           float* partials)
      : args_(args),
        item_(item),
        head_(head),
        scratch_(scratch),
        partials_(partials),
        size_(args.cache.head_dim),
        width_(round_up(size_, 16)),
        group_(args.heads / args.cache.kv_heads),
        queries_(static_cast<int>(item.tokens * group_)) {}

  void run() {
    panels_ = (queries_ + kPanel - 1) / kPanel;
    pack_queries();
    for (int i = 0; i < queries_; ++i) scratch_.results[i] = {scratch_.running + i * width_, 0.0F, 0.0F};
    const bool in_place = args_.cache.block_size >= 16 && size_ % 16 == 0;
    for (std::int64_t span = item_.span_begin; span < item_.span_end; ++span) {
      const std::int64_t start = span * kSpan;
      const SpanRange range = {
          .start = start,
          .begin = first_key(0, start),
          .end = end_key(item_.tokens - 1, start),
          .end_of_item = least(item_.first_position + item_.tokens, item_.span_end * kSpan) - start,
          .block_table = args_.block_table + item_.row * args_.table_stride,
      };
      if (range.begin >= range.end) {
        if (partials_ != nullptr) leave_out(span, 0, queries_);
        continue;
      }
      if (!args_.cache.bf16) {
        in_place ? attend(span, tiles_in_place<float>(args_.cache, args_.layer, head_, range))
                 : attend(span, copied<float>(range));
      } else if (in_place && queries_ < kPackFrom) {
        attend(span, tiles_in_place<std::uint16_t>(args_.cache, args_.layer, head_, range));
      } else {
        attend(span, copied<std::uint16_t>(range));
      }
    }
    if (partials_ != nullptr) return;
    for (int i = 0; i < queries_; ++i) write_result(scratch_.results[i], args_.out + offset(i), size_);
  }

  // After all items of a merge are done: its spans, in order.
  void merge(const AttentionMerge& merge) {
    for (int i = 0; i < queries_; ++i) {
      Running result = {scratch_.running, 0.0F, 0.0F};
      for (std::int64_t span = 0; span < merge.spans; ++span) {
        const float* from = partial(merge, i, span);
        merge_span(result, from + 16, from[0], from[1], width_);
      }
      write_result(result, args_.out + offset(i), size_);
    }
  }

 private:
  // Visible keys of the item's token i, relative to a span's start, are [first_key, end_key).
  std::int64_t first_key(std::int64_t token, std::int64_t start) const {
    if (args_.window == 0) return 0;
    return most_of(0, item_.first_position + token + 1 - args_.window - start);
  }
  std::int64_t end_key(std::int64_t token, std::int64_t start) const {
    return least(kSpan, item_.first_position + token + 1 - start);
  }

  std::int64_t offset(std::int64_t query) const {
    const std::int64_t token = item_.first_token + query / group_;
    return (token * args_.heads + head_ * group_ + query % group_) * size_;
  }

  // Where a query's partial result of a span lies: most, total, 14 unused, values [width].
  float* partial(const AttentionMerge& merge, std::int64_t query, std::int64_t span) const {
    const std::int64_t pair = merge.offset + query / group_ * merge.spans + span;
    return partials_ + (pair * args_.heads + head_ * group_ + query % group_) * (width_ + 16);
  }

  // Panels differ by at most one query, so that none is left with few.
  int panel_begin(int panel) const { return panel * queries_ / panels_; }

  void pack_queries() {
    const float scale = args_.scale * kLog2E;
    for (int panel = 0; panel < panels_; ++panel) {
      const int begin = panel_begin(panel), count = panel_begin(panel + 1) - begin;
      float* to = scratch_.q + begin * size_;
      for (int r = 0; r < count; ++r) {
        const float* from = args_.q + offset(begin + r);
        for (std::int64_t d = 0; d < size_; ++d) to[d * count + r] = from[d] * scale;
      }
    }
  }

  template <class Element>
  SpanTiles<float, false> copied(const SpanRange& range) {
    return tiles_copied<Element>(args_.cache, args_.layer, head_, range, width_, scratch_.keys, scratch_.values);
  }

  template <class Tiles>
  void attend(std::int64_t span, const Tiles& tiles) {
    for (int panel = 0; panel < panels_; ++panel) {
      const int begin = panel_begin(panel);
      with_count(panel_begin(panel + 1) - begin,
                 [&](auto count) { attend_panel<decltype(count)::value>(span, begin, tiles); });
    }
  }

  template <int Queries, class Tiles>
  void attend_panel(std::int64_t span, int first_query, const Tiles& tiles) {
    int begin[Queries], end[Queries];
    int least_begin = kSpan, most_begin = 0, least_end = kSpan, most_end = 0;  // most over the visible queries
    bool all_visible = true;
    for (int r = 0; r < Queries; ++r) {
      const std::int64_t token = (first_query + r) / group_;
      begin[r] = static_cast<int>(least(kSpan, first_key(token, span * kSpan)));
      end[r] = static_cast<int>(most_of(0, end_key(token, span * kSpan)));
      if (begin[r] >= end[r]) {
        all_visible = false;
        continue;
      }
      if (begin[r] < least_begin) least_begin = begin[r];
      if (begin[r] > most_begin) most_begin = begin[r];
      if (end[r] < least_end) least_end = end[r];
      if (end[r] > most_end) most_end = end[r];
    }
    if (least_begin >= most_end) {
      if (partials_ != nullptr) leave_out(span, first_query, Queries);
      return;
    }
    float* const scores = scratch_.scores;
    float* const sums = scratch_.sums;
    score_panel<Queries>(scratch_.q + first_query * size_, tiles, least_begin / 16, (most_end + 15) / 16, size_,
                         scores);
    float most[Queries], total[Queries];
    for (int r = 0; r < Queries; ++r) {
      most[r] = total[r] = 0.0F;
      if (begin[r] < end[r]) total[r] = soften(scores + r * kSpan, begin[r], end[r], most[r]);
    }
    std::memset(sums, 0, sizeof(float) * static_cast<std::size_t>(Queries * width_));
    // Keys that all queries see are weighed for the whole panel, those at the ragged ends query by query.
    const bool common = all_visible && most_begin < least_end;
    for (int r = 0; r < Queries; ++r) weigh_one(scores, tiles, r, begin[r], common ? most_begin : end[r]);
    if (common) {
      weigh_panel<Queries>(scores, tiles, most_begin, least_end, width_, sums);
      for (int r = 0; r < Queries; ++r) weigh_one(scores, tiles, r, least_end, end[r]);
    }
    for (int r = 0; r < Queries; ++r) {
      const int query = first_query + r;
      if (partials_ == nullptr) {
        merge_span(scratch_.results[query], sums + r * width_, most[r], total[r], width_);
      } else {
        float* to = partial(args_.merges[item_.merge], query, span);
        to[0] = most[r];
        to[1] = total[r];
        std::memcpy(to + 16, sums + r * width_, sizeof(float) * static_cast<std::size_t>(width_));
      }
    }
  }

  template <class Tiles>
  void weigh_one(const float* scores, const Tiles& tiles, int r, int begin, int end) {
    if (begin < end) weigh_panel<1>(scores + r * kSpan, tiles, begin, end, width_, scratch_.sums + r * width_);
  }

  void leave_out(std::int64_t span, int first_query, int count) {
    for (int i = 0; i < count; ++i) partial(args_.merges[item_.merge], first_query + i, span)[1] = 0.0F;
  }

  const Attention& args_;
  const AttentionItem& item_;
  const std::int64_t head_;
  const Scratch& scratch_;
  float* const partials_;  // null: the item sees all spans
  const std::int64_t size_, width_, group_;
  const int queries_;
  int panels_ = 0;
};

// Hands out pieces of one allocation, each aligned to 64 bytes; without memory it only counts.
struct Carver {
  std::byte* memory;
  std::size_t used = 0;

  template <class T>
  T* take(std::int64_t count) {
    T* piece = reinterpret_cast<T*>(memory + used);
    used += (sizeof(T) * static_cast<std::size_t>(count) + 63) / 64 * 64;
    return piece;
  }
};

struct Workspace {
  float* partials;
  std::int32_t* finished;  // [merges, kv_heads]: items done
  Scratch worker(const Attention& args, Carver& carver) const {
    const std::int64_t size = args.cache.head_dim, width = round_up(size, 16);
    const std::int64_t queries = args.most_tokens * (args.heads / args.cache.kv_heads);
    return {carver.take<float>(queries * size),   carver.take<float>(queries * width),
            carver.take<Running>(queries),        carver.take<float>(kPanel * kSpan),
            carver.take<float>(kPanel * width),   carver.take<float>(kSpan * size),
            carver.take<float>(kSpan * width)};
  }
};

void attention(Context& context, const Attention& args) {
  if (args.task_count == 0) return;
  const std::int64_t width = round_up(args.cache.head_dim, 16);
  const auto carve = [&](Carver& carver) {
    return Workspace{carver.take<float>(args.partial_count * args.heads * (width + 16)),
                     carver.take<std::int32_t>(args.merge_count * args.cache.kv_heads)};
  };
  Carver shared_size{nullptr}, worker_size{nullptr};
  carve(shared_size).worker(args, worker_size);
  const std::size_t workers = static_cast<std::size_t>(context.threads());
  Carver carver{context.scratch(shared_size.used + workers * worker_size.used)};
  const Workspace workspace = carve(carver);
  std::memset(workspace.finished, 0,
              sizeof(std::int32_t) * static_cast<std::size_t>(args.merge_count * args.cache.kv_heads));

  parallel(context, args.task_count, [&](std::int64_t number, int worker) {
    Carver own{carver.memory + carver.used + static_cast<std::size_t>(worker) * worker_size.used};
    const Scratch scratch = workspace.worker(args, own);
    const AttentionTask& task = args.tasks[number];
    const AttentionItem& item = args.items[task.item];
    for (std::int64_t head = task.head_begin; head < task.head_end; ++head) {
      HeadTask work(args, item, head, scratch, item.merge < 0 ? nullptr : workspace.partials);
      work.run();
      if (item.merge < 0) continue;
      const AttentionMerge& merge = args.merges[item.merge];
      std::int32_t* finished = workspace.finished + item.merge * args.cache.kv_heads + head;
      if (__atomic_add_fetch(finished, 1, __ATOMIC_ACQ_REL) == merge.items) work.merge(merge);
    }
  });
}

}  // namespace

const AttentionKernels attention_kernels = {.write_kv = &write_kv, .attention = &attention};

}  // namespace ropeway::ROPEWAY_ISA
