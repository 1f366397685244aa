// SPDX-License-Identifier: Apache-2.0
#include "scan/scan_cuda.cuh"

namespace baracuda::scan {

const CudaScan *scan_cuda_int8(const Choice &choice) { return scan_cuda_of<int8_t, uint8_t, bool>(choice); }

}  // namespace baracuda::scan
