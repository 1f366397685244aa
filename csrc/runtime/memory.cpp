// SPDX-License-Identifier: Apache-2.0
#include "baracuda/memory.h"

#include <cstdlib>
#include <cstring>
#include <new>

#include "runtime/device.h"
#include "runtime/error.h"

#if BARACUDA_WITH_CUDA
#include <array>
#include <mutex>

#include "runtime/cuda.h"
#endif

namespace baracuda {
namespace {

constexpr size_t kAlignment = 256;

size_t rounded(size_t bytes) {
  if (bytes > SIZE_MAX - kAlignment) throw std::bad_alloc();
  return bytes == 0 ? kAlignment : (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

#if BARACUDA_WITH_CUDA

constexpr int kMaxDevices = 64;

// While it lives, this thread may make calls that a capture in progress would forbid.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture &) = delete;
  RelaxedCapture &operator=(const RelaxedCapture &) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Whether the stream is being captured. Asking the legacy stream while another is captured is an
// error that only says that it isn't.
bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  return status == cudaStreamCaptureStatusActive;
}

// A pool of our own on each device, because the default pool gives its memory back at every
// synchronisation, which would make each workspace a new mapping.
cudaMemPool_t pool_of(int ordinal) {
  static std::mutex mutex;
  static std::array<cudaMemPool_t, kMaxDevices> pools{};
  if (ordinal < 0 || ordinal >= kMaxDevices) invalid("allocate: no device cuda:", ordinal);
  const std::lock_guard<std::mutex> lock(mutex);
  cudaMemPool_t &pool = pools[size_t(ordinal)];
  if (!pool) {
    // The first workspace may be asked for while a graph is captured; making a pool is no part of it.
    const RelaxedCapture relaxed;
    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location = {cudaMemLocationTypeDevice, ordinal};
    check_cuda(cudaMemPoolCreate(&pool, &properties), "cudaMemPoolCreate");
    uint64_t keep = UINT64_MAX;
    check_cuda(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep), "cudaMemPoolSetAttribute");
  }
  return pool;
}

#endif

}  // namespace
}  // namespace baracuda

using baracuda::Device;
using baracuda::DeviceGuard;
using baracuda::guarded;
using baracuda::resolve_device;

extern "C" {

baracuda_status baracuda_allocate(DLDevice device, size_t bytes, void *stream, void **data) {
  return guarded([&] {
    if (!data) baracuda::invalid("allocate: data is NULL");
    *data = nullptr;
    const Device chosen = resolve_device("allocate", device);
    if (!chosen.is_cuda()) {
      *data = std::aligned_alloc(baracuda::kAlignment, baracuda::rounded(bytes));
      if (!*data) throw std::bad_alloc();
      return;
    }
#if BARACUDA_WITH_CUDA
    const DeviceGuard guard(chosen);
    baracuda::check_cuda(cudaMallocFromPoolAsync(data, baracuda::rounded(bytes), baracuda::pool_of(chosen.ordinal),
                                                 static_cast<cudaStream_t>(stream)),
                         "cudaMallocFromPoolAsync");
#endif
  });
  (void)stream;
}

baracuda_status baracuda_free(DLDevice device, void *data, void *stream) {
  return guarded([&] {
    if (device.device_type == kDLCPU) {
      std::free(data);
      return;
    }
#if BARACUDA_WITH_CUDA
    const DeviceGuard guard(Device{kDLCUDA, device.device_id});
    baracuda::check_cuda(cudaFreeAsync(data, static_cast<cudaStream_t>(stream)), "cudaFreeAsync");
#endif
  });
  (void)stream;
}

baracuda_status baracuda_copy(DLDevice device, void *dst, const void *src, size_t bytes, void *stream) {
  return guarded([&] {
    const Device chosen = resolve_device("copy", device);
    if (bytes == 0) return;
    if (!chosen.is_cuda()) {
      std::memcpy(dst, src, bytes);
      return;
    }
#if BARACUDA_WITH_CUDA
    const DeviceGuard guard(chosen);
    baracuda::check_cuda(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)),
                         "cudaMemcpyAsync");
#endif
  });
  (void)stream;
}

baracuda_status baracuda_synchronize(DLDevice device, void *stream) {
  return guarded([&] {
    const Device chosen = resolve_device("synchronize", device);
    if (!chosen.is_cuda()) return;
#if BARACUDA_WITH_CUDA
    const DeviceGuard guard(chosen);
    baracuda::check_cuda(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "cudaStreamSynchronize");
#endif
  });
  (void)stream;
}

baracuda_status baracuda_order_streams(int32_t ordinal, void *earlier, void *later) {
  return guarded([&] {
    const Device chosen = resolve_device("order_streams", {kDLCUDA, ordinal});
    (void)chosen;
#if BARACUDA_WITH_CUDA
    const DeviceGuard guard(chosen);
    // A graph can't wait for what is not in it: that was ordered before the capture began.
    if (baracuda::is_capturing(static_cast<cudaStream_t>(later)) &&
        !baracuda::is_capturing(static_cast<cudaStream_t>(earlier)))
      return;
    cudaEvent_t event = nullptr;
    baracuda::check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    cudaError_t error = cudaEventRecord(event, static_cast<cudaStream_t>(earlier));
    if (error == cudaSuccess) error = cudaStreamWaitEvent(static_cast<cudaStream_t>(later), event, 0);
    // The event lives on in the streams that use it until they are past it.
    cudaEventDestroy(event);
    baracuda::check_cuda(error, "cudaStreamWaitEvent");
#endif
  });
  (void)earlier, (void)later;
}
}
