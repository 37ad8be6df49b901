#include "core/context.h"

#include <mutex>
#include <new>

#include "core/float_mode.h"
#include "core/pool.h"

namespace ropeway {
namespace {

constexpr std::align_val_t alignment{64};

}  // namespace

struct Context::Impl {
  explicit Impl(int threads) : pool(threads) {}
  ~Impl() { ::operator delete(scratch, alignment); }

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
    ::operator delete(impl_->scratch, alignment);
    impl_->scratch = nullptr;
    impl_->scratch_bytes = 0;
    impl_->scratch = static_cast<std::byte*>(::operator new(grown, alignment));
    impl_->scratch_bytes = grown;
  }
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
