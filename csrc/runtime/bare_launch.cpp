// SPDX-License-Identifier: Apache-2.0
#include "runtime/bare_launch.h"

#include <chrono>

#include "runtime/error.h"
#include "runtime/recording.h"

extern "C" baracuda_status baracuda_bare_launch(const baracuda_bound *bound, int32_t count, void *stream,
                                                double *nanoseconds) {
  return baracuda::guarded([&] {
    using Clock = std::chrono::steady_clock;
    const baracuda::Recording *recorded = baracuda::recorded_launches(bound);
    if (!recorded || recorded->launches.size() != 1) baracuda::unsupported("bare launch: the run is not one kernel");
    const baracuda::RecordedLaunch &kept = recorded->launches.front();
    const baracuda::DeviceGuard guard(recorded->device);
    const Clock::time_point start = Clock::now();
    for (int32_t i = 0; i < count; ++i) baracuda::issue_by_runtime(kept.launch, kept.arguments.data(), stream);
    *nanoseconds = std::chrono::duration<double, std::nano>(Clock::now() - start).count() / count;
  });
}
