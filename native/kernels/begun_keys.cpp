#include "kernels/begun_keys.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace ropeway {

void FreeAligned::operator()(std::byte* memory) const { std::free(memory); }

AlignedBytes aligned_bytes(std::int64_t size) {
  void* memory = std::aligned_alloc(64, (static_cast<std::size_t>(size) + 63) / 64 * 64);
  if (memory == nullptr && size > 0) throw std::bad_alloc();
  return AlignedBytes(static_cast<std::byte*>(memory));
}

void BegunKeys::next_plan() {
  for (AlignedBytes& area : filled_before_) free_.push_back(std::move(area));
  filled_before_ = std::exchange(filled_, {});
}

BegunKeys::Row BegunKeys::add_row(std::int64_t first, std::int64_t last, const std::int32_t* table,
                                  std::int64_t block_size, std::int64_t slot) {
  AlignedBytes before;
  if (first % kKeyGroup != 0) {
    const auto found = on_device_.find(table[first / block_size]);
    if (found == on_device_.end()) {
      throw std::invalid_argument("block " + std::to_string(table[first / block_size]) + " goes on at position " +
                                  std::to_string(first) + ", but its group's earlier keys are not kept");
    }
    before = std::move(found->second.keys);
  }
  for (std::int64_t i = first / block_size; i <= last / block_size; ++i) drop(table[i]);
  const auto left = block_of_slot_.find(slot);
  if (left != block_of_slot_.end()) {
    const auto old = on_device_.find(left->second);
    if (old != on_device_.end() && old->second.slot == slot) drop(left->second);  // else the block is another's by now
    block_of_slot_.erase(left);
  }

  Row row{before.get(), nullptr};
  const bool full = (last + 1) % kKeyGroup == 0;
  if (before && (full || first / kKeyGroup != last / kKeyGroup)) filled_.push_back(std::move(before));
  if (full) return row;
  AlignedBytes keys = before ? std::move(before) : take();
  row.after = keys.get();
  const std::int64_t block = table[last / block_size];
  if (slot >= 0) block_of_slot_[slot] = block;
  on_device_.insert_or_assign(block, Begun{std::move(keys), slot});
  return row;
}

void BegunKeys::to_host(std::int64_t block, std::uintptr_t place) {
  const auto found = on_device_.find(block);
  if (found == on_device_.end()) {
    on_host_.erase(place);
    return;
  }
  AlignedBytes& copy = on_host_[place];
  if (!copy) copy = aligned_bytes(area_bytes_);
  std::memcpy(copy.get(), found->second.keys.get(), static_cast<std::size_t>(area_bytes_));
}

void BegunKeys::to_device(std::uintptr_t place, std::int64_t block) {
  drop(block);
  const auto found = on_host_.find(place);
  if (found == on_host_.end()) return;
  AlignedBytes keys = take();
  std::memcpy(keys.get(), found->second.get(), static_cast<std::size_t>(area_bytes_));
  on_device_.emplace(block, Begun{std::move(keys), -1});
}

std::int64_t BegunKeys::nbytes() const {
  const std::size_t areas =
      on_device_.size() + on_host_.size() + filled_.size() + filled_before_.size() + free_.size();
  return static_cast<std::int64_t>(areas) * area_bytes_;
}

AlignedBytes BegunKeys::take() {
  if (free_.empty()) return aligned_bytes(area_bytes_);
  AlignedBytes area = std::move(free_.back());
  free_.pop_back();
  return area;
}

void BegunKeys::drop(std::int64_t block) {
  const auto found = on_device_.find(block);
  if (found == on_device_.end()) return;
  if (found->second.keys) free_.push_back(std::move(found->second.keys));
  on_device_.erase(found);
}

}  // namespace ropeway
