// A step that contradicts itself or the cache is refused, and nothing outside its columns is read on the way.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "machine.h"
#include "paged_cache.h"

namespace ropeway::tests {
namespace {

struct RandomStep {
  Step step;
  std::int64_t row;  // one that computes something, and has blocks
};

RandomStep random_step(std::uint64_t seed, Random& random) {
  const std::int64_t most = 2 + static_cast<std::int64_t>(seed) * 4;
  const std::int64_t block_size = std::int64_t{1} << random.integer(0, 6), num_blocks = random.integer(1, 200);
  std::vector<StepRow> rows;
  std::vector<std::int64_t> busy;
  for (std::int64_t i = random.integer(1, 6); i > 0; --i) {
    const std::int64_t length = random.integer(1, most);
    const std::int64_t count = random.chance(0.2) && i > 1 ? 0 : random.integer(1, length);
    if (count > 0) busy.push_back(static_cast<std::int64_t>(rows.size()));
    StepRow& row = rows.emplace_back(StepRow{count, length, {}});
    for (std::int64_t first = 0; first < length; first += block_size) {
      row.blocks.push_back(static_cast<std::int32_t>(random.integer(0, num_blocks - 1)));
    }
  }
  return {make_step(rows, block_size, num_blocks, random.integer(1, 8), random), random.pick(busy)};
}

using Damage = std::function<void(Step&, std::int64_t row, Random&)>;

struct NamedDamage {
  std::string name;
  Damage apply;
};

const std::int32_t kExtremes[] = {INT32_MIN, INT32_MIN + 1, -2, -1, INT32_MAX - 1, INT32_MAX};

std::int32_t extreme(Random& random) { return kExtremes[random.integer(0, 5)]; }

std::int32_t* table_of(Step& step, std::int64_t row) { return step.block_table.data() + row * step.table_stride; }

std::int64_t blocks_of(const Step& step, std::int64_t row) {
  return (step.kv_lengths[static_cast<std::size_t>(row)] + step.block_size - 1) / step.block_size;
}

const std::vector<NamedDamage> kDamages = {
    {"a block that the cache does not have",
     [](Step& step, std::int64_t row, Random& random) {
       const std::int32_t block = random.chance(0.5) ? extreme(random) : static_cast<std::int32_t>(step.num_blocks);
       table_of(step, row)[random.integer(0, blocks_of(step, row) - 1)] = block;
     }},
    {"a length that positions do not end at",
     [](Step& step, std::int64_t row, Random& random) {
       std::int32_t& length = step.kv_lengths[static_cast<std::size_t>(row)];
       length = random.chance(0.5) ? extreme(random) : length + (random.chance(0.5) ? 1 : -1);
     }},
    {"positions that do not end at the length",
     [](Step& step, std::int64_t row, Random& random) {
       const auto first = static_cast<std::size_t>(step.query_start[static_cast<std::size_t>(row)]);
       std::int32_t& position = step.positions[first];
       position = random.chance(0.5) ? extreme(random) : position + (random.chance(0.5) ? 1 : -1);
     }},
    {"positions that do not follow each other",
     [](Step& step, std::int64_t row, Random& random) {
       const std::int32_t* const start = step.query_start.data() + row;
       std::int32_t& position = step.positions[static_cast<std::size_t>(random.integer(start[0], start[1] - 1))];
       position = random.chance(0.5) ? extreme(random) : position + (random.chance(0.5) ? 1 : -1);
     }},
    {"a query_start that leaves the step",
     [](Step& step, std::int64_t row, Random& random) {
       step.query_start[static_cast<std::size_t>(row + random.integer(0, 1))] = extreme(random);
     }},
    {"a query_start that does not begin at 0",
     [](Step& step, std::int64_t, Random& random) {
       step.query_start[0] = static_cast<std::int32_t>(random.integer(1, 5));
     }},
    {"fewer tokens in rows than in the step",
     [](Step& step, std::int64_t, Random&) {
       Buffer<std::int32_t> more(step.positions.size() + 1);
       std::copy(step.positions.begin(), step.positions.end(), more.begin());
       more[step.positions.size()] = 0;
       step.positions = std::move(more);
     }},
    {"more tokens in rows than in the step",
     [](Step& step, std::int64_t, Random&) {
       const std::vector<std::int32_t> fewer(step.positions.begin(), step.positions.end() - 1);
       step.positions = Buffer<std::int32_t>(fewer);
     }},
    {"a table too narrow for a length",
     [](Step& step, std::int64_t row, Random&) { step.table_blocks = blocks_of(step, row) - 1; }},
    {"a cache without blocks", [](Step& step, std::int64_t, Random&) { step.num_blocks = 0; }},
};

TEST_CASE("a contradictory step is refused, whatever contradicts") {
  for (const NamedDamage& damage : kDamages) {
    CAPTURE(damage.name);
    for_seeds(300, [&](std::uint64_t seed) {
      Random random(seed);
      RandomStep drawn = random_step(seed % 60, random);
      CHECK_NOTHROW(AttentionPlan(drawn.step.view(), 2));
      damage.apply(drawn.step, drawn.row, random);
      CHECK_THROWS_AS(AttentionPlan(drawn.step.view(), static_cast<int>(random.integer(1, 4))), std::invalid_argument);
    });
  }
}

TEST_CASE("a row that computes nothing is not looked at") {
  for_seeds(300, [&](std::uint64_t seed) {
    Random random(seed);
    std::vector<StepRow> rows = {{3, 7, {0, 1}}, {0, 1, {}}, {2, 2, {2}}};
    Step step = make_step(rows, 4, 3, 2, random);
    step.kv_lengths[1] = extreme(random);
    for (std::int64_t i = 0; i < step.table_blocks; ++i) table_of(step, 1)[i] = extreme(random);
    const AttentionPlan plan(step.view(), static_cast<int>(random.integer(1, 4)));
    CHECK(plan.items.size() == 2);
    CHECK(plan.tasks.size() >= 2);
    Step empty = make_step({{0, 1, {}}, {0, 1, {}}}, 4, 3, 2, random);
    empty.kv_lengths[0] = extreme(random);
    CHECK(AttentionPlan(empty.view(), 2).tasks.empty());
  });
}

TEST_CASE("any numbers in a step's columns give a plan inside the cache or an error") {
  for_seeds(3000, [&](std::uint64_t seed) {
    Random random(seed);
    RandomStep drawn = random_step(seed % 40, random);
    Step& step = drawn.step;
    for (std::int64_t change = random.integer(1, 3); change > 0; --change) {
      Buffer<std::int32_t>* const columns[] = {&step.positions, &step.query_start, &step.kv_lengths, &step.block_table};
      Buffer<std::int32_t>& column = *columns[random.integer(0, 3)];
      std::int32_t& entry = column.data()[random.integer(0, static_cast<std::int64_t>(column.size()) - 1)];
      entry = random.chance(0.5) ? extreme(random) : static_cast<std::int32_t>(random.integer(-3, 300));
    }
    try {
      const AttentionPlan plan(step.view(), static_cast<int>(random.integer(1, 4)));
      for (const std::int64_t slot : plan.slots) CHECK((slot >= 0 && slot < step.num_blocks * step.block_size));
      for (const AttentionItem& item : plan.items) {
        const std::int64_t keys = std::int64_t{item.first_position} + item.tokens;
        CHECK((item.first_position >= 0 && item.tokens > 0 && item.row >= 0 && item.row < step.rows));
        CHECK(item.first_token + item.tokens <= static_cast<std::int32_t>(step.positions.size()));
        CHECK((0 <= item.span_begin && item.span_begin < item.span_end && item.span_end <= (keys + kSpan - 1) / kSpan));
        for (std::int64_t i = 0; i * step.block_size < keys; ++i) {
          const std::int32_t block = table_of(step, item.row)[i];
          CHECK((i < step.table_blocks && block >= 0 && block < step.num_blocks));
        }
      }
    } catch (const std::invalid_argument&) {
    }
  });
}

TEST_CASE("keys of a group that has begun go where their block goes, and go away with their sequence") {
  BegunKeys begun(2, 1, 5);
  const auto bytes = static_cast<std::size_t>(2 * begun.layer_bytes());
  const std::int32_t here[] = {4, 6}, there[] = {9}, elsewhere[] = {5};
  const BegunKeys::Row first = begun.add_row(0, 6, here, 32, 0);
  CHECK(first.before == nullptr);
  REQUIRE(first.after != nullptr);
  std::memset(first.after, 7, bytes);
  begun.to_host(4, 1000);
  begun.next_plan();
  CHECK(begun.add_row(0, 2, elsewhere, 32, 0).after != nullptr);  // another sequence in the slot
  CHECK_THROWS_AS(begun.add_row(7, 8, here, 32, 1), std::invalid_argument);
  begun.to_device(1000, 9);
  const BegunKeys::Row second = begun.add_row(7, 7, there, 32, 1);
  REQUIRE(second.before != nullptr);
  CHECK(std::all_of(second.before, second.before + bytes, [](std::byte byte) { return byte == std::byte{7}; }));
  CHECK(second.after == second.before);
  begun.next_plan();
  const BegunKeys::Row third = begun.add_row(8, 31, there, 32, 1);
  CHECK((third.before == second.before && third.after == nullptr));
  CHECK_THROWS_AS(begun.add_row(8, 8, there, 32, 1), std::invalid_argument);
  begun.next_plan();  // of a step's second part: the first one still reads
  CHECK(begun.add_row(3, 40, elsewhere, 64, 0).after != third.before);
  begun.to_device(1000, 4);
  CHECK(begun.add_row(7, 8, here, 32, 2).before != nullptr);  // copied, and there as often as it is wanted
  std::int64_t kept = 0;
  for (int round = 0; round < 9; ++round) {
    begun.to_device(1000, 9);
    begun.next_plan();
    begun.add_row(7, 8, there, 32, 3);
    begun.to_host(9, 1000);
    begun.next_plan();
    begun.add_row(9, 31, there, 32, 3);
    if (round == 3) kept = begun.nbytes();
  }
  CHECK(begun.nbytes() == kept);
}

}  // namespace
}  // namespace ropeway::tests
