// SPDX-License-Identifier: Apache-2.0
#include "runtime/bare_launch.h"

#include "runtime/device.h"
#include "runtime/error.h"

#if BARACUDA_WITH_CUDA

#include <chrono>

#include "runtime/cuda.h"

namespace baracuda {
namespace {

// What run launches is read off a captured graph, so that no plan needs code for this.
class CapturedRun {
 public:
  CapturedRun(const baracuda_bound *bound, void *workspace, size_t workspace_size) {
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    const baracuda_status status = baracuda_bound_run(bound, workspace, workspace_size, stream_);
    check_cuda(cudaStreamEndCapture(stream_, &graph_), "cudaStreamEndCapture");
    if (status != BARACUDA_SUCCESS) throw Error(status, baracuda_last_error_message());
  }
  ~CapturedRun() {
    if (graph_) cudaGraphDestroy(graph_);
    if (stream_) cudaStreamDestroy(stream_);
  }
  CapturedRun(const CapturedRun &) = delete;
  CapturedRun &operator=(const CapturedRun &) = delete;

  cudaKernelNodeParams kernel() const {
    size_t count = 0;
    check_cuda(cudaGraphGetNodes(graph_, nullptr, &count), "cudaGraphGetNodes");
    if (count != 1) unsupported("bare launch: the run is ", count, " operations, not one kernel");
    cudaGraphNode_t node;
    check_cuda(cudaGraphGetNodes(graph_, &node, &count), "cudaGraphGetNodes");
    cudaKernelNodeParams parameters = {};
    check_cuda(cudaGraphKernelNodeGetParams(node, &parameters), "cudaGraphKernelNodeGetParams");
    return parameters;
  }

 private:
  cudaStream_t stream_ = nullptr;
  cudaGraph_t graph_ = nullptr;
};

}  // namespace
}  // namespace baracuda

#endif

extern "C" baracuda_status baracuda_bare_launch(const baracuda_bound *bound, void *workspace, size_t workspace_size,
                                                int32_t count, void *stream, double *nanoseconds) {
  return baracuda::guarded([&] {
#if BARACUDA_WITH_CUDA
    using Clock = std::chrono::steady_clock;
    const baracuda::CapturedRun run(bound, workspace, workspace_size);
    const cudaKernelNodeParams kernel = run.kernel();
    const Clock::time_point start = Clock::now();
    for (int32_t i = 0; i < count; ++i)
      baracuda::check_cuda(cudaLaunchKernel(kernel.func, kernel.gridDim, kernel.blockDim, kernel.kernelParams,
                                            kernel.sharedMemBytes, static_cast<cudaStream_t>(stream)),
                           "cudaLaunchKernel");
    *nanoseconds = std::chrono::duration<double, std::nano>(Clock::now() - start).count() / count;
    baracuda::check_cuda(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "cudaStreamSynchronize");
#else
    (void)bound, (void)workspace, (void)workspace_size, (void)count, (void)stream, (void)nanoseconds;
    baracuda::unsupported("bare launch: this build of baracuda has no CUDA");
#endif
  });
}
