// Attention in fixed order. Absolute positions are cut into spans of 256 keys. For every query and span: scores, the
// softmax's weights relative to the span's largest score, their sum, and the weighted values. Spans are then merged
// one after the other, from the first to the last (Milakov and Gimelshein, "Online normalizer calculation for
// softmax", 2018; Dao et al., "FlashAttention", 2022). Neither the tokens computed together, nor the blocks' places,
// nor who computes which span has a part in it, so a query's result is the same bits however it is computed.
#include "kernels/attention.h"

#include <cstring>

#include "kernels/attention_tile.h"
#include "kernels/kv_span.h"
#include "kernels/kv_write.h"
#include "kernels/parallel.h"
#include "kernels/small_keys.h"

namespace ropeway::ROPEWAY_ISA {
namespace {

constexpr float kLog2E = 0x1.715476p+0F;

// ------------------------------------------------------------------ writing and reading the cache

// A piece begins with a tile's first token, because positions of a tile may share bytes.
void write_kv(Context& context, const WriteKV& args) {
  const std::int64_t step = most_of(1, 16384 / (args.cache.kv_heads * args.cache.head_dim));
  const auto boundary = [&](std::int64_t token) {
    const std::int64_t tile = args.cache.tile_positions;
    while (0 < token && token < args.tokens && args.slots[token] / tile == args.slots[token - 1] / tile) ++token;
    return least(token, args.tokens);
  };
  const std::int64_t pieces = (args.tokens + step - 1) / step, heads = args.cache.kv_heads;
  parallel(context, pieces + args.group_count * heads, [&](std::int64_t piece, int) {
    if (piece < pieces) return write_tokens(args, boundary(piece * step), boundary((piece + 1) * step));
    const std::int64_t pair = piece - pieces;
    write_keys_of_group(args, args.groups[pair / heads], pair % heads);
  });
}

void read_kv(Context& context, const ReadKV& args) {
  parallel(context, args.count, [&](std::int64_t index, int) { read_block(args, index); });
}

// ------------------------------------------------------------------ merging spans

// A query's result so far: values weighted relative to `most`, and the sum of the weights; `total` 0: nothing yet.
struct Running {
  float* values;  // [width]
  float most, total;
};

// The same of one span, for some queries, joins theirs.
template <int kMost>
void merge_span(Running* running, const float* values, const float* most, const float* total, int count,
                std::int64_t width) {
  static_assert(kMost % 16 == 0);
  alignas(64) float old_factors[kMost] = {}, new_factors[kMost] = {};
  for (int i = 0; i < count; ++i) {
    const float peak = most[i] > running[i].most ? most[i] : running[i].most;
    old_factors[i] = running[i].most - peak;
    new_factors[i] = most[i] - peak;
  }
  for (int i = 0; i < count; i += 16) {
    store_f32(old_factors + i, exp2_f32(load_f32(old_factors + i)));
    store_f32(new_factors + i, exp2_f32(load_f32(new_factors + i)));
  }
  for (int i = 0; i < count; ++i, values += width) {
    Running& result = running[i];
    if (total[i] == 0.0F) continue;  // nothing visible there
    if (result.total == 0.0F) {
      std::memcpy(result.values, values, sizeof(float) * static_cast<std::size_t>(width));
      result.most = most[i];
      result.total = total[i];
      continue;
    }
    const f32x16 old_factor = set_f32(old_factors[i]), new_factor = set_f32(new_factors[i]);
    for (std::int64_t d = 0; d < width; d += 16) {
      store_f32(result.values + d, fma(load_f32(values + d), new_factor, mul(load_f32(result.values + d), old_factor)));
    }
    result.most = most[i] > result.most ? most[i] : result.most;
    result.total = result.total * old_factors[i] + total[i] * new_factors[i];
  }
}

// Adding zero makes a zero positive: whether keys of weight zero were multiplied must not show in its sign.
void write_result(const Running& running, float* out, std::int64_t size) {
  const f32x16 share = set_f32(1.0F / running.total);
  std::int64_t d = 0;
  const auto value = [&] { return add(mul(load_f32(running.values + d), share), zero_f32()); };
  for (; d + 16 <= size; d += 16) store_f32(out + d, value());
  if (d < size) store_f32(out + d, value(), static_cast<int>(size - d));
}

// ------------------------------------------------------------------ a task

// Calls body(Count<count>{}), 1 <= count <= kPanel.
template <int N = kPanel, class Body>
inline void with_count(int count, const Body& body) {
  if constexpr (N > 1) {
    if (count < N) return with_count<N - 1>(count, body);
  }
  body(Count<N>{});
}

// Queries whose weights are kept at a time: enough to share what a tile's reading costs, few enough for the caches.
constexpr int kPanels = 8, kMostRows = kPanel * kPanels;

// Of one worker.
template <class Type>
struct Scratch {
  using Input = typename Type::Input;
  using Query = typename Type::Query::Input;
  Query* q;
  Query* row;       // one query, or a multiple of 16 features
  float* scaled;    // one query
  float* q_scales;  // [queries]
  std::int32_t* q_starts;
  float* running;    // [queries][width]
  Running* results;  // [queries]
  float* scores;     // [kMostRows][kSpan]
  Input* weights;    // [kMostRows][groups][passes][kSpan]
  float* scales;     // [kMostRows][groups]
  float* bases;
  std::int32_t* starts;
  float* sums;      // [kMostRows][width]
  std::byte* keys;  // copies of a span
  std::byte* values;
  float* folded;    // [kPanel][width], of int4_full: queries times scales
  float* key_scales;
  float* key_minimums;
};

template <class Type>
class HeadTask {
  using Query = typename Type::Query;

