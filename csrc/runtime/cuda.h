// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include <cuda_runtime.h>

#include "runtime/device.h"
#include "runtime/error.h"

namespace baracuda {

inline void check_cuda(cudaError_t error, const char *call) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw Error(BARACUDA_CUDA_ERROR,
              text(call, " failed: ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")"));
}

// The architecture whose machine code of this kernel runs on the current device: "sm_90".
std::string kernel_arch(const char *plan, const void *kernel);

}  // namespace baracuda
