#include "core/rows.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace ropeway {
namespace {

void check_places(const TokenTable& table, const std::int32_t* slot, const std::int32_t* position, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    if (slot[i] < 0 || slot[i] >= table.slots || position[i] < 0 || position[i] >= table.positions) {
      throw std::out_of_range("position " + std::to_string(position[i]) + " of slot " + std::to_string(slot[i]) +
                              " is not in the table of " + std::to_string(table.slots) + " slots with " +
                              std::to_string(table.positions) + " positions");
    }
  }
}

}  // namespace

void read_tokens(const TokenTable& table, const std::int32_t* slot, const std::int32_t* position, std::int64_t count,
                 std::int32_t* out) {
  check_places(table, slot, position, count);
  for (std::int64_t i = 0; i < count; ++i) out[i] = table.tokens[slot[i] * table.stride + position[i]];
}

void write_tokens(const TokenTable& table, const std::int32_t* slot, const std::int32_t* position, std::int64_t count,
                  const std::int32_t* values) {
  check_places(table, slot, position, count);
  for (std::int64_t i = 0; i < count; ++i) table.tokens[slot[i] * table.stride + position[i]] = values[i];
}

void take(const float* x, std::int64_t rows, std::int64_t size, const std::int32_t* index, std::int64_t count,
          float* out) {
  for (std::int64_t i = 0; i < count; ++i) {
    if (index[i] < 0 || index[i] >= rows) {
      throw std::out_of_range("row " + std::to_string(index[i]) + " of " + std::to_string(rows));
    }
  }
  for (std::int64_t i = 0; i < count; ++i) {
    std::memcpy(out + i * size, x + index[i] * size, sizeof(float) * static_cast<std::size_t>(size));
  }
}

}  // namespace ropeway
