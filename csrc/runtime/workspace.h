// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace baracuda {

// Lays out a workspace. One function per operator takes its pieces from this; with a NULL base it
// counts, with the caller's memory it hands out, so that size and use can't differ.
class Workspace {
 public:
  explicit Workspace(std::byte *base) : base_(base) {}

  template <class T>
  T *take(int64_t count) {
    const size_t offset = size_;
    size_ += (size_t(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return base_ ? reinterpret_cast<T *>(base_ + offset) : nullptr;
  }
  size_t size() const { return size_; }

 private:
  static constexpr size_t kAlignment = 256;
  std::byte *base_;
  size_t size_ = 0;
};

}  // namespace baracuda
