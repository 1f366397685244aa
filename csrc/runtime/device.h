// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include <dlpack/dlpack.h>

namespace baracuda {

// False in a build without CUDA. `if constexpr (kWithCuda)` leaves no reference to a kernel's
// symbol there.
constexpr bool kWithCuda = BARACUDA_WITH_CUDA;

// A cudaStream_t, without CUDA's headers.
using Stream = void *;

struct Device {
  DLDeviceType type = kDLCPU;
  int ordinal = 0;

  bool is_cuda() const { return type == kDLCUDA; }
};

std::string to_string(DLDevice device);
std::string to_string(const Device &device);

// Resolves ordinal -1 and refuses, each with its own sentence, a build without CUDA, a driver
// that is missing or too old, an ordinal that is not there, and a card older than sm_80.
Device resolve_device(const char *plan, DLDevice device);

// Makes the device current for the scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(const Device &device) {
    if constexpr (kWithCuda)
      if (device.is_cuda()) enter(device.ordinal);
  }
  ~DeviceGuard() {
    if constexpr (kWithCuda)
      if (previous_ >= 0) leave();
  }
  DeviceGuard(const DeviceGuard &) = delete;
  DeviceGuard &operator=(const DeviceGuard &) = delete;

  // The device of the thread's latest guard.
  static int guarded() noexcept;
  // Whether the kernels that this build holds for the thread's guarded device are compiled to wait
  // for earlier work themselves (Grid::early).
  static bool kernels_can_wait() noexcept;

 private:
  void enter(int ordinal);
  void leave() noexcept;
  int previous_ = -1;
};

}  // namespace baracuda
