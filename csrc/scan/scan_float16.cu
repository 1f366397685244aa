// SPDX-License-Identifier: Apache-2.0
#include "scan/scan_cuda.cuh"

namespace baracuda::scan {

const CudaScan *scan_cuda_float16(const Choice &choice) { return scan_cuda_of<float16>(choice); }

}  // namespace baracuda::scan
