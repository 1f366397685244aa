// SPDX-License-Identifier: Apache-2.0
#include "segment/segment_totals.cuh"

namespace baracuda {

void segment_integer_sums(const SegmentForward &call, const SegmentSpace &space, Stream stream) {
  dispatch_dtype<int8_t, uint8_t, int32_t, int64_t>(call.problem.dtype, [&](auto tag) {
    segment_totals<SegmentSum, typename decltype(tag)::type, 1>(call, space, stream);
  });
}

void segment_products(const SegmentForward &call, const SegmentSpace &space, Stream stream) {
  dispatch_dtype<float16, bfloat16, float, double, int8_t, uint8_t, int32_t, int64_t>(
      call.problem.dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
        constexpr int kVector = std::is_integral_v<T> ? 1 : 16 / sizeof(T);
        segment_totals<SegmentProd, T, kVector>(call, space, stream);
      });
}

}  // namespace baracuda
