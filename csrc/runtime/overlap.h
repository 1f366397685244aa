// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "runtime/tensor.h"

namespace baracuda {

enum class Overlap { none, some, undecided };

// Whether two views share a half byte of memory. Exact for strided views, up to a bound on the
// work, beyond which the answer is `undecided`.
Overlap shared_memory(const Tensor &a, const Tensor &b);

// Whether two elements of one view share memory.
Overlap self_overlap(const Tensor &tensor);

// Whether two views are the same elements in the same order.
bool same_elements(const Tensor &a, const Tensor &b);

}  // namespace baracuda
