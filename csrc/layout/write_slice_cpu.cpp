// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "layout/write_slice.h"
#include "runtime/parallel.h"

namespace baracuda {
namespace {

unsigned char *byte_of(int64_t cell, bool packed) {
  return reinterpret_cast<unsigned char *>(uintptr_t(packed ? cell >> 1 : cell));
}

unsigned nibble_at(int64_t cell) { return *byte_of(cell, true) >> (cell & 1 ? 4 : 0) & 15u; }

void put_nibble(int64_t cell, unsigned value) {
  unsigned char *byte = byte_of(cell, true);
  *byte = static_cast<unsigned char>(cell & 1 ? (*byte & 0x0fu) | value << 4 : (*byte & 0xf0u) | value);
}

void copy_nibbles(int64_t dest, int64_t source, int64_t count) {
  if (dest & 1) {
    put_nibble(dest++, nibble_at(source++));
    --count;
  }
  unsigned char *to = byte_of(dest, true);
  const unsigned char *from = byte_of(source, true);
  const int64_t bytes = count / 2;
  if (source & 1) {
    for (int64_t i = 0; i < bytes; ++i) to[i] = static_cast<unsigned char>(from[i] >> 4 | from[i + 1] << 4);
  } else {
    std::memcpy(to, from, size_t(bytes));
  }
  if (count & 1) put_nibble(dest + count - 1, nibble_at(source + count - 1));
}

// The size is a constant for short runs, so that a strided copy of elements is not a call a piece.
template <int64_t kRun>
void copy_run(int64_t dest, int64_t source, int64_t run) {
  std::memcpy(byte_of(dest, false), byte_of(source, false), size_t(kRun ? kRun : run));
}

using CopyRun = void (*)(int64_t dest, int64_t source, int64_t run);

CopyRun choose(const StridedCopy &copy) {
  if (copy.packed) return copy_nibbles;
  switch (copy.run) {
    case 1:
      return copy_run<1>;
    case 2:
      return copy_run<2>;
    case 4:
      return copy_run<4>;
    case 8:
      return copy_run<8>;
    case 16:
      return copy_run<16>;
    default:
      return copy_run<0>;
  }
}

}  // namespace

void write_slice_cpu(const StridedCopy &copy) {
  const CopyRun copy_one = choose(copy);
  if (copy.rank == 0 && !copy.packed) {
    parallel_for(copy.run, copy.run, [&](int64_t begin, int64_t end) {
      std::memcpy(byte_of(copy.dest + begin, false), byte_of(copy.source + begin, false), size_t(end - begin));
    });
    return;
  }
  // Runs that share bytes are written by one thread.
  const int64_t work = copy.isolated ? copy.rows * (copy.run + 16) : 0;
  parallel_for(copy.rows, work, [&](int64_t begin, int64_t end) {
    int64_t index[kMaxRank] = {};
    int64_t dest = copy.dest;
    int64_t source = copy.source;
    int64_t rest = begin;
    for (int axis = copy.rank - 1; axis >= 0; --axis) {
      index[axis] = rest % copy.extent[axis];
      rest /= copy.extent[axis];
      dest += index[axis] * copy.dest_stride[axis];
      source += index[axis] * copy.source_stride[axis];
    }
    for (int64_t row = begin; row < end; ++row) {
      copy_one(dest, source, copy.run);
      for (int axis = copy.rank - 1; axis >= 0; --axis) {
        dest += copy.dest_stride[axis];
        source += copy.source_stride[axis];
        if (++index[axis] < copy.extent[axis]) break;
        dest -= index[axis] * copy.dest_stride[axis];
        source -= index[axis] * copy.source_stride[axis];
        index[axis] = 0;
      }
    }
  });
}

}  // namespace baracuda
