#include "core/packed.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

namespace ropeway {
namespace {

constexpr std::int64_t panels(const PackedMatrix& matrix) {
  const int width = panel_width(matrix.layout);
  return (matrix.n + width - 1) / width;
}

// Bytes of one panel of `data`.
constexpr std::int64_t panel_bytes(const PackedMatrix& matrix) {
  switch (matrix.layout) {
    case Layout::fp32: return matrix.k * kDensePanel * 4;
    case Layout::fp16: return matrix.k * kDensePanel * 2;
    case Layout::bf16: return (matrix.k + matrix.k % 2) * kDensePanel * 2;
    case Layout::int8: return matrix.k * kGroupedPanel;
    case Layout::int4: return matrix.k * kGroupedPanel / 2;
  }
  return 0;
}

std::uint32_t load_word(const void* p) {
  std::uint32_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

// Writes every panel as [words][width], word i of output n being `word_at(n, i)`, and 0 for the padding outputs of
// the last panel. In blocks, so that whole cache lines of a row are read and whole lines are written.
template <class Word, class WordAt>
void write_panels(Context& context, const PackedMatrix& matrix, std::int64_t words, const WordAt& word_at) {
  struct Job {
    const PackedMatrix& matrix;
    std::int64_t words;
    const WordAt& word_at;
  } job{matrix, words, word_at};
  context.run(
      panels(matrix),
      [](void* argument, std::int64_t panel, int) {
        const Job& job = *static_cast<const Job*>(argument);
        constexpr std::int64_t block = 16;
        const std::int64_t width = panel_width(job.matrix.layout), first = panel * width;
        Word* const to = static_cast<Word*>(const_cast<void*>(job.matrix.data)) + first * job.words;
        for (std::int64_t i0 = 0; i0 < job.words; i0 += block) {
          const std::int64_t i1 = std::min(i0 + block, job.words);
          for (std::int64_t lane = 0; lane < width; ++lane) {
            const bool real = first + lane < job.matrix.n;
            for (std::int64_t i = i0; i < i1; ++i) to[i * width + lane] = real ? job.word_at(first + lane, i) : Word{0};
          }
        }
      },
      &job);
}

template <class T>
void pack_dense(Context& context, const PackedMatrix& matrix, const UnpackedMatrix& source) {
  const auto* const from = static_cast<const T*>(source.values);
  write_panels<T>(context, matrix, matrix.k,
                  [&](std::int64_t n, std::int64_t i) { return from[n * source.row_stride + i]; });
}

void pack_bf16(Context& context, const PackedMatrix& matrix, const UnpackedMatrix& source) {
  const auto* const from = static_cast<const std::uint16_t*>(source.values);
  write_panels<std::uint32_t>(context, matrix, (matrix.k + 1) / 2, [&](std::int64_t n, std::int64_t i) {
    const std::uint16_t* const value = from + n * source.row_stride + i * 2;
    return i * 2 + 1 < matrix.k ? load_word(value) : std::uint32_t{*value};
  });
}

void pack_int8(Context& context, const PackedMatrix& matrix, const UnpackedMatrix& source) {
  const auto* const from = static_cast<const std::int8_t*>(source.values);
  write_panels<std::uint32_t>(context, matrix, matrix.k / 4, [&](std::int64_t n, std::int64_t i) {
    // code + 128 of four bytes: flip the sign bits.
    return load_word(from + n * source.row_stride + i * 4) ^ 0x80808080;
  });
}

void pack_int4(Context& context, const PackedMatrix& matrix, const UnpackedMatrix& source) {
  const auto* const from = static_cast<const std::int8_t*>(source.values);
  // code + 8 of a four-bit two's complement number: flip its sign bit.
  const std::uint32_t flip = matrix.minimums == nullptr ? 0x08080808 : 0;
  write_panels<std::uint32_t>(context, matrix, matrix.k / 8, [&](std::int64_t n, std::int64_t i) {
    const std::int8_t* const low = from + n * source.row_stride + i / 4 * 32 + i % 4 * 4;
    return ((load_word(low) ^ flip) & 0x0F0F0F0F) | ((load_word(low + 16) ^ flip) & 0x0F0F0F0F) << 4;
  });
}

// [n, groups] to [panel][groups][16]. Scales and minimums of padding outputs are 0, so their products are too.
template <class T>
void pack_scales(const PackedMatrix& matrix, const void* source, const void* packed) {
  const std::int64_t groups = matrix.k / matrix.group;
  const T* const from = static_cast<const T*>(source);
  T* to = static_cast<T*>(const_cast<void*>(packed));
  for (std::int64_t first = 0; first < matrix.n; first += kGroupedPanel) {
    for (std::int64_t g = 0; g < groups; ++g) {
      for (std::int64_t n = first; n < first + kGroupedPanel; ++n) *to++ = n < matrix.n ? from[n * groups + g] : T{0};
    }
  }
}

float widen_bf16(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

float widen_f16(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000) << 16;
  const std::uint32_t magnitude = static_cast<std::uint32_t>(bits & 0x7FFF) << 13;
  if ((bits & 0x7C00) == 0x7C00) return std::bit_cast<float>(sign | 0x7F800000 | magnitude);
  // The product moves the exponent's bias and normalises denormals; it is exact.
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112F));
}

float widen(float value) { return value; }
float widen(std::uint16_t half) { return widen_f16(half); }

// The code of output `lane` of a panel at position i, as the file had it.
int code_at(const PackedMatrix& matrix, const std::uint8_t* panel, std::int64_t lane, std::int64_t i) {
  if (matrix.layout == Layout::int8) return panel[(i / 4 * kGroupedPanel + lane) * 4 + i % 4] - 128;
  const std::int64_t group = i / 32, quad = i % 16 / 4;
  const int both = panel[((group * 4 + quad) * kGroupedPanel + lane) * 4 + i % 4];
  const int code = i % 32 < 16 ? both & 15 : both >> 4;
  return matrix.minimums == nullptr ? code - 8 : code;
}

template <class Scale>
void gather_grouped(const PackedMatrix& matrix, std::int64_t panel, std::int64_t lane, float* out) {
  const std::int64_t groups = matrix.k / matrix.group;
  const auto* const codes = static_cast<const std::uint8_t*>(matrix.data) + panel * panel_bytes(matrix);
  const auto* const scales = static_cast<const Scale*>(matrix.scales);
  const auto* const minimums = static_cast<const Scale*>(matrix.minimums);
  for (std::int64_t g = 0; g < groups; ++g) {
    const std::int64_t place = (panel * groups + g) * kGroupedPanel + lane;
    const float scale = widen(scales[place]);
    for (std::int64_t i = g * matrix.group; i < (g + 1) * matrix.group; ++i) {
      const float product = scale * static_cast<float>(code_at(matrix, codes, lane, i));
      out[i] = minimums == nullptr ? product : product + widen(minimums[place]);
    }
  }
}

void gather_row(const PackedMatrix& matrix, std::int64_t id, float* out) {
  const int width = panel_width(matrix.layout);
  const std::int64_t panel = id / width, lane = id % width;
  const auto* const data = static_cast<const std::byte*>(matrix.data) + panel * panel_bytes(matrix);
  const auto* const words = reinterpret_cast<const float*>(data);
  const auto* const halves = reinterpret_cast<const std::uint16_t*>(data);
  switch (matrix.layout) {
    case Layout::fp32:
      for (std::int64_t i = 0; i < matrix.k; ++i) out[i] = words[i * kDensePanel + lane];
      break;
    case Layout::fp16:
      for (std::int64_t i = 0; i < matrix.k; ++i) out[i] = widen_f16(halves[i * kDensePanel + lane]);
      break;
    case Layout::bf16:
      for (std::int64_t i = 0; i < matrix.k; ++i) {
        out[i] = widen_bf16(halves[(i / 2 * kDensePanel + lane) * 2 + i % 2]);
      }
      break;
    case Layout::int8:
    case Layout::int4:
      (matrix.half_scales ? gather_grouped<std::uint16_t> : gather_grouped<float>)(matrix, panel, lane, out);
      break;
  }
}

}  // namespace

