// SPDX-License-Identifier: Apache-2.0
// The steps in which a tile gathers gradients, and the way of these through shared memory.
#pragma once

#include <algorithm>
#include <cstring>

#include "image/roi_align_bands.cuh"
#include "runtime/gate.cuh"

namespace baracuda {

// Neighbouring bins that a step takes: of a row, and rows.
constexpr int kStepBins = 4;
constexpr int kStepRows = 2;
// A bit for each pair of a tile's rows.
constexpr int kRowBits = kTileSide / 2;
// Steps whose gradients a warp has in shared memory or on their way there.
constexpr int kRing = 3;

struct alignas(kRoiVector) TileStepHead {
  int64_t offset;  // of the first bin's gradient, in elements
  int32_t bins;    // of a row
  int32_t rows;    // a bit for each pair of the tile's rows with a weight, for one row of bins after the other
};

// What some neighbouring bins add to a tile.
template <class Real>
struct TileStep : TileStepHead {
  alignas(kRoiVector) Real y[kStepRows][kTileSide];
  Real x[kStepBins][kTileSide];
};

template <class Real>
struct alignas(kRoiVector) RoiVector {
  static constexpr int kCount = int(kRoiVector / int64_t(sizeof(Real)));
  Real value[kCount];
};

template <class Real>
__device__ __forceinline__ void load_weights(Real (&into)[kTileSide], const Real *from) {
  constexpr int kCount = RoiVector<Real>::kCount;
#pragma unroll
  for (int i = 0; i < kTileSide; i += kCount) {
    const RoiVector<Real> some = *reinterpret_cast<const RoiVector<Real> *>(from + i);
#pragma unroll
    for (int j = 0; j < kCount; ++j) into[i + j] = some.value[j];
  }
}

// The next steps' gradients of a warp's channels, in shared memory. Lanes copy both rows of a few channels together.
template <class T>
class RoiRing {
 public:
  using Real = typename ImageReal<T>::type;

  // Copies are of words. Where one has two elements, the first and the last may have one that isn't wanted.
  static constexpr int kWordBytes = std::max(int(sizeof(T)), 4);
  static constexpr int kWordElements = kWordBytes / int(sizeof(T));
  static constexpr int kPlaces = 4;  // words of a row and channel
  static_assert(kPlaces * kWordElements >= kStepBins + kWordElements - 1);
  static constexpr int kBeside = kLanes / kPlaces / kStepRows;  // channels
  // Rows begin in different banks.
  static constexpr int kRowBytes = (kLanes + kBeside) * kPlaces * kWordBytes;
  static constexpr int kSlotBytes = kStepRows * kRowBytes;
  static constexpr int kBytes = kRing * kSlotBytes;

  // `base` is the first channel's plane of gradients.
  __device__ RoiRing(const char *room, const T *base, const ImageView &doutput) {
    const int lane = int(threadIdx.x % kLanes);
    const int row = lane / kPlaces % kStepRows;
    const int channel = lane / kPlaces / kStepRows;
    word_ = lane % kPlaces;
    bits_ = ((1 << kRowBits) - 1) << row * kRowBits;
    from_ = reinterpret_cast<uintptr_t>(base + channel * doutput.channel + row * doutput.row);
    each_ = uintptr_t(kBeside * doutput.channel) * sizeof(T);
    odd_ = uint32_t(reinterpret_cast<uintptr_t>(base + lane * doutput.channel) / sizeof(T));
    row_ = uint32_t(doutput.row);
    const uint32_t begin = shared_address(room);
    to_ = begin + uint32_t(row * kRowBytes + (channel * kPlaces + word_) * kWordBytes);
    own_ = begin + uint32_t(lane * kPlaces * kWordBytes);
  }

  // Into the next slot; nothing where there is no such step.
  __device__ __forceinline__ void fetch(const TileStep<Real> *steps, int32_t s, int32_t count) {
    if (s < count) {
      const auto &[offset, bins, rows] = static_cast<const TileStepHead &>(steps[s]);
      uintptr_t from = from_ + uintptr_t(offset) * sizeof(T);
      const int32_t unwanted = int32_t(from / sizeof(T) % kWordElements);
      from += uintptr_t(word_) * kWordBytes - uintptr_t(unwanted) * sizeof(T);
      if (bool(rows & bits_) & (word_ * kWordElements < unwanted + bins)) {
#pragma unroll
        for (int i = 0; i < kLanes / kBeside; ++i)
          copy_ahead<kWordBytes>(to_ + uint32_t(i * kBeside * kPlaces * kWordBytes),
                                 reinterpret_cast<const void *>(from + uintptr_t(i) * each_));
      }
    }
    commit_copies();
    advance(to_, filled_);
  }

  // For the oldest slot; all but one are filled or being filled.
  __device__ __forceinline__ void wait() const {
    wait_for_copies<kRing - 2>();
    __syncwarp();
  }

  // A row's gradients of the lane's channel, from the oldest slot.
  __device__ __forceinline__ void read(Real (&value)[kStepBins], int row, int64_t offset) const {
    const char *const at = static_cast<const char *>(__cvta_shared_to_generic(own_ + uint32_t(row * kRowBytes)));
    if constexpr (kWordElements == 1) {
      constexpr int kCount = RoiVector<T>::kCount;
#pragma unroll
      for (int i = 0; i < kStepBins; i += kCount) {
        const RoiVector<T> some = reinterpret_cast<const RoiVector<T> *>(at)[i / kCount];
#pragma unroll
        for (int j = 0; j < kCount; ++j) value[i + j] = some.value[j];
      }
    } else {
      const uint4 words = *reinterpret_cast<const uint4 *>(at);
      const uint32_t shift = (odd_ + uint32_t(offset) + uint32_t(row) * row_) % 2 * 16;
      const uint2 wanted = {__funnelshift_r(words.x, words.y, shift), __funnelshift_r(words.y, words.z, shift)};
      T some[kStepBins];
      static_assert(sizeof(some) == sizeof(wanted));
      memcpy(some, &wanted, sizeof(some));
#pragma unroll
      for (int i = 0; i < kStepBins; ++i) value[i] = Real(some[i]);
    }
  }

  __device__ __forceinline__ void drop_oldest() { advance(own_, dropped_); }

 private:
  __device__ __forceinline__ static void advance(uint32_t &address, int32_t &slot) {
    const bool last = slot == kRing - 1;
    address += last ? uint32_t(kSlotBytes - kBytes) : uint32_t(kSlotBytes);
    slot = last ? 0 : slot + 1;
  }

  uintptr_t from_;  // of the lane's row and first channel
  uintptr_t each_;  // from one of the lane's channels to the next
  uint32_t to_;     // the lane's first word, in the slot to be filled
  uint32_t own_;    // the lane's channel, in the oldest slot
  int32_t filled_ = 0;
  int32_t dropped_ = 0;
  int32_t word_;
  int32_t bits_;  // the lane's row in a step's
  uint32_t odd_;  // as a number of elements, of which one bit counts
  uint32_t row_;
};

}  // namespace baracuda
