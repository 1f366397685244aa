// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

namespace baracuda {

// CPUs this process may run on.
int cpu_count();

// Calls body(begin, end) for parts of [0, count), in parallel where `work` (bytes or operations
// in all) is enough to pay for threads. Parts never depend on the number of threads in a way that
// a body which treats indices independently could see.
template <class Body>
void parallel_for(int64_t count, int64_t work, const Body &body) {
  // Starting a thread costs some 20 us, in which one core moves a few hundred kilobytes.
  constexpr int64_t kWorkPerThread = 1 << 19;
  int64_t threads = work / kWorkPerThread;
  if (threads > count) threads = count;
  if (threads > 1 && threads > cpu_count()) threads = cpu_count();
  if (threads <= 1) {
    if (count > 0) body(int64_t(0), count);
    return;
  }
  std::vector<std::thread> workers;
  std::vector<std::exception_ptr> failures(size_t(threads), nullptr);
  workers.reserve(size_t(threads - 1));
  const auto part = [&](int64_t index) {
    try {
      body(count * index / threads, count * (index + 1) / threads);
    } catch (...) {
      failures[size_t(index)] = std::current_exception();
    }
  };
  int64_t started = 1;
  try {
    for (; started < threads; ++started) workers.emplace_back(part, started);
  } catch (const std::system_error &) {
    // No more threads to be had: the caller does their parts.
  }
  part(0);
  for (int64_t index = started; index < threads; ++index) part(index);
  for (std::thread &worker : workers) worker.join();
  for (const std::exception_ptr &failure : failures)
    if (failure) std::rethrow_exception(failure);
}

}  // namespace baracuda
