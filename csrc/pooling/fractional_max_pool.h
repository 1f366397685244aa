// SPDX-License-Identifier: Apache-2.0
// Fractional max pooling as the kernels see it. 2-D is 3-D with a middle axis of one cell.
#pragma once

#include <string>

#include "pooling/window.h"
#include "runtime/device.h"
#include "runtime/philox.h"
#include "runtime/tensor.h"

namespace baracuda {

enum PoolAxisName { kSlow, kMiddle, kFast, kPoolAxes };

struct PoolProblem {
  int64_t batch = 1;
  int64_t channels = 1;
  PoolAxis axis[kPoolAxes];
  Placement placement = Placement::even;
  // Indices count within a plane instead of within the whole input. They are logical positions:
  // strides play no part in them.
  bool plane_index = false;
  // Which of a plane's samples decides each axis.
  int32_t sample_of[kPoolAxes] = {};

  BARACUDA_HD int64_t planes() const { return batch * channels; }
  BARACUDA_HD int64_t in_plane() const { return int64_t(axis[kSlow].in) * axis[kMiddle].in * axis[kFast].in; }
  BARACUDA_HD int64_t out_plane() const { return int64_t(axis[kSlow].out) * axis[kMiddle].out * axis[kFast].out; }
  // The index of a plane's first cell.
  BARACUDA_HD int64_t index_origin(int64_t plane) const { return plane_index ? 0 : plane * in_plane(); }
};

// A tensor [batch, channel, slow, middle, fast]; strides in elements.
struct PoolView {
  void *data = nullptr;
  int64_t batch = 0;
  int64_t channel = 0;
  int64_t axis[kPoolAxes] = {};

  BARACUDA_HD int64_t plane(int64_t n, int64_t c) const { return n * batch + c * channel; }
  BARACUDA_HD int64_t cell(int64_t slow, int64_t middle, int64_t fast) const {
    return slow * axis[kSlow] + middle * axis[kMiddle] + fast * axis[kFast];
  }
};

struct PoolSamples {
  const void *data = nullptr;  // NULL: they are generated
  bool is_double = false;
  int64_t batch = 0;
  int64_t channel = 0;
  int64_t sample = 0;
  const int64_t *offset = nullptr;
  uint64_t seed = 0;
};

// The samples of a plane's axes.
template <class Real>
BARACUDA_HD inline void plane_samples(const PoolSamples &samples, const PoolProblem &problem, int64_t n, int64_t c,
                                      Real (&u)[kPoolAxes]) {
  if (samples.data) {
    const int64_t place = n * samples.batch + c * samples.channel;
    for (int axis = 0; axis < kPoolAxes; ++axis) {
      const int64_t at = place + problem.sample_of[axis] * samples.sample;
      u[axis] = unit_sample(samples.is_double ? Real(static_cast<const double *>(samples.data)[at])
                                              : Real(static_cast<const float *>(samples.data)[at]));
    }
  } else {
    const uint64_t offset = uint64_t(*samples.offset);
    const uint64_t plane = uint64_t(n * problem.channels + c);
    const PhiloxWords words = philox_4x32_10(
        {{uint32_t(offset), uint32_t(offset >> 32), uint32_t(plane), uint32_t(plane >> 32)}}, samples.seed);
    for (int axis = 0; axis < kPoolAxes; ++axis) {
      const int word = problem.sample_of[axis];
      u[axis] = Real(unit_float(word == 0 ? words.word[0] : word == 1 ? words.word[1] : words.word[2]));
    }
  }
}

// What values are compared, and gradients added, in.
template <class T>
struct PoolReal {
  using type = float;
};
template <>
struct PoolReal<double> {
  using type = double;
};

// Whether a value takes the place of the maximum so far. The first of equals stays, and a NaN
// beats any number; of several, the first or the last one stays.
template <class Real>
BARACUDA_HD inline bool beats(Real value, Real best, bool last_nan) {
  return value > best || (value != value && (last_nan || best == best));
}

struct PoolForward {
  PoolProblem problem;
  PoolSamples samples;
  PoolView x;
  PoolView y;
  PoolView indices;  // without data: none are wanted
  DLDataType dtype;
  DLDataType index_dtype;
};

struct PoolBackward {
  PoolProblem problem;
  PoolView dy;
  PoolView indices;
  PoolView dx;
  DLDataType dtype;
  DLDataType index_dtype;
  bool accumulate;
};

void fractional_max_pool_cpu(const PoolForward &call);
void fractional_max_pool_backward_cpu(const PoolBackward &call);
// Enqueue on the current device.
void fractional_max_pool_cuda(const PoolForward &call, Stream stream);
void fractional_max_pool_backward_cuda(const PoolBackward &call, Stream stream);
// The access paths of row-major operands.
const char *fractional_max_pool_path(const PoolProblem &problem, DLDataType dtype);
const char *fractional_max_pool_backward_path(const PoolProblem &problem, DLDataType dtype, DLDataType index_dtype);
// The architecture whose machine code runs: "sm_90".
std::string fractional_max_pool_arch(const char *plan);

}  // namespace baracuda
