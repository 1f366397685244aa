// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>
#include <unordered_map>
#include <vector>

#include "image/nms.h"

namespace baracuda {
namespace {

template <class Real>
struct Kept {
  NmsBox<Real> box;
  Real area;
};

template <class Real>
void nms(const NmsCall &call) {
  std::vector<uint64_t> keys(size_t(call.boxes_count));
  for (int64_t i = 0; i < call.boxes_count; ++i) keys[size_t(i)] = nms_key(call.scores.at(i));
  std::vector<int64_t> order(keys.size());
  std::iota(order.begin(), order.end(), int64_t(0));
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return keys[size_t(a)] < keys[size_t(b)]; });

  std::unordered_map<int64_t, std::vector<Kept<Real>>> kept;
  int64_t count = 0;
  for (const int64_t i : order) {
    const NmsBox<Real> box = nms_box<Real>(call, i);
    const Real area = nms_area(box);
    std::vector<Kept<Real>> &others = kept[call.class_of(i)];
    if (std::any_of(others.begin(), others.end(), [&](const Kept<Real> &other) {
          return nms_overlap(other.box, other.area, box, area, Real(call.threshold));
        }))
      continue;
    others.push_back({box, area});
    call.keep[count++ * call.keep_step] = i;
  }
  *call.count = count;
  for (; count < call.boxes_count; ++count) call.keep[count * call.keep_step] = -1;
}

}  // namespace

void nms_cpu(const NmsCall &call) {
  if (call.dtype == DTypeOf<double>::value) {
    nms<double>(call);
  } else {
    nms<float>(call);
  }
}

}  // namespace baracuda
