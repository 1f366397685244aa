// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <bit>
#include <tuple>
#include <type_traits>
#include <utility>

#include "runtime/bits.h"
#include "runtime/cuda.h"
#include "runtime/recording.h"

namespace baracuda {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t unit) { return ceil_div(a, unit) * unit; }

// Where work is cut without regard to the card, so that workspaces and the order of sums follow from the problem alone,
// it is cut for so many.
constexpr int64_t kMultiprocessors = 132;

// What so many bytes are loaded and stored as, in one instruction.
template <int kBytes>
struct MemoryWordOf : UnsignedOf<kBytes> {};
template <>
struct MemoryWordOf<16> {
  using type = uint4;
};
template <int kBytes>
using MemoryWord = typename MemoryWordOf<kBytes>::type;

struct Grid {
  int64_t blocks;
  int threads;
  size_t shared_bytes = 0;
  // The kernel may be given its blocks while the kernel before it in the stream still runs, which
  // hides a launch's latency (programmatic dependent launch). Only for kernels of which every thread
  // calls `wait_for_earlier_work` before it touches global memory or returns.
  bool early = false;
};

// Waits until all that the stream's order puts before this kernel is done and visible. What comes
// after must not read through the non-coherent path (__ldg, const __restrict__): the compiler takes
// such memory for constant and may read it sooner.
__device__ __forceinline__ void wait_for_earlier_work() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets an early kernel that follows take the room that this one leaves; it waits there for this
// one's end.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), Grid grid, Stream stream, Arguments &&...arguments) {
  using Values = std::tuple<std::remove_const_t<Parameters>...>;
  const auto pointers = [](auto &...values) { return std::array<void *, sizeof...(values)>{&values...}; };
  const Launch shape = {reinterpret_cast<const void *>(kernel), unsigned(grid.blocks), unsigned(grid.threads),
                        grid.shared_bytes, grid.early};
  if (recording) {
    auto values = std::make_shared<Values>(std::forward<Arguments>(arguments)...);
    const auto places = std::apply(pointers, *values);
    recording->launches.push_back({shape, values, {places.begin(), places.end()}});
    return;
  }
  Values values(std::forward<Arguments>(arguments)...);
  issue(shape, std::apply(pointers, values).data(), stream);
}

// Division of any 32-bit number by one that the host knows: a multiplication and shifts.
// T. Granlund, P. L. Montgomery, Division by Invariant Integers using Multiplication, 1994, fig. 4.1.
struct Divider {
  uint32_t divisor = 1;
  uint32_t multiplier = 1;
  uint32_t shift1 = 0;
  uint32_t shift2 = 0;

  Divider() = default;
  explicit Divider(uint32_t d) : divisor(d) {
    const uint32_t bits = uint32_t(std::bit_width(d - 1));
    multiplier = uint32_t(((uint64_t(1) << 32) * ((uint64_t(1) << bits) - d)) / d + 1);
    shift1 = bits < 1 ? bits : 1;
    shift2 = bits > 1 ? bits - 1 : 0;
  }
  __device__ uint32_t divide(uint32_t n) const {
    const uint32_t high = __umulhi(multiplier, n);
    return (high + ((n - high) >> shift1)) >> shift2;
  }
};

}  // namespace baracuda
