#include "weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "numbers.h"

namespace ropeway::tests {
namespace {

template <class T>
T read(const Buffer<std::byte>& bytes, std::int64_t index) {
  T value;
  std::memcpy(&value, bytes.data() + static_cast<std::size_t>(index) * sizeof(T), sizeof value);
  return value;
}

template <class T>
void write(Buffer<std::byte>& bytes, std::int64_t index, T value) {
  std::memcpy(bytes.data() + static_cast<std::size_t>(index) * sizeof(T), &value, sizeof value);
}

std::size_t element_bytes(Layout layout) {
  switch (layout) {
    case Layout::fp32: return 4;
    case Layout::bf16:
    case Layout::fp16: return 2;
    default: return 1;
  }
}

// Finite: normal numbers about 1, now and then a denormal or a zero.
std::uint16_t random_half(Random& random) {
  const auto sign = static_cast<std::uint16_t>(random.bits() & 0x8000);
  if (random.chance(0.05)) return static_cast<std::uint16_t>(sign | (random.bits() & 0x83FF));
  return static_cast<std::uint16_t>(sign | random.integer(0x2800, 0x4000));
}

void fill_scales(Buffer<std::byte>& scales, std::int64_t count, bool half, Random& random) {
  scales = Buffer<std::byte>(static_cast<std::size_t>(count) * (half ? 2 : 4), half ? 2 : 4);
  for (std::int64_t i = 0; i < count; ++i) {
    half ? write(scales, i, random_half(random)) : write(scales, i, random.normal() / 64.0F);
  }
}

float read_scale(const Buffer<std::byte>& scales, std::int64_t index, bool half) {
  return half ? from_fp16(read<std::uint16_t>(scales, index)) : read<float>(scales, index);
}

}  // namespace

std::string WeightKind::name() const {
  static const char* const names[] = {"fp32", "bf16", "fp16", "int8", "int4"};
  std::string text = names[static_cast<int>(layout)];
  if (!grouped()) return text;
  text += " in groups of " + std::to_string(group) + (half_scales ? ", float16 scales" : ", float32 scales");
  return text + (minimums ? ", minimums, " : ", ") + std::to_string(digits) + " digits";
}

const std::vector<WeightKind>& weight_kinds() {
  static const std::vector<WeightKind> kinds = [] {
    std::vector<WeightKind> list = {{Layout::fp32}, {Layout::bf16}, {Layout::fp16}};
    for (const auto& [layout, group] : {std::pair(Layout::int8, 32), {Layout::int8, 16}, {Layout::int4, 32}}) {
      for (const bool half : {false, true})
        for (const bool minimums : {false, true})
          for (const int digits : {1, 2}) list.push_back({layout, group, half, minimums, digits});
    }
    return list;
  }();
  return kinds;
}

std::int64_t allowed_k(const WeightKind& kind, std::int64_t k) {
  const std::int64_t step = kind.grouped() ? kind.group : 1;
  return std::max(step, (k + step - 1) / step * step);
}

Weights random_weights(Context& context, const WeightKind& kind, std::int64_t n, std::int64_t k, Random& random) {
  Weights w{.kind = kind, .n = n, .k = k, .row_stride = k + random.integer(0, 3), .values = {}, .scales = {},
            .minimums = {}, .data = {}, .packed_scales = {}, .packed_minimums = {}, .matrix = {}};
  const std::size_t element = element_bytes(kind.layout);
  w.values = Buffer<std::byte>(static_cast<std::size_t>((n - 1) * w.row_stride + k) * element, element);
  for (std::int64_t row = 0; row < n; ++row) {
    for (std::int64_t i = 0; i < k; ++i) {
      const std::int64_t at = row * w.row_stride + i;
      switch (kind.layout) {
        case Layout::fp32: write(w.values, at, random.normal()); break;
        case Layout::bf16: write(w.values, at, to_bf16(random.normal())); break;
        case Layout::fp16: write(w.values, at, random_half(random)); break;
        case Layout::int8: write(w.values, at, static_cast<std::int8_t>(random.integer(-128, 127))); break;
        case Layout::int4: {
          const int low = kind.minimums ? 0 : -8;
          write(w.values, at, static_cast<std::int8_t>(random.integer(low, low + 15)));
        }
      }
    }
  }
  if (kind.grouped()) {
    fill_scales(w.scales, n * (k / kind.group), kind.half_scales, random);
    if (kind.minimums) fill_scales(w.minimums, n * (k / kind.group), kind.half_scales, random);
  }
  w.matrix = {kind.layout, n, k, kind.group, kind.half_scales, kind.digits, nullptr, nullptr, nullptr};
  w.data = Buffer<std::byte>(data_bytes(w.matrix), 64);
  w.packed_scales = Buffer<std::byte>(scale_bytes(w.matrix), 64);
  w.packed_minimums = Buffer<std::byte>(kind.minimums ? scale_bytes(w.matrix) : 0, 64);
  w.matrix.data = w.data.data();
  w.matrix.scales = kind.grouped() ? w.packed_scales.data() : nullptr;
  w.matrix.minimums = kind.minimums ? w.packed_minimums.data() : nullptr;
  const Call call(context);
  const void* const minimums = kind.minimums ? w.minimums.data() : nullptr;
  pack(context, w.matrix, {w.values.data(), w.row_stride, w.scales.data(), minimums});
  return w;
}

int Weights::code(std::int64_t row, std::int64_t i) const { return read<std::int8_t>(values, row * row_stride + i); }

float Weights::scale(std::int64_t row, std::int64_t group) const {
  return read_scale(scales, row * (k / kind.group) + group, kind.half_scales);
}

float Weights::minimum(std::int64_t row, std::int64_t group) const {
  return kind.minimums ? read_scale(minimums, row * (k / kind.group) + group, kind.half_scales) : 0.0F;
}

double Weights::value(std::int64_t row, std::int64_t i) const {
  const std::int64_t at = row * row_stride + i;
  switch (kind.layout) {
    case Layout::fp32: return read<float>(values, at);
    case Layout::bf16: return from_bf16(read<std::uint16_t>(values, at));
    case Layout::fp16: return from_fp16(read<std::uint16_t>(values, at));
    default: break;
  }
  const float scaled = scale(row, i / kind.group) * static_cast<float>(code(row, i));
  return kind.minimums ? scaled + minimum(row, i / kind.group) : scaled;
}

Inputs prepare(const WeightKind& kind, const float* x, std::int64_t k) {
  Inputs inputs;
  if (!kind.grouped()) {
    for (std::int64_t i = 0; i < k; ++i) {
      inputs.values.push_back(kind.layout == Layout::bf16 ? from_bf16(to_bf16(x[i])) : x[i]);
    }
    return inputs;
  }
  const float largest_code = kind.digits == 1 ? 127.0F : 32512.0F;
  for (std::int64_t first = 0; first < k; first += 32) {
    const std::int64_t last = std::min(first + 32, k);
    float most = 0.0F;
    for (std::int64_t i = first; i < last; ++i) most = std::max(most, std::abs(x[i]));
    const float scale = most / largest_code;
    const float inverse = std::min(1.0F / scale, 0x1.fffffeP+127F);
    inputs.scales.push_back(scale);
    for (std::int64_t i = first; i < last; ++i) {
      const float scaled = std::clamp(x[i] * inverse, -largest_code, largest_code);
      inputs.codes.push_back(static_cast<int>(std::nearbyint(scaled)));
    }
  }
  return inputs;
}

Product product(const Weights& w, std::int64_t row, const Inputs& inputs) {
  Product sum = {0.0, 0.0};
  const auto add = [&](double term) {
    sum.value += term;
    sum.magnitude += std::abs(term);
  };
  if (!w.kind.grouped()) {
    const float* const x = inputs.values.data();
    for (std::int64_t i = 0; i < w.k; ++i) add(w.value(row, i) * static_cast<double>(x[i]));
    return sum;
  }
  for (std::int64_t first = 0; first < w.k; first += w.kind.group) {
    std::int64_t products = 0, codes = 0;
    for (std::int64_t i = first; i < first + w.kind.group; ++i) {
      const std::int64_t input = inputs.codes[static_cast<std::size_t>(i)];
      products += input * w.code(row, i);
      codes += input;
    }
    const double scale = inputs.scales[static_cast<std::size_t>(first / 32)];
    const std::int64_t group = first / w.kind.group;
    add(static_cast<double>(products) * scale * static_cast<double>(w.scale(row, group)));
    add(static_cast<double>(codes) * scale * static_cast<double>(w.minimum(row, group)));
  }
  return sum;
}

}  // namespace ropeway::tests