std::size_t data_bytes(const PackedMatrix& matrix) {
  return static_cast<std::size_t>(panels(matrix) * panel_bytes(matrix));
}

std::size_t scale_bytes(const PackedMatrix& matrix) {
  if (matrix.group == 0) return 0;
  const std::int64_t scales = panels(matrix) * kGroupedPanel * (matrix.k / matrix.group);
  return static_cast<std::size_t>(scales) * (matrix.half_scales ? 2 : 4);
}

void pack(Context& context, const PackedMatrix& matrix, const UnpackedMatrix& source) {
  switch (matrix.layout) {
    case Layout::fp32: pack_dense<float>(context, matrix, source); return;
    case Layout::fp16: pack_dense<std::uint16_t>(context, matrix, source); return;
    case Layout::bf16: pack_bf16(context, matrix, source); return;
    case Layout::int8: pack_int8(context, matrix, source); break;
    case Layout::int4: pack_int4(context, matrix, source); break;
  }
  const auto pack_any_scales = matrix.half_scales ? pack_scales<std::uint16_t> : pack_scales<float>;
  pack_any_scales(matrix, source.scales, matrix.scales);
  if (matrix.minimums != nullptr) pack_any_scales(matrix, source.minimums, matrix.minimums);
}

void gather(Context& context, const PackedMatrix& matrix, const std::int32_t* ids, std::int64_t count, float* out,
            std::int64_t first, bool part) {
  for (std::int64_t i = 0; i < count && !part; ++i) {
    if (ids[i] < 0 || ids[i] >= matrix.n) {
      throw std::out_of_range("row " + std::to_string(ids[i]) + " of a table of " + std::to_string(matrix.n));
    }
  }
  struct Job {
    const PackedMatrix& matrix;
    const std::int32_t* ids;
    std::int64_t first;
    float* out;
  } job{matrix, ids, first, out};
  context.run(
      count,
      [](void* argument, std::int64_t i, int) {
        const Job& job = *static_cast<const Job*>(argument);
        const std::int64_t row = job.ids[i] - job.first;
        float* const to = job.out + i * job.matrix.k;
        if (row >= 0 && row < job.matrix.n) {
          gather_row(job.matrix, row, to);
        } else {
          std::fill(to, to + job.matrix.k, 0.0F);
        }
      },
      &job);
}

}  // namespace ropeway
