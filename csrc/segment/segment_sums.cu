// SPDX-License-Identifier: Apache-2.0
#include "segment/segment_totals.cuh"

namespace baracuda {

void segment_sums(const SegmentForward &call, const SegmentSpace &space, Stream stream) {
  dispatch_dtype<float16, bfloat16, float, double>(call.problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    segment_totals<SegmentSum, T, 16 / sizeof(T)>(call, space, stream);
  });
}

}  // namespace baracuda
