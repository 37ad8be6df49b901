// What a kernel sees of the machine: threads to run tiles on, and scratch memory.
//
// This header is included by units compiled for one instruction set. It must hold no std:: template and no inline
// function that such a unit could emit: the linker keeps one copy of an inline function for everyone, and it may
// be the one full of AVX-512 instructions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/isa.h"

namespace ropeway {

// Computes tile `tile` of a job; `worker` in [0, threads) is this thread's, so per-worker scratch can be indexed.
using TileFunction = void (*)(void* job, std::int64_t tile, int worker);

// Threads, scratch memory and the instruction set of one device. Kernels of one context run one at a time (`Call`
// takes its lock). A process must not fork while contexts live and then use them in the child: threads do not
// survive a fork.
class Context {
 public:
  Context(int threads, Isa isa);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  int threads() const;
  Isa isa() const;

  // Runs tiles [0, tiles), each once, on all threads, the calling one included; returns when all are done.
  // A thread takes tiles that follow on each other, as long as none is behind; which one takes which is left to chance:
  // a tile's result must not depend on it. Does not nest.
  void run(std::int64_t tiles, TileFunction function, void* job);

  // At least `bytes` of memory aligned to 64 bytes, contents undefined, valid until the next call of `scratch`:
  // a kernel asks once and divides it up. Throws std::bad_alloc.
  std::byte* scratch(std::size_t bytes);

 private:
  friend class Call;
  struct Impl;
  Impl* impl_;
  int threads_;
  Isa isa_;
};

// A kernel call, from the binding's side: holds the context's lock and sets this thread's floating-point control
// word to the one all pool threads have (round to nearest even, denormals kept, no traps).
class Call {
 public:
  explicit Call(Context& context);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

 private:
  Context& context_;
  std::uint64_t saved_mode_;
};

}  // namespace ropeway
