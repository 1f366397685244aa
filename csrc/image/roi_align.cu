// SPDX-License-Identifier: Apache-2.0
#include <string_view>

#include "image/roi_align_launch.cuh"

namespace baracuda {

extern template void roi_align_cuda_of<float16>(const RoiAlignForward &, Stream);
extern template void roi_align_cuda_of<bfloat16>(const RoiAlignForward &, Stream);
extern template void roi_align_cuda_of<float>(const RoiAlignForward &, Stream);
extern template void roi_align_cuda_of<double>(const RoiAlignForward &, Stream);
extern template void roi_align_backward_cuda_of<float16>(const RoiAlignBackward &, Stream);
extern template void roi_align_backward_cuda_of<bfloat16>(const RoiAlignBackward &, Stream);
extern template void roi_align_backward_cuda_of<float>(const RoiAlignBackward &, Stream);
extern template void roi_align_backward_cuda_of<double>(const RoiAlignBackward &, Stream);

namespace {

// Ends a kernel that has nothing to do; the architecture of its machine code is that of all.
__global__ void arch_probe() {}

RoiTable table_of(const RoiAlignProblem &problem, DLDataType dtype, Workspace &space) {
  return dtype == DTypeOf<double>::value ? roi_table<double>(problem, space) : roi_table<float>(problem, space);
}

}  // namespace

void roi_align_cuda(const RoiAlignForward &call, Stream stream) {
  dispatch_dtype<float16, bfloat16, float, double>(
      call.dtype, [&](auto tag) { roi_align_cuda_of<typename decltype(tag)::type>(call, stream); });
}

void roi_align_backward_cuda(const RoiAlignBackward &call, Stream stream) {
  dispatch_dtype<float16, bfloat16, float, double>(
      call.dtype, [&](auto tag) { roi_align_backward_cuda_of<typename decltype(tag)::type>(call, stream); });
}

const char *roi_align_path(const RoiAlignProblem &problem, DLDataType dtype, bool has_workspace) {
  const bool is_double = dtype == DTypeOf<double>::value;
  const int64_t warp_bytes = has_workspace ? 0
                             : is_double   ? roi_warp_bytes<double>(problem.pooled_w)
                                           : roi_warp_bytes<float>(problem.pooled_w);
  const size_t shared =
      is_double ? roi_shared_bytes<double>(problem, warp_bytes) : roi_shared_bytes<float>(problem, warp_bytes);
  return shared == 0 ? "any" : has_workspace ? "turned" : "rows";
}

size_t roi_align_workspace(const RoiAlignProblem &problem, DLDataType dtype) {
  const std::string_view path = roi_align_path(problem, dtype, true);
  return path == "turned" && roi_align_turns(problem)
             ? size_t(storage_bytes(dtype, problem.n * problem.c * problem.h * problem.w))
             : 0;
}

const char *roi_align_backward_path(const RoiAlignProblem &problem, DLDataType dtype) {
  Workspace space(nullptr);
  return table_of(problem, dtype, space).record > 0 ? "tiles" : "any";
}

size_t roi_align_backward_workspace(const RoiAlignProblem &problem, DLDataType dtype) {
  Workspace space(nullptr);
  table_of(problem, dtype, space);
  return space.size();
}

std::string image_arch(const char *plan) { return kernel_arch(plan, reinterpret_cast<const void *>(arch_probe)); }

}  // namespace baracuda
