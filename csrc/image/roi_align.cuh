// SPDX-License-Identifier: Apache-2.0
// What the kernels of RoI-align have in common.
#pragma once

#include "image/roi_align.h"
#include "runtime/launch.cuh"
#include "runtime/workspace.h"

namespace baracuda {

constexpr int kLanes = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kRoiThreads = 256;
// Blocks beyond this loop.
constexpr int64_t kMostBlocks = INT32_MAX;
// Shared memory that lets two blocks run beside each other.
constexpr int64_t kMostSharedOfTwo = 100 * 1024;
constexpr int64_t kRoiVector = 16;

constexpr int64_t whole_vectors(int64_t bytes) { return (bytes + kRoiVector - 1) / kRoiVector * kRoiVector; }

template <class T, int kVector>
struct alignas(sizeof(T) * kVector) RoiPack {
  T value[kVector];
};

// By members, so that it stays in registers.
template <class Real>
__device__ inline RoiAxis<Real> axis_of(const RoiGeometry<Real> &roi, bool is_y) {
  return {is_y ? roi.y.start : roi.x.start, is_y ? roi.y.bin : roi.x.bin, is_y ? roi.y.grid : roi.x.grid,
          is_y ? roi.y.cells : roi.x.cells};
}

// Quotients of small numbers by one that many of them share.
struct SmallDivider {
  uint32_t divisor;
  uint32_t multiplier;

  __device__ explicit SmallDivider(int32_t by) : divisor(uint32_t(by)), multiplier(0xffffffffu / uint32_t(by) + 1) {}
  __device__ int32_t divide(int32_t number) const {
    return divisor == 1 ? number : int32_t(__umulhi(uint32_t(number), multiplier));
  }
};

// More RoIs than these keep their order: ranking compares all with all.
constexpr int64_t kMostRanked = 4096;

// About in proportion to a RoI's work; with at most so many rows.
__device__ inline float roi_area(const RoiProblem &problem, const RoiRows &rois, int64_t r,
                                 float most_rows = INFINITY) {
  const auto side = [&](int from, int32_t cells) {
    const float scale = float(problem.scale);
    const float begin = fminf(fmaxf(rois.at<float>(r, from) * scale, 0), float(cells));
    const float end = fminf(fmaxf(rois.at<float>(r, from + 2) * scale, 0), float(cells));
    return fabsf(end - begin);
  };
  constexpr float kMargin = 8;
  return (fminf(side(2, problem.h), most_rows) + kMargin) * (side(1, problem.w) + kMargin);
}

// `declared` are the bytes of the kernel's own variables.
template <class Kernel>
void allow_roi_shared(Kernel *kernel, size_t bytes, size_t declared = 16 * 1024) {
  constexpr size_t kWithoutAsking = 48 * 1024;
  if (bytes + declared > kWithoutAsking)
    check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    int(bytes)),
               "cudaFuncSetAttribute");
}

}  // namespace baracuda
