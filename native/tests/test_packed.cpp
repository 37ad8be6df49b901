// Packing puts every value where core/packed.h says; gathering gives it back.
#include <doctest/doctest.h>

#include <cstring>
#include <stdexcept>

#include "machine.h"
#include "numbers.h"
#include "weights.h"

namespace ropeway::tests {
namespace {

template <class T>
T at(const Buffer<std::byte>& bytes, std::int64_t index) {
  T value;
  std::memcpy(&value, bytes.data() + static_cast<std::size_t>(index) * sizeof(T), sizeof value);
  return value;
}

// Output n's value i in the packed bytes, read by the picture in core/packed.h alone.
double packed_value(const Weights& w, std::int64_t n, std::int64_t i) {
  const std::int64_t panel = n / 32, lane = n % 32;
  switch (w.kind.layout) {
    case Layout::fp32: return at<float>(w.data, (panel * w.k + i) * 32 + lane);
    case Layout::fp16: return from_fp16(at<std::uint16_t>(w.data, (panel * w.k + i) * 32 + lane));
    case Layout::bf16: {
      const std::int64_t pairs = (w.k + 1) / 2;
      return from_bf16(at<std::uint16_t>(w.data, ((panel * pairs + i / 2) * 32 + lane) * 2 + i % 2));
    }
    default: return 0.0;
  }
}

int packed_code(const Weights& w, std::int64_t n, std::int64_t i) {
  const std::int64_t panel = n / 16, lane = n % 16;
  if (w.kind.layout == Layout::int8) {
    return at<std::uint8_t>(w.data, ((panel * (w.k / 4) + i / 4) * 16 + lane) * 4 + i % 4) - 128;
  }
  const std::int64_t quad = i % 32 / 4;
  const int both = at<std::uint8_t>(w.data, (((panel * (w.k / 32) + i / 32) * 4 + quad % 4) * 16 + lane) * 4 + i % 4);
  return (quad < 4 ? both & 15 : both >> 4) - (w.kind.minimums ? 0 : 8);
}

float packed_scale(const Weights& w, const Buffer<std::byte>& from, std::int64_t n, std::int64_t group) {
  const std::int64_t index = (n / 16 * (w.k / w.kind.group) + group) * 16 + n % 16;
  return w.kind.half_scales ? from_fp16(at<std::uint16_t>(from, index)) : at<float>(from, index);
}

TEST_CASE("packing puts every value where the layout says, and zeros after the last output") {
  for_seeds(135, [&](std::uint64_t seed) {
    Random random(seed);
    const WeightKind& kind = weight_kinds()[seed % weight_kinds().size()];
    CAPTURE(kind.name());
    const std::int64_t n = random.integer(1, 70), k = allowed_k(kind, random.integer(1, 130));
    const Weights w = random_weights(context(Isa::portable, static_cast<int>(1 + seed % 4)), kind, n, k, random);
    const std::int64_t width = kind.grouped() ? 16 : 32, padded = (n + width - 1) / width * width;
    std::int64_t wrong = 0;
    for (std::int64_t row = 0; row < padded; ++row) {
      for (std::int64_t i = 0; i < k; ++i) {
        if (!kind.grouped()) {
          wrong += packed_value(w, row, i) != (row < n ? w.value(row, i) : 0.0);
          continue;
        }
        const std::int64_t group = i / kind.group;
        if (row < n) wrong += packed_code(w, row, i) != w.code(row, i);
        wrong += packed_scale(w, w.packed_scales, row, group) != (row < n ? w.scale(row, group) : 0.0F);
        if (kind.minimums) {
          wrong += packed_scale(w, w.packed_minimums, row, group) != (row < n ? w.minimum(row, group) : 0.0F);
        }
      }
    }
    CHECK(wrong == 0);
  });
}

TEST_CASE("gathered rows are the values that were packed") {
  for_seeds(135, [&](std::uint64_t seed) {
    Random random(seed);
    const WeightKind& kind = weight_kinds()[seed % weight_kinds().size()];
    CAPTURE(kind.name());
    const std::int64_t n = random.integer(1, 70), k = allowed_k(kind, random.integer(1, 130));
    Context& used = context(Isa::portable, static_cast<int>(1 + seed % 4));
    const Weights w = random_weights(used, kind, n, k, random);
    Buffer<std::int32_t> ids(static_cast<std::size_t>(random.integer(0, 40)));
    for (std::int32_t& id : ids) id = static_cast<std::int32_t>(random.integer(0, n - 1));
    Buffer<float> out(ids.size() * static_cast<std::size_t>(k));
    const Call call(used);
    gather(used, w.matrix, ids.data(), static_cast<std::int64_t>(ids.size()), out.data());
    std::int64_t wrong = 0;
    for (std::size_t row = 0; row < ids.size(); ++row) {
      const float* const values = out.data() + static_cast<std::int64_t>(row) * k;
      for (std::int64_t i = 0; i < k; ++i) wrong += static_cast<double>(values[i]) != w.value(ids[row], i);
    }
    CHECK(wrong == 0);
  });
}

TEST_CASE("an id outside the table is refused and nothing is read") {
  Random random(3);
  Context& used = context(Isa::portable, 2);
  const Weights w = random_weights(used, {Layout::bf16}, 20, 8, random);
  for (const std::int32_t id : {-1, 20, INT32_MIN, INT32_MAX}) {
    const Buffer<std::int32_t> ids = {0, id};
    Buffer<float> out(16);
    const Call call(used);
    CHECK_THROWS_AS(gather(used, w.matrix, ids.data(), 2, out.data()), std::out_of_range);
  }
}

}  // namespace
}  // namespace ropeway::tests
