#include "kernels/positions.h"

#include <stdexcept>
#include <string>

namespace ropeway {

void check_positions(const std::int32_t* positions, std::int64_t tokens, std::int64_t table_positions) {
  for (std::int64_t i = 0; i < tokens; ++i) {
    if (positions[i] < 0 || positions[i] >= table_positions) {
      throw std::out_of_range("rope: position " + std::to_string(positions[i]) + " of token " + std::to_string(i) +
                              " is outside the table of " + std::to_string(table_positions) + " positions");
    }
  }
}

}  // namespace ropeway
