// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <exception>
#include <sstream>
#include <string>
#include <utility>

#include "baracuda/status.h"

namespace baracuda {

// What is thrown inside the library where a check fails. It never leaves the C API: `guarded`
// turns it into a status and the thread's message.
class Error : public std::exception {
 public:
  Error(baracuda_status status, std::string message, uint64_t needed = 0, uint64_t got = 0)
      : status(status), needed(needed), got(got), message_(std::move(message)) {}
  const char *what() const noexcept override { return message_.c_str(); }

  baracuda_status status;
  uint64_t needed;
  uint64_t got;

 private:
  std::string message_;
};

// The arguments written one after the other.
template <class... Parts>
std::string text(const Parts &...parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <class... Parts>
[[noreturn]] void invalid(const Parts &...parts) {
  throw Error(BARACUDA_INVALID_PROBLEM, text(parts...));
}

template <class... Parts>
[[noreturn]] void unsupported(const Parts &...parts) {
  throw Error(BARACUDA_UNSUPPORTED, text(parts...));
}

// Records the exception in flight as the thread's last error.
baracuda_status report_current_exception() noexcept;

// The one place where exceptions become statuses.
template <class Body>
baracuda_status guarded(Body &&body) noexcept {
  try {
    body();
    return BARACUDA_SUCCESS;
  } catch (...) {
    return report_current_exception();
  }
}

}  // namespace baracuda
