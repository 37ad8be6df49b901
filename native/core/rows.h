// Rows and entries of plain arrays, picked by index.
#pragma once

#include <cstdint>

namespace ropeway {

// Token ids of all requests: [slots, positions], rows `stride` apart.
struct TokenTable {
  std::int32_t* tokens;
  std::int64_t slots, positions, stride;
};

// out[i] = tokens[slot[i], position[i]], and the other way round. Throw std::out_of_range for a place outside the
// table, before anything is written.
void read_tokens(const TokenTable& table, const std::int32_t* slot, const std::int32_t* position, std::int64_t count,
                 std::int32_t* out);
void write_tokens(const TokenTable& table, const std::int32_t* slot, const std::int32_t* position, std::int64_t count,
                  const std::int32_t* values);

// out [count, size] = rows `index` of x [rows, size]. Throws std::out_of_range for a row that x does not have.
void take(const float* x, std::int64_t rows, std::int64_t size, const std::int32_t* index, std::int64_t count,
          float* out);

}  // namespace ropeway
