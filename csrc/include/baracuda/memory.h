/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BARACUDA_MEMORY_H_
#define BARACUDA_MEMORY_H_

#include <stddef.h>
#include <stdint.h>

#include <dlpack/dlpack.h>

#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Memory, streams and events for programs that bring no framework. Nothing in a plan needs them. */

/* Devices this build can use now; 0 with a sentence in baracuda_last_error_message when CUDA is
 * not built in, or the driver is missing or too old. Never fails. */
int32_t baracuda_cuda_device_count(void);
baracuda_status baracuda_cuda_current_device(int32_t *ordinal);

/* On CUDA from a pool of the library's own on that device, in the order of `stream`; on the CPU
 * aligned host memory. The address is a multiple of 256. */
baracuda_status baracuda_allocate(DLDevice device, size_t bytes, void *stream, void **data);
baracuda_status baracuda_free(DLDevice device, void *data, void *stream);

/* Between host and device or on one device, in the order of `stream`. */
baracuda_status baracuda_copy(DLDevice device, void *dst, const void *src, size_t bytes, void *stream);
baracuda_status baracuda_synchronize(DLDevice device, void *stream);

/* What `later` does from now on waits for what `earlier` holds now. While `later` is captured in a
 * graph and `earlier` isn't, it does nothing: the caller orders that before the capture. */
baracuda_status baracuda_order_streams(int32_t ordinal, void *earlier, void *later);

#ifdef __cplusplus
}
#endif

#endif
