// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <tuple>
#include <type_traits>
#include <utility>

#include "runtime/cuda.h"
#include "runtime/recording.h"

namespace baracuda {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Grid {
  int64_t blocks;
  int threads;
  size_t shared_bytes = 0;
};

// Launches and checks this launch's own status, not one that another library left behind.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), Grid grid, Stream stream, Arguments &&...arguments) {
  using Values = std::tuple<std::remove_const_t<Parameters>...>;
  const auto pointers = [](auto &...values) { return std::array<void *, sizeof...(values)>{&values...}; };
  const void *symbol = reinterpret_cast<const void *>(kernel);
  if (recording) {
    auto values = std::make_shared<Values>(std::forward<Arguments>(arguments)...);
    const auto places = std::apply(pointers, *values);
    recording->push_back({symbol,
                          unsigned(grid.blocks),
                          unsigned(grid.threads),
                          grid.shared_bytes,
                          values,
                          {places.begin(), places.end()}});
    return;
  }
  Values values(std::forward<Arguments>(arguments)...);
  auto places = std::apply(pointers, values);
  check_cuda(cudaLaunchKernel(symbol, dim3(unsigned(grid.blocks)), dim3(unsigned(grid.threads)), places.data(),
                              grid.shared_bytes, static_cast<cudaStream_t>(stream)),
             "kernel launch");
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
    uint32_t bits = 0;
    while (bits < 32 && (uint64_t(1) << bits) < d) ++bits;
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
