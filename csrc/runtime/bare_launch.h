/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BARACUDA_RUNTIME_BARE_LAUNCH_H_
#define BARACUDA_RUNTIME_BARE_LAUNCH_H_

#include "baracuda/plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The yardstick of host overhead: nanoseconds that CUDA's launch of the bound plan's own kernel, grid
 * and arguments takes, over `count` launches in a row on `stream`, and nothing else. For plans whose
 * run is a single kernel. Not part of the public API. */
baracuda_status baracuda_bare_launch(const baracuda_bound *bound, int32_t count, void *stream, double *nanoseconds);

#ifdef __cplusplus
}
#endif

#endif
