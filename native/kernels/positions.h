// Positions from outside, checked before a table of them is read.
#pragma once

#include <cstdint>

namespace ropeway {

// Throws std::out_of_range for a position outside [0, table_positions).
void check_positions(const std::int32_t* positions, std::int64_t tokens, std::int64_t table_positions);

}  // namespace ropeway