 public:
  HeadTask(const Attention& args, const AttentionItem& item, std::int64_t head, std::int64_t head_end,
           const Scratch<Type>& scratch, float* partials)
      : args_(args),
        item_(item),
        head_(head),
        head_end_(head_end),
        scratch_(scratch),
        partials_(partials),
        size_(args.cache.head_dim),
        width_(round_up(size_, 16)),
        group_(args.heads / args.cache.kv_heads),
        groups_(small_values(args.cache.type) ? (size_ + kValueGroup - 1) / kValueGroup : 1),
        reader_(args.cache, args.layer, scratch.keys, scratch.values) {
    queries_.rows = scratch.q;
    queries_.scales = scratch.q_scales;
    queries_.starts = scratch.q_starts;
    queries_.count = static_cast<int>(item.tokens * group_);
    queries_.panels = (queries_.count + kPanel - 1) / kPanel;
    queries_.steps = (size_ + Query::unit - 1) / Query::unit;
  }

  void run() {
    pack_queries();
    for (int i = 0; i < queries_.count; ++i) scratch_.results[i] = {scratch_.running + i * width_, 0.0F, 0.0F};
    for (std::int64_t span = item_.span_begin; span < item_.span_end; ++span) {
      const SpanRange range = range_of(span);
      if (range.begin >= range.end) {
        if (partials_ != nullptr) leave_out(span, 0, queries_.count);
        continue;
      }
      const std::byte* next[kMostAhead];
      find_next(span, next);
      SpanTiles tiles;
      if (!reader_.read(head_, range, next, tiles) && item_.tokens > 1) return run_one_by_one();
      for (int panel = 0; panel < queries_.panels; panel += kPanels)
        attend(span, tiles, panel, static_cast<int>(least(panel + kPanels, queries_.panels)));
    }
    if (partials_ != nullptr) return;
    for (int i = 0; i < queries_.count; ++i) write_result(scratch_.results[i], args_.out + offset(i), size_);
  }

