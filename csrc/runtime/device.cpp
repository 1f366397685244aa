// SPDX-License-Identifier: Apache-2.0
#include "runtime/device.h"

#include <array>
#include <atomic>

#include "baracuda/memory.h"
#include "runtime/error.h"

#if BARACUDA_WITH_CUDA
#include "runtime/cuda.h"
#endif

namespace baracuda {

std::string to_string(DLDevice device) {
  switch (device.device_type) {
    case kDLCPU:
      return "cpu";
    case kDLCUDA:
      return text("cuda:", device.device_id);
    case kDLCUDAHost:
      return "pinned host memory";
    case kDLCUDAManaged:
      return "managed memory";
    default:
      return text("DLPack device type ", int(device.device_type));
  }
}

std::string to_string(const Device &device) { return to_string(DLDevice{device.type, device.ordinal}); }

#if BARACUDA_WITH_CUDA

namespace {

// By device ordinal: whether kernels there were compiled for sm_90 or newer. Set when a plan asks
// for its kernel's architecture; before that nothing is launched. Devices beyond do without.
std::array<std::atomic<bool>, 64> can_wait = {};

thread_local int guarded_device = 0;

std::string version_text(int version) { return text(version / 1000, ".", version % 1000 / 10); }

[[noreturn]] void cuda_unavailable(const std::string &sentence) { throw Error(BARACUDA_CUDA_ERROR, sentence); }

int count_devices() {
  int driver = 0;
  int runtime = 0;
  int count = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  const cudaError_t error = cudaGetDeviceCount(&count);
  // A failing query must not be taken for a later launch's error.
  cudaGetLastError();
  if (driver == 0) cuda_unavailable("no NVIDIA driver was found; use device=\"cpu\" on this machine");
  if (error == cudaErrorInsufficientDriver)
    cuda_unavailable(text("the NVIDIA driver is too old: it supports CUDA ", version_text(driver),
                          ", this build needs CUDA ", version_text(runtime)));
  if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0))
    cuda_unavailable("the NVIDIA driver reports no GPU; use device=\"cpu\" on this machine");
  if (error != cudaSuccess) cuda_unavailable(text("CUDA could not start: ", cudaGetErrorString(error)));
  return count;
}

}  // namespace

Device resolve_device(const char *plan, DLDevice device) {
  if (device.device_type == kDLCPU) return {kDLCPU, 0};
  if (device.device_type != kDLCUDA) unsupported(plan, ": device must be cpu or cuda, got ", to_string(device));
  int count = 0;
  try {
    count = count_devices();
  } catch (const Error &error) {
    throw Error(error.status, text(plan, ": ", error.what()));
  }
  int ordinal = device.device_id;
  if (ordinal == -1) check_cuda(cudaGetDevice(&ordinal), "cudaGetDevice");
  if (ordinal < 0 || ordinal >= count)
    invalid(plan, ": device cuda:", ordinal, " is not there; this machine has ", count, count == 1 ? " GPU" : " GPUs");
  int major = 0;
  int minor = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal), "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal), "cudaDeviceGetAttribute");
  if (major < 8)
    unsupported(plan, ": device cuda:", ordinal, " is sm_", major, minor, "; kernels are for sm_80 and newer");
  return {kDLCUDA, ordinal};
}

void DeviceGuard::enter(int ordinal) {
  guarded_device = ordinal;
  // A plan has been made, so the count is known; a lone device is always the current one.
  static const bool alone = count_devices() == 1;
  if (alone) return;
  int current = 0;
  check_cuda(cudaGetDevice(&current), "cudaGetDevice");
  if (current == ordinal) return;
  check_cuda(cudaSetDevice(ordinal), "cudaSetDevice");
  previous_ = current;
}

void DeviceGuard::leave() noexcept { cudaSetDevice(previous_); }

int DeviceGuard::guarded() noexcept { return guarded_device; }

bool DeviceGuard::kernels_can_wait() noexcept {
  return size_t(guarded_device) < can_wait.size() && can_wait[size_t(guarded_device)].load(std::memory_order_relaxed);
}

std::string kernel_arch(const char *plan, const void *kernel) {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    cudaGetLastError();
    unsupported(plan, ": this build holds no kernel for the architecture of the current GPU");
  }
  check_cuda(error, "cudaFuncGetAttributes");
  // Not the binary's version: code made at load time from sm_80's PTX has no such instruction.
  if (size_t(guarded_device) < can_wait.size()) can_wait[size_t(guarded_device)] = attributes.ptxVersion >= 90;
  return text("sm_", attributes.binaryVersion);
}

#else

Device resolve_device(const char *plan, DLDevice device) {
  if (device.device_type == kDLCPU) return {kDLCPU, 0};
  if (device.device_type != kDLCUDA) unsupported(plan, ": device must be cpu or cuda, got ", to_string(device));
  throw Error(BARACUDA_CUDA_ERROR, text(plan, ": this build of baracuda has no CUDA; use device=\"cpu\""));
}

#endif

}  // namespace baracuda

extern "C" {

int32_t baracuda_cuda_device_count(void) {
  int32_t count = 0;
  baracuda::guarded([&] {
#if BARACUDA_WITH_CUDA
    count = baracuda::count_devices();
#else
    throw baracuda::Error(BARACUDA_CUDA_ERROR, "this build of baracuda has no CUDA");
#endif
  });
  return count;
}

baracuda_status baracuda_cuda_current_device(int32_t *ordinal) {
  return baracuda::guarded([&] { *ordinal = baracuda::resolve_device("device", {kDLCUDA, -1}).ordinal; });
}
}
