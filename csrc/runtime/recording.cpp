// SPDX-License-Identifier: Apache-2.0
#include "runtime/recording.h"

#if BARACUDA_WITH_CUDA
#include "runtime/cuda.h"
#endif

namespace baracuda {

thread_local Recording *recording = nullptr;

void replay(const Recording &launches, Stream stream) {
#if BARACUDA_WITH_CUDA
  for (const RecordedLaunch &launch : launches)
    check_cuda(cudaLaunchKernel(launch.kernel, dim3(launch.blocks), dim3(launch.threads),
                                const_cast<void **>(launch.arguments.data()), launch.shared_bytes,
                                static_cast<cudaStream_t>(stream)),
               "kernel launch");
#else
  (void)launches, (void)stream;
#endif
}

}  // namespace baracuda
