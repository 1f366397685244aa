// SPDX-License-Identifier: Apache-2.0
#include "scan/scan_cuda.cuh"

namespace baracuda::scan {

const CudaScan *scan_cuda_float32(const Choice &choice) { return scan_cuda_of<float>(choice); }

}  // namespace baracuda::scan
