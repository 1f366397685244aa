// SPDX-License-Identifier: Apache-2.0
#include "runtime/recording.h"

#include "runtime/error.h"

#if BARACUDA_WITH_CUDA
#include "runtime/cuda.h"
#endif

namespace baracuda {

thread_local Recording *recording = nullptr;

#if BARACUDA_WITH_CUDA

void issue(const Launch &launch, void *const *arguments, Stream stream) {
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

#else

void issue(const Launch &, void *const *, Stream) { unsupported("this build of baracuda has no CUDA"); }

#endif

void replay(const Recording &recorded, Stream stream) {
  const DeviceGuard guard(recorded.device);
  for (const RecordedLaunch &kept : recorded.launches) issue(kept.launch, kept.arguments.data(), stream);
}

}  // namespace baracuda
