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

// What a tensor says beside its shape and strides. The first word tells it from an absent one.
constexpr size_t kHeadWords = 6;

inline void write_head(const DLTensor &tensor, uint64_t flags, uint64_t *words) {
  words[0] = uint64_t(uint32_t(tensor.ndim)) << 32 | uint64_t(tensor.dtype.code) << 24 |
             uint64_t(tensor.dtype.bits) << 16 | tensor.dtype.lanes;
  words[1] = uint64_t(uint32_t(tensor.device.device_type)) << 32 | uint32_t(tensor.device.device_id);
  words[2] = reinterpret_cast<uintptr_t>(tensor.data);
  words[3] = tensor.byte_offset;
  words[4] = flags;
  words[5] = tensor.strides != nullptr;
}

}  // namespace

bool Signature::is_of(uint64_t plan, DLTensor *const operands[], const uint64_t flags[], size_t count) const {
  const uint64_t *word = words_;
  const uint64_t *const end = words_ + count_;
  if (count_ == 0 || *word++ != plan) return false;
  for (size_t i = 0; i < count; ++i) {
    const DLTensor *tensor = operands[i];
    if (word == end) return false;
    if (!tensor) {
      if (*word++ != UINT64_MAX) return false;
      continue;
    }
    const int rank = tensor->ndim;
    if (rank < 0 || rank > kMaxRank || size_t(end - word) < kHeadWords) return false;
    uint64_t head[kHeadWords];
    write_head(*tensor, flags ? flags[i] : 0, head);
    if (std::memcmp(word, head, sizeof head) != 0) return false;
    word += kHeadWords;
    if (rank == 0) continue;
    if (!tensor->shape || std::memcmp(word, tensor->shape, size_t(rank) * sizeof *word) != 0) return false;
    word += rank;
    if (!tensor->strides) continue;
    if (std::memcmp(word, tensor->strides, size_t(rank) * sizeof *word) != 0) return false;
    word += rank;
  }
  return word == end;
}

bool Signature::read(uint64_t plan, DLTensor *const operands[], const uint64_t flags[], size_t count) {
  uint64_t *word = words_;
  count_ = 0;
  *word++ = plan;
  for (size_t i = 0; i < count; ++i) {
    const DLTensor *tensor = operands[i];
    if (size_t(words_ + kWords - word) < kHeadWords + 2 * size_t(kMaxRank)) return false;
    if (!tensor) {
      *word++ = UINT64_MAX;
      continue;
    }
    const int rank = tensor->ndim;
    if (rank < 0 || rank > kMaxRank || (rank > 0 && !tensor->shape)) return false;
    write_head(*tensor, flags ? flags[i] : 0, word);
    word += kHeadWords;
    if (rank == 0) continue;
    std::memcpy(word, tensor->shape, size_t(rank) * sizeof *word);
    word += rank;
    if (!tensor->strides) continue;
    std::memcpy(word, tensor->strides, size_t(rank) * sizeof *word);
    word += rank;
  }
  count_ = size_t(word - words_);
  return true;
}

RepeatedRun &place_of_run(uint64_t plan, DLTensor *const operands[], size_t count) {
  static thread_local const std::unique_ptr<RepeatedRun[]> places(new RepeatedRun[1 << kPlacesBits]);
  uint64_t hash = plan;
  for (size_t i = 0; i < count; ++i)
    if (const DLTensor *tensor = operands[i])
      hash = (hash ^ (reinterpret_cast<uintptr_t>(tensor->data) + tensor->byte_offset)) * kGolden;
  return places[hash >> (64 - kPlacesBits)];
}

}  // namespace baracuda
