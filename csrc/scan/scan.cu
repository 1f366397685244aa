// SPDX-License-Identifier: Apache-2.0
#include "scan/scan_cuda.cuh"

namespace baracuda::scan {
namespace {

constexpr int kElementThreads = 256;

// Row-major element `index` of a tensor: its offset, and its place along one axis.
struct Place {
  int64_t offset;
  int64_t along;
};
__device__ Place place_of(const Tensor &tensor, int64_t index, int axis) {
  Place place = {0, 0};
#pragma unroll 1
  for (int i = tensor.shape.rank - 1; i >= 0; --i) {
    const int64_t extent = tensor.shape.extent[i];
    const int64_t rest = index / extent;
    const int64_t own = index - rest * extent;
    index = rest;
    place.offset += own * tensor.stride[i];
    if (i == axis) place.along = own;
  }
  return place;
}

template <class T>
__global__ void __launch_bounds__(kElementThreads) mark(const __grid_constant__ MarkSource source, int64_t count) {
  for (int64_t index = int64_t(blockIdx.x) * kElementThreads + threadIdx.x; index < count;
       index += int64_t(gridDim.x) * kElementThreads) {
    const Place place = place_of(source.from, index, source.axis);
    const T *from = reinterpret_cast<const T *>(source.from.data) + place.offset;
    reinterpret_cast<uint8_t *>(source.marks.data)[index] =
        is_mark<T>(source, place.along, [&](int64_t step) { return from[step]; });
  }
}

__global__ void __launch_bounds__(kElementThreads)
    zero(const __grid_constant__ Tensor tensor, int64_t count, int bytes) {
  for (int64_t index = int64_t(blockIdx.x) * kElementThreads + threadIdx.x; index < count;
       index += int64_t(gridDim.x) * kElementThreads) {
    std::byte *to = tensor.data + place_of(tensor, index, -1).offset * bytes;
    for (int i = 0; i < bytes; ++i) to[i] = std::byte(0);
  }
}

Grid grid_for(int64_t count) {
  return {std::min<int64_t>(ceil_div(count, kElementThreads), INT32_MAX), kElementThreads};
}

}  // namespace

const CudaScan *scan_cuda(const Choice &choice) {
  for (const auto scans : {scan_cuda_float32, scan_cuda_float64, scan_cuda_float16, scan_cuda_bfloat16, scan_cuda_int8,
                           scan_cuda_int16, scan_cuda_int32, scan_cuda_int64})
    if (const CudaScan *scan = scans(choice)) return scan;
  return nullptr;
}

void mark_cuda(const MarkSource &source, Stream stream) {
  const int64_t count = source.from.shape.count();
  dispatch_dtype<int32_t, int64_t, float, double, float16, bfloat16>(source.from.dtype, [&](auto tag) {
    launch(mark<typename decltype(tag)::type>, grid_for(count), stream, source, count);
  });
}

void zero_cuda(const Tensor &tensor, Stream stream) {
  const int64_t count = tensor.shape.count();
  launch(zero, grid_for(count), stream, tensor, count, int(tensor.dtype.bits / 8));
}

}  // namespace baracuda::scan
