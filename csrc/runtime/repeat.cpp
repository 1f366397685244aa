// SPDX-License-Identifier: Apache-2.0
#include "runtime/repeat.h"

#include <cstring>
#include <memory>

#include "runtime/hash.h"
#include "runtime/tensor.h"

namespace baracuda {
namespace {

// The layers of a model share a plan, so there is room for many.
constexpr int kPlacesBits = 7;

}  // namespace

bool Signature::read(uint64_t plan, DLTensor *const operands[], const uint64_t flags[], size_t count) {
  uint64_t hash = plan;
  uint64_t *word = words_;
  *word++ = plan;
  for (size_t i = 0; i < count; ++i) {
    const DLTensor *tensor = operands[i];
    if (words_ + kWords - word < 6 + 2 * kMaxRank) return false;
    if (!tensor) {
      *word++ = UINT64_MAX;
      continue;
    }
    const int rank = tensor->ndim;
    if (rank < 0 || rank > kMaxRank || (rank > 0 && !tensor->shape)) return false;
    *word++ = uint64_t(rank) << 32 | uint64_t(tensor->dtype.code) << 24 | uint64_t(tensor->dtype.bits) << 16 |
              tensor->dtype.lanes;
    *word++ = uint64_t(uint32_t(tensor->device.device_type)) << 32 | uint32_t(tensor->device.device_id);
    *word++ = reinterpret_cast<uintptr_t>(tensor->data);
    *word++ = tensor->byte_offset;
    *word++ = flags ? flags[i] : 0;
    *word++ = tensor->strides != nullptr;
    std::memcpy(word, tensor->shape, size_t(rank) * sizeof *word);
    word += rank;
    if (tensor->strides) {
      std::memcpy(word, tensor->strides, size_t(rank) * sizeof *word);
      word += rank;
    }
    hash = (hash ^ (reinterpret_cast<uintptr_t>(tensor->data) + tensor->byte_offset)) * kGolden;
  }
  hash_ = hash;
  count_ = size_t(word - words_);
  return true;
}

bool Signature::operator==(const Signature &other) const {
  return hash_ == other.hash_ && count_ == other.count_ &&
         std::memcmp(words_, other.words_, count_ * sizeof *words_) == 0;
}

RepeatedRun &place_of_run(const Signature &signature) {
  static thread_local const std::unique_ptr<RepeatedRun[]> places(new RepeatedRun[1 << kPlacesBits]);
  return places[signature.hash() >> (64 - kPlacesBits)];
}

}  // namespace baracuda
