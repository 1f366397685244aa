// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "runtime/device.h"

namespace baracuda {

// The kernel launches of one run, kept to be issued again: what a bound plan holds where its run
// consists of launches alone.
struct RecordedLaunch {
  const void *kernel;
  unsigned blocks;
  unsigned threads;
  size_t shared_bytes;
  std::shared_ptr<void> values;  // owns what `arguments` point to
  std::vector<void *> arguments;
};

using Recording = std::vector<RecordedLaunch>;

// While this is set in a thread, `launch` adds to it instead of launching.
extern thread_local Recording *recording;

void replay(const Recording &launches, Stream stream);

}  // namespace baracuda