  // After all items of a merge are done: its spans, in order.
  void merge(const AttentionMerge& merge) {
    for (int i = 0; i < queries_.count; ++i) {
      Running result = {scratch_.running, 0.0F, 0.0F};
      for (std::int64_t span = 0; span < merge.spans; ++span) {
        const float* from = partial(i, span);
        merge_span<16>(&result, from + 16, from, from + 1, 1, width_);
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

  SpanRange range_of(std::int64_t span) const {
    const std::int64_t start = span * kSpan, last = item_.tokens - 1;
    return {
        .start = start,
        .begin = first_key(0, start),
        .end = end_key(last, start),
        .common_begin = first_key(last, start),
        .common_end = end_key(0, start),
        .block_table = args_.block_table + item_.row * args_.table_stride,
    };
  }

  // What is read after a span: keys, then values, of the item's next span or the next head's first.
  void find_next(std::int64_t span, const std::byte* (&next)[kMostAhead]) const {
    const bool more = span + 1 < item_.span_end;
    const std::int64_t head = more ? head_ : head_ + 1;
    const SpanRange range = range_of(more ? span + 1 : item_.span_begin);
    const bool known = head < head_end_ && range.begin < range.end && args_.cache.tile_positions == kTile;
    const std::int64_t first = range.begin / kTile, count = known ? (range.end + kTile - 1) / kTile - first : 0;
    for (std::int64_t i = 0; i < kMostAhead; ++i) {
      if (i < count) {
        next[i] = reader_.tile_of(head, range, (first + i) * kTile);
      } else {
        next[i] = i < 2 * count ? next[i - count] + args_.cache.values : nullptr;
      }
    }
  }

  // A value that is not finite lies where only some tokens may see it.
  void run_one_by_one() {
    AttentionItem one = item_;
    one.tokens = 1;
    for (std::int32_t i = 0; i < item_.tokens; ++i, ++one.first_token, ++one.first_position)
      HeadTask(args_, one, head_, head_end_, scratch_, partials_).run();
  }

  std::int64_t offset(std::int64_t query) const {
    const std::int64_t token = item_.first_token + query / group_;
    return (token * args_.heads + head_ * group_ + query % group_) * size_;
  }

  // Where a query's partial result of a span lies: most, total, 14 unused, values [width].
  float* partial(std::int64_t query, std::int64_t span) const {
    const AttentionMerge& merge = args_.merges[item_.merge];
    const std::int64_t token = item_.first_token - merge.first_token + query / group_;
    const std::int64_t pair = merge.offset + token * merge.spans + span;
    return partials_ + (pair * args_.heads + head_ * group_ + query % group_) * (width_ + 16);
  }

  void pack_queries() {
    const float scale = args_.scale * kLog2E;
    const KVStorage& cache = args_.cache;
    const float* factors =
        cache.key_factors == nullptr ? nullptr : cache.key_factors + (args_.layer * cache.kv_heads + head_) * size_;
    for (int panel = 0; panel < queries_.panels; ++panel) {
      for (int i = queries_.begin(panel); i < queries_.begin(panel + 1); ++i) {
        const float* from = args_.q + offset(i);
        float* scaled = scratch_.scaled;
        if constexpr (Type::small_keys) scaled = queries_.rows + i * width_;
        for (std::int64_t d = size_; d < width_; ++d) scaled[d] = 0.0F;
        for (std::int64_t d = 0; d < size_; ++d)
          scaled[d] = (factors == nullptr ? from[d] : from[d] * factors[d]) * scale;
        if constexpr (!Type::small_keys)
          pack_query(queries_, panel, i - queries_.begin(panel), scaled, size_, scratch_.row);
      }
    }
  }

  // The tiles of a span that a panel's queries see, and what each of them does.
  struct PanelView {
    int first, last;                 // tiles
    int begin[kPanel], end[kPanel];  // keys; empty: none
  };

  PanelView view(std::int64_t span, int panel) const {
    PanelView view = {kSpan / kTile, 0, {}, {}};
    const int first = queries_.begin(panel), count = queries_.begin(panel + 1) - first;
    for (int r = 0; r < count; ++r) {
      const std::int64_t token = (first + r) / group_;
      view.begin[r] = static_cast<int>(least(kSpan, first_key(token, span * kSpan)));
      view.end[r] = static_cast<int>(most_of(0, end_key(token, span * kSpan)));
      if (view.begin[r] >= view.end[r]) continue;
      view.first = static_cast<int>(least(view.first, view.begin[r] / kTile));
      view.last = static_cast<int>(most_of(view.last, (view.end[r] + kTile - 1) / kTile));
    }
    return view;
  }

  // Panels [begin, end). Tiles are taken a few at a time by all panels, so that they come from the nearest cache.
  void attend(std::int64_t span, const SpanTiles& tiles, int begin, int end) {
    PanelView views[kPanels];
    int first = kSpan / kTile, last = 0;
    for (int panel = begin; panel < end; ++panel) {
      views[panel - begin] = view(span, panel);
      first = views[panel - begin].first < first ? views[panel - begin].first : first;
      last = views[panel - begin].last > last ? views[panel - begin].last : last;
    }
    const int first_query = queries_.begin(begin);
    // Calls body(panel, its number of queries, its first row in the scratch, tiles of it in [from, to)).
    const auto for_panels = [&](int from, int to, const auto& body) {
      for (int panel = begin; panel < end; ++panel) {
        const PanelView& seen = views[panel - begin];
        const int tile_begin = seen.first > from ? seen.first : from, tile_end = seen.last < to ? seen.last : to;
        if (tile_begin >= tile_end) continue;
        const int row = queries_.begin(panel) - first_query;
        with_count(queries_.begin(panel + 1) - queries_.begin(panel),
                   [&](auto count) { body(panel, count, row, tile_begin, tile_end); });
      }
    };
    constexpr int step = Type::small_keys ? kKeyGroup / kTile : kWide;
    for (int t = first / step * step; t < last; t += step) {
      if constexpr (Type::small_keys) {
        score_group_of_keys(span, tiles, t >= first ? t : first, [&](const auto& body) {
          for_panels(t, t + step, [&](int panel, auto count, int row, int, int) {
            body(count, queries_.rows + queries_.begin(panel) * width_, scratch_.scores + row * kSpan + t * kTile);
          });
        });
      } else {
        for_panels(t, t + step, [&](int panel, auto count, int row, int from, int to) {
          constexpr int rows = decltype(count)::value;
          float* scores = scratch_.scores + row * kSpan;
          panel == 0 ? score_panel<Type, rows, true>(queries_, panel, tiles, from, to, scores)
                     : score_panel<Type, rows, false>(queries_, panel, tiles, from, to, scores);
        });
      }
    }
    float most[kMostRows], total[kMostRows];
    const auto for_rows = [&](const auto& body) {
      for (int panel = begin; panel < end; ++panel) {
        const PanelView& seen = views[panel - begin];
        for (int i = queries_.begin(panel); i < queries_.begin(panel + 1); ++i) {
          const int r = i - queries_.begin(panel);
          body(i - first_query, Visible{seen.begin[r], seen.end[r], seen.first, seen.last});
        }
      }
    };
    // One after the other for all rows: each waits for a maximum, and the others go on meanwhile.
    for_rows([&](int row, const Visible& keys) {
      most[row] = keys.begin < keys.end ? largest_score(scratch_.scores + row * kSpan, keys) : 0.0F;
    });
    for_rows([&](int row, const Visible& keys) { total[row] = weights_of(tiles, keys, row, most[row]); });
    weigh(tiles, first, last, for_panels);
    const int rows = queries_.begin(end) - first_query;
    if (partials_ == nullptr) {
      merge_span<kMostRows>(scratch_.results + first_query, scratch_.sums, most, total, rows, width_);
      return;
    }
    for (int row = 0; row < rows; ++row) {
      float* to = partial(first_query + row, span);
      to[0] = most[row];
      to[1] = total[row];
      std::memcpy(to + 16, scratch_.sums + row * width_, sizeof(float) * static_cast<std::size_t>(width_));
    }
  }

  // Of int4_full: the group that tile t of a span belongs to. A query's own is read as it was before it was quantised.
  // Calls for_panels(body), which calls body(Count<rows>{}, their queries, where the scores go).
  template <class ForPanels>
  void score_group_of_keys(std::int64_t span, const SpanTiles& tiles, int t, const ForPanels& for_panels) {
    const KVStorage& cache = args_.cache;
    const int odd = t % 2;
    if ((span * kSpan + t * kTile) / kKeyGroup == item_.first_position / kKeyGroup) {
      const KeyGroup& own = args_.groups[item_.group];
      const std::byte* keys = own.keys + args_.layer * own.layer_bytes + head_ * begun_bytes(size_);
      for_panels([&](auto count, const float* q, float* scores) {
        score_begun_group<decltype(count)::value>(cache, q, width_, keys, scores);
      });
      return;
    }
    for (int i = 0; i < 2; ++i) {
      const std::byte* ahead = tiles.keys[t - odd + i + kAhead<Type>];
      for (std::int64_t at = 0; at < cache.values; at += 64) fetch(ahead + at);
      for (std::int64_t at = cache.key_scales; at < cache.tile_bytes; at += 64) fetch(ahead + at);
    }
    const std::byte* first = tiles.keys[t] - odd * cache.tile_bytes;
    read_group_scales(cache, first, width_, scratch_.key_scales, scratch_.key_minimums);
    for_panels([&](auto count, const float* q, float* scores) {
      score_code_group<decltype(count)::value>(cache, q, width_, first, scratch_.key_scales, scratch_.key_minimums,
                                               scratch_.folded, scores);
    });
  }

  // Returns the sum of a row's weights.
  float weights_of(const SpanTiles& tiles, Visible keys, int row, float most) {
    float* scores = scratch_.scores + row * kSpan;
    if (keys.begin >= keys.end) keys.begin = keys.end = 16 * keys.first;
    if constexpr (Type::codes) {
      const float total = soften<Type>(scores, keys, most, [&](int i, f32x16 x) { store_f32(scores + i, x); });
      quantise_weights(scores, tiles, keys, groups_, weights(row));
      return total;
    } else {
      typename Type::Input* to = scratch_.weights + row * kSpan;
      return soften<Type>(scores, keys, most, [&](int i, f32x16 x) { Type::store(to + i, x); });
    }
  }

  Weights<Type> weights(int row) const {
    const std::int64_t at = row * groups_;
    return {scratch_.weights + at * Type::passes * kSpan, scratch_.scales + at, scratch_.bases + at,
            scratch_.starts + at};
  }

  template <class ForPanels>
  void weigh(const SpanTiles& tiles, int first, int last, const ForPanels& for_panels) {
    for_columns(width_, [&](std::int64_t column, auto vectors) {
      for_panels(first, last, [&](int panel, auto count, int row, int from, int to) {
        constexpr int rows = decltype(count)::value, wide = decltype(vectors)::value;
        float* sums = scratch_.sums + row * width_ + column;
        panel == 0 ? weigh_panel<rows, wide, true>(tiles, row, from, to, column, sums)
                   : weigh_panel<rows, wide, false>(tiles, row, from, to, column, sums);
      });
    });
  }

  template <int Rows, int Wide, bool Fetch>
  void weigh_panel(const SpanTiles& tiles, int row, int from, int to, std::int64_t column, float* sums) {
    if constexpr (Type::codes) {
      weigh_code_columns<Type, Rows, Wide, Fetch>(weights(row), groups_, tiles, from, to, column, width_, sums);
    } else {
      weigh_columns<Type, Rows, Wide, Fetch>(scratch_.weights + row * kSpan, tiles, from, to, column, width_, sums);
    }
  }

  void leave_out(std::int64_t span, int first_query, int count) {
    for (int i = 0; i < count; ++i) {
      float* to = partial(first_query + i, span);
      to[0] = to[1] = 0.0F;
    }
  }

  const Attention& args_;
  const AttentionItem item_;
  const std::int64_t head_, head_end_;
  const Scratch<Type>& scratch_;
  float* const partials_;  // null: the item sees all spans
  const std::int64_t size_, width_, group_, groups_;
  const SpanReader reader_;
  Queries<Query> queries_;
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

template <class Type>
Scratch<Type> carve_scratch(const Attention& args, Carver& carver) {
  using Input = typename Type::Input;
  const std::int64_t size = args.cache.head_dim, width = round_up(size, 16);
  const std::int64_t groups = small_values(args.cache.type) ? (size + kValueGroup - 1) / kValueGroup : 1;
  const std::int64_t queries = args.most_tokens * (args.heads / args.cache.kv_heads);
  const CopyLayout copies = copy_layout(args.cache);
  Scratch<Type> scratch;
  using Query = typename Type::Query;
  const std::int64_t features = Type::small_keys ? width : round_up(size, Query::unit);
  scratch.q = carver.take<typename Query::Input>(queries * features * Query::passes);
  scratch.row = carver.take<typename Query::Input>(width * Query::passes);
  scratch.scaled = carver.take<float>(width);
  scratch.q_scales = carver.take<float>(queries);
  scratch.q_starts = carver.take<std::int32_t>(queries);
  scratch.running = carver.take<float>(queries * width);
  scratch.results = carver.take<Running>(queries);
  scratch.scores = carver.take<float>(kMostRows * kSpan);
  scratch.weights = carver.take<Input>(kMostRows * groups * Type::passes * kSpan);
  scratch.scales = carver.take<float>(kMostRows * groups);
  scratch.bases = carver.take<float>(kMostRows * groups);
  scratch.starts = carver.take<std::int32_t>(kMostRows * groups);
  scratch.sums = carver.take<float>(kMostRows * width);
  scratch.keys = carver.take<std::byte>(kSpan / kTile * copies.key_bytes);
  scratch.values = carver.take<std::byte>(kSpan / kTile * copies.value_bytes);
  scratch.folded = carver.take<float>(Type::small_keys ? kPanel * width : 0);
  scratch.key_scales = carver.take<float>(Type::small_keys ? width : 0);
  scratch.key_minimums = carver.take<float>(Type::small_keys ? width : 0);
  return scratch;
}

template <class Type>
void attend(Context& context, const Attention& args) {
  const std::int64_t width = round_up(args.cache.head_dim, 16);
  const std::int64_t partials = args.partial_count * args.heads * (width + 16);
  const std::int64_t counters = args.merge_count * args.cache.kv_heads;
  Carver shared_size{nullptr}, worker_size{nullptr};
  shared_size.take<float>(partials);
  shared_size.take<std::int32_t>(counters);
  carve_scratch<Type>(args, worker_size);
  const std::size_t workers = static_cast<std::size_t>(context.threads());
  Carver carver{context.scratch(shared_size.used + workers * worker_size.used)};
  float* const partial_results = carver.take<float>(partials);
  std::int32_t* const finished = carver.take<std::int32_t>(counters);  // [merges, kv_heads]: items done
  std::memset(finished, 0, sizeof(std::int32_t) * static_cast<std::size_t>(counters));

  parallel(context, args.task_count, [&](std::int64_t number, int worker) {
    Carver own{carver.memory + carver.used + static_cast<std::size_t>(worker) * worker_size.used};
    const Scratch<Type> scratch = carve_scratch<Type>(args, own);
    const AttentionTask& task = args.tasks[number];
    const AttentionItem& item = args.items[task.item];
    for (std::int64_t head = task.head_begin; head < task.head_end; ++head) {
      HeadTask<Type> work(args, item, head, task.head_end, scratch, item.merge < 0 ? nullptr : partial_results);
      work.run();
      if (item.merge < 0) continue;
      const AttentionMerge& merge = args.merges[item.merge];
      std::int32_t* done = finished + item.merge * args.cache.kv_heads + head;
      if (__atomic_add_fetch(done, 1, __ATOMIC_ACQ_REL) == merge.items) work.merge(merge);
    }
  });
}

void attention(Context& context, const Attention& args) {
  if (args.task_count == 0) return;
  switch (args.cache.type) {
    case KVType::fp32: return attend<Fp32>(context, args);
    case KVType::bf16: return attend<Bf16>(context, args);
    case KVType::int8: return attend<Int8>(context, args);
    case KVType::int4: return attend<Int4>(context, args);
    case KVType::int4_full: return attend<Int4Full>(context, args);
  }
}

}  // namespace

const AttentionKernels attention_kernels = {.write_kv = &write_kv, .read_kv = &read_kv, .attention = &attention};

}  // namespace ropeway::ROPEWAY_ISA
