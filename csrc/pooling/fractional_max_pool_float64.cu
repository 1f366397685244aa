// SPDX-License-Identifier: Apache-2.0
#include "pooling/fractional_max_pool_launch.cuh"

namespace baracuda {

template void fractional_max_pool_cuda_of<double>(const PoolForward &call, Stream stream);
template void fractional_max_pool_backward_cuda_of<double>(const PoolBackward &call, Stream stream);

}  // namespace baracuda
