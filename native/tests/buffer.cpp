#include "buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <new>

namespace ropeway::tests {
namespace {

bool from_heap() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return true;
#else
  static const bool wanted = std::getenv("ROPEWAY_TEST_HEAP") != nullptr;
  return wanted;
#endif
}

std::size_t round_up(std::size_t n, std::size_t step) { return (n + step - 1) / step * step; }

}  // namespace

Allocation allocate(std::size_t bytes, std::size_t alignment) {
  if (from_heap()) {
    void* const data = ::operator new(bytes, std::align_val_t(alignment));
    return {data, 0, alignment, data};
  }
  static const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t inside = round_up(bytes, page), mapped = inside + 2 * page;
  void* const base = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) throw std::bad_alloc();
  auto* const first = static_cast<std::byte*>(base) + page;
  if (inside > 0 && mprotect(first, inside, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  // Three of four end at a guard page, the fourth begins at one.
  static unsigned count = 0;
  const bool at_end = ++count % 4 != 0;
  const std::size_t offset = at_end ? (inside - bytes) / alignment * alignment : 0;
  return {base, mapped, alignment, first + offset};
}

void release(const Allocation& allocation) {
  if (allocation.mapped > 0) {
    munmap(allocation.base, allocation.mapped);
  } else {
    ::operator delete(allocation.base, std::align_val_t(allocation.alignment));
  }
}

}  // namespace ropeway::tests
