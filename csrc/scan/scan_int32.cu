// SPDX-License-Identifier: Apache-2.0
#include "scan/scan_cuda.cuh"

namespace baracuda::scan {

const CudaScan *scan_cuda_int32(const Choice &choice) { return scan_cuda_of<int32_t>(choice); }

}  // namespace baracuda::scan
