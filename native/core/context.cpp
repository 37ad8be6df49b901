#include "core/context.h"

#include <mutex>
#include <new>

#include "core/float_mode.h"
#include "core/pool.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>

#include <cstring>
#endif

namespace ropeway {
namespace {

constexpr std::align_val_t alignment{64};

// Under the address sanitizer, what was not asked for may not be touched, and what was is full of NaNs.
void expose([[maybe_unused]] std::byte* memory, [[maybe_unused]] std::size_t asked, [[maybe_unused]] std::size_t all) {
#if defined(__SANITIZE_ADDRESS__)
  if (all == 0) return;
  __asan_unpoison_memory_region(memory, all);
  std::memset(memory, 0xFF, all);
  __asan_poison_memory_region(memory + asked, all - asked);
#endif
}

}  // namespace

struct Context::Impl {
  explicit Impl(int threads) : pool(threads) {}
  ~Impl() { discard_scratch(); }

  void discard_scratch() {
    expose(scratch, scratch_bytes, scratch_bytes);
    ::operator delete(scratch, alignment);
    scratch = nullptr;
    scratch_bytes = 0;
  }

  std::mutex mutex;
  Pool pool;
  std::byte* scratch = nullptr;
  std::size_t scratch_bytes = 0;
};

Context::Context(int threads, Isa isa) : impl_(new Impl(threads)), threads_(threads), isa_(isa) {}

Context::~Context() { delete impl_; }

int Context::threads() const { return threads_; }

Isa Context::isa() const { return isa_; }

void Context::run(std::int64_t tiles, TileFunction function, void* job) { impl_->pool.run(tiles, function, job); }

std::byte* Context::scratch(std::size_t bytes) {
  if (bytes > impl_->scratch_bytes) {
    const std::size_t grown = bytes + bytes / 4;
    impl_->discard_scratch();
    impl_->scratch = static_cast<std::byte*>(::operator new(grown, alignment));
    impl_->scratch_bytes = grown;
  }
  expose(impl_->scratch, bytes, impl_->scratch_bytes);
  return impl_->scratch;
}

Call::Call(Context& context) : context_(context) {
  context_.impl_->mutex.lock();
  saved_mode_ = set_default_float_mode();
}

Call::~Call() {
  restore_float_mode(saved_mode_);
  context_.impl_->mutex.unlock();
}

}  // namespace ropeway
