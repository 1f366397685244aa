// SPDX-License-Identifier: Apache-2.0
#include "image/roi_align_atomic.cuh"
#include "image/roi_align_backward.cuh"
#include "image/roi_align_forward.cuh"

namespace baracuda {

template void roi_align_cuda_of<double>(const RoiAlignForward &call, Stream stream);
template void roi_align_backward_cuda_of<double>(const RoiAlignBackward &call, Stream stream);
template void roi_align_add_cuda_of<double>(const RoiAlignBackward &call, Stream stream);

}  // namespace baracuda
