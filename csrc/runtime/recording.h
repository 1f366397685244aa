// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "baracuda/plan.h"
#include "runtime/device.h"

namespace baracuda {

struct Launch {
  const void *kernel;
  unsigned blocks;
  unsigned threads;
  size_t shared_bytes;
  // See Grid::early in launch.cuh.
  bool early;
};

// Launches and checks this launch's own status, not one that another library left behind. A
// DeviceGuard is in scope.
void issue(const Launch &launch, void *const *arguments, Stream stream);

// The same by the one call of CUDA's runtime that programs use for it.
void issue_by_runtime(const Launch &launch, void *const *arguments, Stream stream);

// The kernel launches of one run, kept to be issued again: what a bound plan holds where its run
// consists of launches alone.
struct RecordedLaunch {
  Launch launch;
  std::shared_ptr<void> values;  // owns what `arguments` point to
  std::vector<void *> arguments;
};

struct Recording {
  Device device;
  std::vector<RecordedLaunch> launches;
};

// While this is set in a thread, `launch` adds to it instead of launching.
extern thread_local Recording *recording;

void replay(const Recording &recorded, Stream stream);

// What a bound plan keeps; NULL where its run is more than launches.
const Recording *recorded_launches(const baracuda_bound *bound);

}  // namespace baracuda
