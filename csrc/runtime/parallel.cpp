// SPDX-License-Identifier: Apache-2.0
#include "runtime/parallel.h"

#if defined(__linux__)
#include <sched.h>
#endif

namespace baracuda {

int cpu_count() {
  static const int count = [] {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
    const unsigned hardware = std::thread::hardware_concurrency();
    return hardware ? int(hardware) : 1;
  }();
  return count;
}

}  // namespace baracuda
