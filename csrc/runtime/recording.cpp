// SPDX-License-Identifier: Apache-2.0
#include "runtime/recording.h"

#include "runtime/error.h"
#include "runtime/hash.h"

#if BARACUDA_WITH_CUDA
#include <cuda.h>

#include "runtime/cuda.h"
#endif

namespace baracuda {

thread_local Recording *recording = nullptr;

#if BARACUDA_WITH_CUDA

namespace {

using LaunchByDriver = CUresult (*)(const CUlaunchConfig *, CUfunction, void **, void **);

// NULL where the driver has none. Through the runtime, so that nothing links with the driver.
LaunchByDriver find_launch_by_driver() {
  void *entry = nullptr;
  cudaDriverEntryPointQueryResult found = {};
  if (cudaGetDriverEntryPointByVersion("cuLaunchKernelEx", &entry, 12000, cudaEnableDefault, &found) != cudaSuccess)
    cudaGetLastError();
  return reinterpret_cast<LaunchByDriver>(entry);
}

// The driver's handle of a kernel, which the runtime looks up at every launch; kept for each thread.
CUfunction find_function(const void *kernel) {
  struct Entry {
    const void *kernel;
    int device;
    CUfunction function;
  };
  constexpr int kBits = 7;
  static thread_local Entry entries[1 << kBits];
  const int device = DeviceGuard::guarded();
  Entry &entry = entries[fibonacci_hash(reinterpret_cast<uintptr_t>(kernel) + unsigned(device), kBits)];
  if (entry.kernel != kernel || entry.device != device) {
    cudaFunction_t function = nullptr;
    check_cuda(cudaGetFuncBySymbol(&function, kernel), "cudaGetFuncBySymbol");
    entry = {kernel, device, function};
  }
  return entry.function;
}

}  // namespace

void issue_by_runtime(const Launch &launch, void *const *arguments, Stream stream) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(launch.blocks);
  config.blockDim = dim3(launch.threads);
  config.dynamicSmemBytes = launch.shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = launch.early && DeviceGuard::kernels_can_wait();
  check_cuda(cudaLaunchKernelExC(&config, launch.kernel, const_cast<void **>(arguments)), "kernel launch");
}

void issue(const Launch &launch, void *const *arguments, Stream stream) {
  static const LaunchByDriver launch_by_driver = find_launch_by_driver();
  if (launch_by_driver) {
    CUlaunchAttribute attribute = {};
    attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
    CUlaunchConfig config = {};
    config.gridDimX = launch.blocks;
    config.gridDimY = config.gridDimZ = 1;
    config.blockDimX = launch.threads;
    config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = unsigned(launch.shared_bytes);
    config.hStream = static_cast<CUstream>(stream);
    config.attrs = &attribute;
    config.numAttrs = launch.early && DeviceGuard::kernels_can_wait();
    const CUfunction function = find_function(launch.kernel);
    if (launch_by_driver(&config, function, const_cast<void **>(arguments), nullptr) == CUDA_SUCCESS) return;
  }
  // Also where a thread has no context yet, which the runtime makes, and for the error's sentence.
  issue_by_runtime(launch, arguments, stream);
}

#else

void issue(const Launch &, void *const *, Stream) { unsupported("this build of baracuda has no CUDA"); }
void issue_by_runtime(const Launch &, void *const *, Stream) { unsupported("this build of baracuda has no CUDA"); }

#endif

void replay(const Recording &recorded, Stream stream) {
  const DeviceGuard guard(recorded.device);
  for (const RecordedLaunch &kept : recorded.launches) issue(kept.launch, kept.arguments.data(), stream);
}

}  // namespace baracuda
