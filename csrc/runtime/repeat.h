// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include <dlpack/dlpack.h>

#include "runtime/recording.h"

namespace baracuda {

// All that the checks and the launches of a run follow from: which plan, and what the caller's
// DLTensors say.
class Signature {
 public:
  // Whether these are what was read. Nothing is when the last `read` failed.
  bool is_of(uint64_t plan, DLTensor *const operands[], const uint64_t flags[], size_t count) const;
  // False when it does not fit, or when a tensor is too malformed to be read.
  bool read(uint64_t plan, DLTensor *const operands[], const uint64_t flags[], size_t count);

 private:
  static constexpr size_t kWords = 96;

  // 0: nothing was read.
  size_t count_ = 0;
  uint64_t words_[kWords];
};

// A call that comes again, as those of a loop do, need not be checked and worked out again. Each
// thread remembers the signatures of its latest runs, and from the second time on their launches.
struct RepeatedRun {
  Signature signature;
  bool recorded = false;
  Recording recording;
};

// The thread's place for runs of this plan and these addresses, which may hold another's.
RepeatedRun &place_of_run(uint64_t plan, DLTensor *const operands[], size_t count);

}  // namespace baracuda
