// Memory of exactly the size that a kernel is told. What touches the byte after it (and, for some buffers, the byte
// before it) crashes on a guard page; under a sanitizer or valgrind it comes from the heap, whose bounds they check.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <type_traits>
#include <utility>
#include <vector>

namespace ropeway::tests {

struct Allocation {
  void* base = nullptr;
  std::size_t mapped = 0;  // 0: from the heap
  std::size_t alignment = 0;
  void* data = nullptr;
};

Allocation allocate(std::size_t bytes, std::size_t alignment);
void release(const Allocation& allocation);

template <class T>
class Buffer {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  // Every byte is 0xFF at first: a NaN in float32, bfloat16 and float16, -1 in integers.
  Buffer() : Buffer(0) {}
  explicit Buffer(std::size_t count, std::size_t alignment = alignof(T))
      : memory_(allocate(count * sizeof(T), alignment)), count_(count) {
    if (count > 0) std::memset(memory_.data, 0xFF, count * sizeof(T));
  }
  explicit Buffer(const std::vector<T>& values) : Buffer(values.size()) {
    std::copy(values.begin(), values.end(), begin());
  }
  Buffer(std::initializer_list<T> values) : Buffer(std::vector<T>(values)) {}
  Buffer(Buffer&& other) noexcept : memory_(std::exchange(other.memory_, {})), count_(std::exchange(other.count_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~Buffer() { release(memory_); }

  T* data() { return static_cast<T*>(memory_.data); }
  const T* data() const { return static_cast<const T*>(memory_.data); }
  std::size_t size() const { return count_; }
  T& operator[](std::size_t i) { return data()[i]; }
  const T& operator[](std::size_t i) const { return data()[i]; }
  T* begin() { return data(); }
  T* end() { return data() + count_; }
  const T* begin() const { return data(); }
  const T* end() const { return data() + count_; }

 private:
  Allocation memory_;
  std::size_t count_;
};

}  // namespace ropeway::tests
