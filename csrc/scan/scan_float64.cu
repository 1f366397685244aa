// SPDX-License-Identifier: Apache-2.0
#include "scan/scan_cuda.cuh"

namespace baracuda::scan {

const CudaScan *scan_cuda_float64(const Choice &choice) { return scan_cuda_of<double>(choice); }

}  // namespace baracuda::scan
