// The keys of int4_full whose group is not full yet, in bfloat16: kept beside the cache, by the number of their block.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "kernels/attention.h"

namespace ropeway {

// Memory for the keys of one group in all layers, aligned to 64 bytes.
struct FreeAligned {
  void operator()(std::byte* memory) const;
};
using AlignedBytes = std::unique_ptr<std::byte, FreeAligned>;

AlignedBytes aligned_bytes(std::int64_t size);

// Not for several threads. All calls are made in the order in which the device runs steps and copies.
class BegunKeys {
 public:
  BegunKeys(std::int64_t layers, std::int64_t kv_heads, std::int64_t head_dim)
      : layer_bytes_(kv_heads * begun_bytes(head_dim)), area_bytes_(layers * layer_bytes_) {}
  BegunKeys(const BegunKeys&) = delete;

  std::int64_t layer_bytes() const { return layer_bytes_; }

  // A plan begins. The groups that the plan before last filled are not read any more: at most two plans, the parts of
  // one step, are under way at a time.
  void next_plan();

  // What a row reads and leaves: null where its first group begins with it, and where its last one is full.
  struct Row {
    std::byte* before;
    std::byte* after;
  };

  // A row at positions [first, last] whose blocks are in `table`. With a slot, 0 or more, what an earlier sequence has
  // left there is let go of; -1: unknown. Throws std::invalid_argument where the row goes on in a group whose beginning
  // is not kept.
  Row add_row(std::int64_t first, std::int64_t last, const std::int32_t* table, std::int64_t block_size,
              std::int64_t slot);

  // A block is copied to the host, and back to one of this device, which may be another; `place`: its address there.
  void to_host(std::int64_t block, std::uintptr_t place);
  void to_device(std::uintptr_t place, std::int64_t block);

  // Bytes of all groups kept, those on the host too.
  std::int64_t nbytes() const;

 private:
  struct Begun {
    AlignedBytes keys;
    std::int64_t slot;
  };

  AlignedBytes take();
  void drop(std::int64_t block);

  std::int64_t layer_bytes_, area_bytes_;
  std::unordered_map<std::int64_t, Begun> on_device_;  // by block
  std::unordered_map<std::uintptr_t, AlignedBytes> on_host_;
  std::unordered_map<std::int64_t, std::int64_t> block_of_slot_;
  std::vector<AlignedBytes> filled_, filled_before_, free_;  // filled by the last plan, and by the one before it
};

}  // namespace ropeway
