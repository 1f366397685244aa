// SPDX-License-Identifier: Apache-2.0
#include "image/roi_align_atomic.cuh"
#include "image/roi_align_backward.cuh"
#include "image/roi_align_forward.cuh"

namespace baracuda {

extern template void roi_align_cuda_of<float16>(const RoiAlignForward &, Stream);
extern template void roi_align_cuda_of<bfloat16>(const RoiAlignForward &, Stream);
extern template void roi_align_cuda_of<float>(const RoiAlignForward &, Stream);
extern template void roi_align_cuda_of<double>(const RoiAlignForward &, Stream);
extern template void roi_align_backward_cuda_of<float16>(const RoiAlignBackward &, Stream);
extern template void roi_align_backward_cuda_of<bfloat16>(const RoiAlignBackward &, Stream);
extern template void roi_align_backward_cuda_of<float>(const RoiAlignBackward &, Stream);
extern template void roi_align_backward_cuda_of<double>(const RoiAlignBackward &, Stream);
extern template void roi_align_add_cuda_of<float>(const RoiAlignBackward &, Stream);
extern template void roi_align_add_cuda_of<double>(const RoiAlignBackward &, Stream);

namespace {

// Ends a kernel that has nothing to do; the architecture of its machine code is that of all.
__global__ void arch_probe() {}

template <class Body>
auto with_real(DLDataType dtype, const Body &body) {
  return dtype == DTypeOf<double>::value ? body(double()) : body(float());
}

}  // namespace

void roi_align_cuda(const RoiAlignForward &call, Stream stream) {
  dispatch_dtype<float16, bfloat16, float, double>(
      call.dtype, [&](auto tag) { roi_align_cuda_of<typename decltype(tag)::type>(call, stream); });
}

void roi_align_backward_cuda(const RoiAlignBackward &call, Stream stream) {
  if (call.any_order) {
    dispatch_dtype<float, double>(call.dtype,
                                  [&](auto tag) { roi_align_add_cuda_of<typename decltype(tag)::type>(call, stream); });
    return;
  }
  dispatch_dtype<float16, bfloat16, float, double>(
      call.dtype, [&](auto tag) { roi_align_backward_cuda_of<typename decltype(tag)::type>(call, stream); });
}

const char *roi_align_path(const RoiAlignProblem &problem, DLDataType dtype, bool turn) {
  const auto fits = [&](auto real) { return roi_rows_shared<decltype(real)>(problem, 1) > 0; };
  return !with_real(dtype, fits) ? "any" : turn ? "turned" : "rows";
}

bool roi_align_turns(const RoiAlignProblem &problem, DLDataType dtype) {
  bool turns = false;
  dispatch_dtype<float16, bfloat16, float, double>(
      dtype, [&](auto tag) { turns = roi_align_turns_of<typename decltype(tag)::type>(problem); });
  return turns;
}

size_t roi_align_workspace(const RoiAlignProblem &problem, DLDataType dtype, bool turn) {
  Workspace space(nullptr);
  dispatch_dtype<float16, bfloat16, float, double>(
      dtype, [&](auto tag) { roi_align_space<typename decltype(tag)::type>(problem, turn, space); });
  return space.size();
}

const char *roi_align_backward_path(const RoiAlignProblem &problem, DLDataType dtype) {
  const auto fits = [&](auto real) {
    Workspace space(nullptr);
    return roi_table<decltype(real)>(problem, space).record > 0;
  };
  return with_real(dtype, fits) ? "tiles" : "any";
}

size_t roi_align_backward_workspace(const RoiAlignProblem &problem, DLDataType dtype) {
  return with_real(dtype, [&](auto real) {
    Workspace space(nullptr);
    roi_table<decltype(real)>(problem, space);
    return space.size();
  });
}

bool roi_align_adds(const RoiAlignProblem &problem, DLDataType dtype) {
  bool adds = false;
  dispatch_dtype<float, double>(dtype,
                                [&](auto tag) { adds = roi_align_adds_of<typename decltype(tag)::type>(problem); });
  return adds;
}

size_t roi_align_add_workspace(const RoiAlignProblem &problem, DLDataType dtype) {
  return roi_align_workspace(problem, dtype, false);
}

std::string image_arch(const char *plan) { return kernel_arch(plan, reinterpret_cast<const void *>(arch_probe)); }

}  // namespace baracuda
