// SPDX-License-Identifier: Apache-2.0
// What each .cu of the scans instantiates: all operators of some input types.
#pragma once

#include "scan/scan_launch.cuh"
#include "scan/scan_select.h"

namespace baracuda::scan {

template <class Op>
struct CudaKernels {
  enum class Path { rows, long_rows, columns };

  // Tiles along a long row; 0 where rows of this length never take that path.
  static int64_t long_tiles(int64_t rows, int64_t length) {
    if (Op::kRare) return 0;
    constexpr int64_t kTile = kLongTile<Op>;
    // One block at a time works its way along a row otherwise, so rows must be few and long for
    // the card's blocks to be better spread over tiles.
    if (length < 3 * kTile || rows >= kRowsThatFill) return 0;
    const int64_t tiles = ceil_div(length, kTile);
    return tiles * rows <= int64_t(UINT32_MAX) ? tiles : 0;
  }

  static Path path_of(const Geometry &g) {
    if (Op::kRare) return Path::rows;
    // Columns, where most operands have their shortest steps across the rows.
    int across = 0;
    int operands = 0;
    for (int operand = 0; operand < Op::Inputs::size + Op::Outputs::size; ++operand) {
      if (!g.data[operand] || g.rank == 0) continue;
      ++operands;
      const int64_t step = g.step[operand] < 0 ? -g.step[operand] : g.step[operand];
      const int64_t stride = g.stride[operand][g.rank - 1];
      across += step > (stride < 0 ? -stride : stride);
    }
    const bool few = g.rows < kColumnsThatPay && long_tiles(g.rows, g.length) > 0;
    if (g.length > 1 && 2 * across > operands && !few) return Path::columns;
    return long_tiles(g.rows, g.length) > 0 ? Path::long_rows : Path::rows;
  }

  static size_t workspace(int64_t rows, int64_t length) {
    if (rows == 0 || length == 0) return 0;
    size_t bytes = 0;
    Geometry g;
    g.rows = rows;
    g.length = length;
    if (long_tiles(rows, length) > 0) bytes = LongWorkspace<Op>(g, kLongTile<Op>, nullptr).bytes;
    // Strides can make columns of any rows.
    if (!Op::kRare && length > Tuning<Op>::kLines * Tuning<Op>::kColumnGroups)
      bytes = std::max(bytes, ColumnWorkspace<Op>(g, nullptr).bytes);
    return bytes;
  }

  static const char *path(const Geometry &g) {
    constexpr const char *kNames[] = {"rows", "long rows", "columns"};
    return kNames[int(path_of(g))];
  }

  // Whether the device has a copy engine, and the shared memory that goes with it.
  static bool streams() {
    using S =
        StreamShape<Op, Tuning<Op>::kLongRun, Tuning<Op>::kLongWarps, Tuning<Op>::kLongGroups, Tuning<Op>::kLongStages>;
    static_assert(S::kSharedBytes + S::kControlBytes <= 227 * 1024);
    // One multiprocessor is the scanner's.
    return DeviceGuard::kernels_can_wait() && attribute(cudaDevAttrMultiProcessorCount) > 1 &&
           attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) >= int(S::kSharedBytes + S::kControlBytes);
  }

  static void run(const Flags &flags, const Geometry &g, std::byte *base, Stream stream) {
    Op op;
    op.flags = flags;
    const Path path = path_of(g);
    if constexpr (!Op::kRare) {
      if constexpr (Tuning<Op>::kStreams) {
        if (path == Path::long_rows && streams() && neighbours<Op>(g)) return launch_stream(op, g, base, stream);
      }
      if (path == Path::long_rows) return launch_long(op, g, base, stream);
      if (path == Path::columns) return launch_columns(op, g, base, stream);
    }
    if constexpr (!Op::kRare && !Tuning<Op>::kSmall) {
      if (brief<Op>(g)) return launch_rows<Op, Tuning<Op>::kShortRun, 16>(op, g, stream);
    }
    launch_rows(op, g, stream);
  }

  static std::string arch(const char *plan) {
    return kernel_arch(plan,
                       reinterpret_cast<const void *>(scan_rows<Op, Tuning<Op>::kRun, Tuning<Op>::kRowResidents>));
  }

  static constexpr CudaScan kScan = {workspace, path, run, arch};
};

template <class... Types>
const CudaScan *scan_cuda_of(const Choice &choice) {
  const CudaScan *chosen = nullptr;
  dispatch_dtype<Types...>(choice.in, [&](auto tag) {
    select_operator<typename decltype(tag)::type>(
        choice, [&](auto op) { chosen = &CudaKernels<typename decltype(op)::type>::kScan; });
  });
  return chosen;
}

const CudaScan *scan_cuda_float32(const Choice &choice);
const CudaScan *scan_cuda_float64(const Choice &choice);
const CudaScan *scan_cuda_float16(const Choice &choice);
const CudaScan *scan_cuda_bfloat16(const Choice &choice);
const CudaScan *scan_cuda_int8(const Choice &choice);
const CudaScan *scan_cuda_int16(const Choice &choice);
const CudaScan *scan_cuda_int32(const Choice &choice);
const CudaScan *scan_cuda_int64(const Choice &choice);

}  // namespace baracuda::scan
