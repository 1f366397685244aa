// SPDX-License-Identifier: Apache-2.0
#include "runtime/error.h"

#include <new>

namespace baracuda {
namespace {

struct LastError {
  std::string message;
  uint64_t needed = 0;
  uint64_t got = 0;
};

thread_local LastError last_error;

void remember(const char *message, uint64_t needed, uint64_t got) noexcept {
  last_error.needed = needed;
  last_error.got = got;
  try {
    last_error.message = message;
  } catch (...) {
    last_error.message.clear();
  }
}

}  // namespace

baracuda_status report_current_exception() noexcept {
  try {
    throw;
  } catch (const Error &error) {
    remember(error.what(), error.needed, error.got);
    return error.status;
  } catch (const std::bad_alloc &) {
    remember("out of host memory", 0, 0);
    return BARACUDA_OUT_OF_MEMORY;
  } catch (const std::exception &error) {
    remember(error.what(), 0, 0);
    return BARACUDA_INTERNAL_ERROR;
  } catch (...) {
    remember("unknown exception", 0, 0);
    return BARACUDA_INTERNAL_ERROR;
  }
}

}  // namespace baracuda

extern "C" {

const char *baracuda_last_error_message(void) { return baracuda::last_error.message.c_str(); }

void baracuda_last_error_sizes(uint64_t *needed, uint64_t *got) {
  if (needed) *needed = baracuda::last_error.needed;
  if (got) *got = baracuda::last_error.got;
}

const char *baracuda_version(void) { return BARACUDA_VERSION; }
}
