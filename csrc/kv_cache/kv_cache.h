// SPDX-License-Identifier: Apache-2.0
// The index arithmetic of a paged key/value cache, shared by the CPU and the CUDA kernels.
#pragma once

#include <string>

#include "runtime/device.h"
#include "runtime/float8.h"
#include "runtime/tensor.h"

namespace baracuda {

// Keys or values: tokens on one side, the cache on the other. Addresses and steps in bytes.
struct KvSide {
  int64_t token_data;
  int64_t token_step;
  int64_t token_head;
  int64_t token_dim;
  int64_t cache_data;
  int64_t cache_block;
  int64_t cache_position;
  int64_t cache_head;
  int64_t cache_dim;
  const float *scale;  // NULL without a conversion
};

// On CUDA so many tokens are appended by one launch that needs no workspace; beyond that, so many go in
// a pair of launches.
constexpr int64_t kFewTokens = 1024;
constexpr int64_t kManyTokens = 8192;

struct KvCopy {
  DLDataType dtype;
  DLDataType cache_dtype;  // the same as dtype without a conversion
  int64_t tokens;
  int64_t heads;
  int64_t dim;
  int64_t block_size;
  int64_t capacity;  // slots
  const std::byte *slots;
  int64_t slot_step;  // in elements
  bool wide_slots;    // int64
  KvSide side[2];
  uint32_t *last;  // workspace of an append: min(tokens, kManyTokens), where tokens > kFewTokens on CUDA

  bool converts() const { return !(dtype == cache_dtype); }
};

// Heads and dims that are consecutive on both sides become one row.
void merge_heads(KvCopy &copy);

void kv_cache_append_cpu(const KvCopy &copy);
void kv_cache_gather_cpu(const KvCopy &copy);
// Enqueue on the current device.
void kv_cache_append_cuda(const KvCopy &copy, Stream stream);
void kv_cache_gather_cuda(const KvCopy &copy, Stream stream);

// The architecture whose machine code runs: "sm_90".
std::string kv_cache_arch(const char *plan);

}  // namespace baracuda
