/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BARACUDA_BARACUDA_H_
#define BARACUDA_BARACUDA_H_

#include "image.h"      // IWYU pragma: export
#include "kv_cache.h"   // IWYU pragma: export
#include "layout.h"     // IWYU pragma: export
#include "memory.h"     // IWYU pragma: export
#include "operators.h"  // IWYU pragma: export
#include "plan.h"       // IWYU pragma: export
#include "pooling.h"    // IWYU pragma: export
#include "scan.h"       // IWYU pragma: export
#include "segment.h"    // IWYU pragma: export
#include "status.h"     // IWYU pragma: export

#endif
