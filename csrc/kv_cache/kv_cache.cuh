// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>

#include "kv_cache/kv_cache.h"
#include "runtime/launch.cuh"

namespace baracuda {

// A KvCopy of at most so many tokens as the kernels take it. A token is `units` units: first those of
// its key, then those of its value; a thread moves a unit at a time.
struct KvArguments {
  struct Side {
    int64_t tokens;
    int64_t token_step;
    int64_t token_head;
    int64_t token_unit;
    int64_t cache;
    int64_t cache_block;
    int64_t cache_position;
    int64_t cache_head;
    int64_t cache_unit;
    const float *scale;
  };

  Side side[2];
  const std::byte *slots;
  int64_t slot_step;
  bool wide_slots;
  bool wide_capacity;
  int64_t capacity;
  int64_t block_size;
  Divider block_size32;
  uint32_t tokens;
  Divider units;
  Divider row_units;  // of one head
  Divider heads;
  Divider parts;   // blocks for each token, where a block works on one token
  uint32_t *last;  // for each token the last one with the same slot, where that is found first
};

constexpr int kFewThreads = 256;
constexpr int kUnitThreads = 256;

// Units. A raw unit is what is loaded; nothing is computed before it is stored, so that the loads of
// several units can be in flight together.

template <class Word>
struct CopyUnit {
  using Raw = Word;
  static constexpr bool kConverts = false;
  static __device__ __forceinline__ Raw load(int64_t address) { return *reinterpret_cast<const Word *>(address); }
  static __device__ __forceinline__ void store(int64_t address, Raw raw, float) {
    *reinterpret_cast<Word *>(address) = raw;
  }
  static __device__ __forceinline__ void store_zero(int64_t address) { *reinterpret_cast<Word *>(address) = Word{}; }
};

// The low byte is the first element's.
template <class Cache>
__device__ __forceinline__ uint32_t float8_pair(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  if constexpr (std::is_same_v<Cache, float8_e4m3fn>) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  }
  return pair;
#else
  return uint32_t(Cache(first).bits) | uint32_t(Cache(second).bits) << 8;
#endif
}

// Eight elements of T to eight of the cache.
template <class T, class Cache>
struct QuantizeUnit {
  static constexpr int kVectors = 8 * sizeof(T) / sizeof(uint4);
  struct Raw {
    uint4 vector[kVectors];
  };
  static constexpr bool kConverts = true;
  static __device__ __forceinline__ Raw load(int64_t address) {
    Raw raw;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) raw.vector[i] = reinterpret_cast<const uint4 *>(address)[i];
    return raw;
  }
  static __device__ __forceinline__ void store(int64_t address, Raw raw, float scale) {
    T value[8];
    memcpy(value, raw.vector, sizeof value);
    uint32_t pair[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      pair[i] = float8_pair<Cache>(float(value[2 * i]) / scale, float(value[2 * i + 1]) / scale);
    *reinterpret_cast<uint2 *>(address) = make_uint2(pair[0] | pair[1] << 16, pair[2] | pair[3] << 16);
  }
};

template <class T, class Cache>
struct QuantizeElement {
  using Raw = T;
  static constexpr bool kConverts = true;
  static __device__ __forceinline__ Raw load(int64_t address) { return *reinterpret_cast<const T *>(address); }
  static __device__ __forceinline__ void store(int64_t address, Raw raw, float scale) {
    *reinterpret_cast<uint8_t *>(address) = uint8_t(float8_pair<Cache>(float(raw) / scale, 0.0f));
  }
};

// Eight elements of the cache to eight of T.
template <class T, class Cache>
struct DequantizeUnit {
  using Raw = uint2;
  static constexpr bool kConverts = true;
  static constexpr int kVectors = 8 * sizeof(T) / sizeof(uint4);
  static __device__ __forceinline__ Raw load(int64_t address) { return *reinterpret_cast<const uint2 *>(address); }
  static __device__ __forceinline__ void store(int64_t address, Raw raw, float scale) {
    T value[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      Cache stored;
      stored.bits = uint8_t((i < 4 ? raw.x : raw.y) >> (i % 4 * 8));
      value[i] = T(float(stored) * scale);
    }
    uint4 vector[kVectors];
    memcpy(vector, value, sizeof value);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) reinterpret_cast<uint4 *>(address)[i] = vector[i];
  }
  static __device__ __forceinline__ void store_zero(int64_t address) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) reinterpret_cast<uint4 *>(address)[i] = make_uint4(0, 0, 0, 0);
  }
};

template <class T, class Cache>
struct DequantizeElement {
  using Raw = uint8_t;
  static constexpr bool kConverts = true;
  static __device__ __forceinline__ Raw load(int64_t address) { return *reinterpret_cast<const uint8_t *>(address); }
  static __device__ __forceinline__ void store(int64_t address, Raw raw, float scale) {
    Cache stored;
    stored.bits = raw;
    *reinterpret_cast<T *>(address) = T(float(stored) * scale);
  }
  static __device__ __forceinline__ void store_zero(int64_t address) { *reinterpret_cast<T *>(address) = T(0.0f); }
};

__device__ __forceinline__ int64_t load_slot(const KvArguments &copy, uint32_t token) {
  const int64_t place = token * copy.slot_step;
  return copy.wide_slots ? reinterpret_cast<const int64_t *>(copy.slots)[place]
                         : reinterpret_cast<const int32_t *>(copy.slots)[place];
}

__device__ __forceinline__ bool inside(const KvArguments &copy, int64_t slot) {
  return slot >= 0 && slot < copy.capacity;
}

struct Page {
  int64_t block;
  int64_t position;
};

// Of a slot that is inside.
__device__ __forceinline__ Page find_page(const KvArguments &copy, int64_t slot) {
  if (copy.wide_capacity) return {slot / copy.block_size, slot % copy.block_size};
  const uint32_t block = copy.block_size32.divide(uint32_t(slot));
  return {block, uint32_t(slot) - block * copy.block_size32.divisor};
}

// A unit of a token.
struct UnitPlace {
  uint32_t side;
  uint32_t head;
  uint32_t unit;
};

__device__ __forceinline__ UnitPlace find_unit(const KvArguments &copy, uint32_t index) {
  const uint32_t row = copy.row_units.divide(index);
  const uint32_t side = copy.heads.divide(row);
  return {side, row - side * copy.heads.divisor, index - row * copy.row_units.divisor};
}

__device__ __forceinline__ int64_t token_address(const KvArguments::Side &side, uint32_t token, UnitPlace place) {
  return side.tokens + token * side.token_step + place.head * side.token_head + place.unit * side.token_unit;
}

__device__ __forceinline__ int64_t page_address(const KvArguments::Side &side, Page page) {
  return side.cache + page.block * side.cache_block + page.position * side.cache_position;
}

__device__ __forceinline__ int64_t unit_offset(const KvArguments::Side &side, UnitPlace place) {
  return place.head * side.cache_head + place.unit * side.cache_unit;
}

template <class Unit>
__device__ __forceinline__ float load_scale(const KvArguments &copy, uint32_t side) {
  if constexpr (Unit::kConverts) return *copy.side[side].scale;
  return 1.0f;
}

// Of tokens with the same slot the last one is written, whatever runs first: a token whose slot comes
// again later is left out. Here a block has one token, or a part of one, and looks through all that
// come later; so this is for few tokens. The unit is on its way meanwhile.
template <class Unit>
__global__ void __launch_bounds__(kFewThreads) append_few(const __grid_constant__ KvArguments copy) {
  let_next_kernel_start();
  const uint32_t token = copy.parts.divide(blockIdx.x);
  const uint32_t index = (blockIdx.x - token * copy.parts.divisor) * blockDim.x + threadIdx.x;
  const bool active = index < copy.units.divisor;
  const UnitPlace place = find_unit(copy, index);
  wait_for_earlier_work();
  const int64_t slot = load_slot(copy, token);
  typename Unit::Raw raw;
  float scale = 1.0f;
  if (active) {
    raw = Unit::load(token_address(copy.side[place.side], token, place));
    scale = load_scale<Unit>(copy, place.side);
  }
  bool again = false;
  for (uint32_t later = token + 1 + threadIdx.x; later < copy.tokens; later += blockDim.x)
    again = again || load_slot(copy, later) == slot;
  if (__syncthreads_or(again) || !active || !inside(copy, slot)) return;
  const KvArguments::Side &side = copy.side[place.side];
  Unit::store(page_address(side, find_page(copy, slot)) + unit_offset(side, place), raw, scale);
}

// For each token of a block's share, the last one with the same slot. The block keeps the slots of its
// share in a table in shared memory and looks up all that come later.
__device__ __forceinline__ void find_last(const KvArguments &copy) {
  constexpr uint32_t kEntries = 2 * kUnitThreads;
  constexpr int kLook = 8;
  static_assert((kEntries & (kEntries - 1)) == 0);
  using Key = unsigned long long;
  constexpr Key kFree = ~Key(0);  // no slot: those are numbers below the capacity
  __shared__ Key slots[kEntries];
  __shared__ uint32_t last[kEntries];

  const uint32_t token = blockIdx.x * kUnitThreads + threadIdx.x;
  const int64_t own = token < copy.tokens ? load_slot(copy, token) : -1;
  for (uint32_t i = threadIdx.x; i < kEntries; i += kUnitThreads) {
    slots[i] = kFree;
    last[i] = 0;
  }
  __syncthreads();
  const auto first_entry = [](int64_t slot) {
    return uint32_t(slot) * 2654435769u >> (32 - std::bit_width(kEntries - 1));  // Fibonacci hashing
  };
  uint32_t entry = 0;
  if (inside(copy, own)) {
    entry = first_entry(own);
    for (;; entry = (entry + 1) % kEntries) {
      const Key before = atomicCAS(&slots[entry], kFree, Key(own));
      if (before == kFree || before == Key(own)) break;
    }
    atomicMax(&last[entry], token);
  }
  __syncthreads();
  const uint32_t end = (blockIdx.x + 1) * kUnitThreads;
  for (uint32_t begin = end + threadIdx.x; begin < copy.tokens; begin += kLook * kUnitThreads) {
    int64_t found[kLook];
#pragma unroll
    for (int i = 0; i < kLook; ++i) {
      const uint32_t later = begin + i * kUnitThreads;
      found[i] = later < copy.tokens ? load_slot(copy, later) : -1;
    }
#pragma unroll
    for (int i = 0; i < kLook; ++i) {
      // What is outside is no key, so it ends at a free entry.
      uint32_t place = first_entry(found[i]);
      while (slots[place] != kFree && slots[place] != Key(found[i])) place = (place + 1) % kEntries;
      if (slots[place] != kFree) atomicMax(&last[place], begin + i * kUnitThreads);
    }
  }
  __syncthreads();
  if (token < copy.tokens) copy.last[token] = inside(copy, own) ? last[entry] : token;
}

// Many tokens: one thread for each unit of each token writes it, whatever comes later. Beside them the
// first blocks find out which slots come again.
template <class Unit>
__global__ void __launch_bounds__(kUnitThreads) append_units(const __grid_constant__ KvArguments copy) {
  let_next_kernel_start();
  const uint32_t finders = (copy.tokens + kUnitThreads - 1) / kUnitThreads;
  if (blockIdx.x < finders) {
    wait_for_earlier_work();
    find_last(copy);
    return;
  }
  const uint32_t index = (blockIdx.x - finders) * kUnitThreads + threadIdx.x;
  const uint32_t token = copy.units.divide(index);
  const UnitPlace place = find_unit(copy, index - token * copy.units.divisor);
  wait_for_earlier_work();
  if (token >= copy.tokens) return;
  const KvArguments::Side &side = copy.side[place.side];
  const int64_t slot = load_slot(copy, token);
  const auto raw = Unit::load(token_address(side, token, place));
  if (!inside(copy, slot)) return;
  Unit::store(page_address(side, find_page(copy, slot)) + unit_offset(side, place), raw,
              load_scale<Unit>(copy, place.side));
}

// What append_units leaves to do where a slot comes again: the last token is written there once more.
// A block has as many tokens as a warp has lanes.
template <class Unit>
__global__ void __launch_bounds__(kUnitThreads) mend_units(const __grid_constant__ KvArguments copy) {
  constexpr uint32_t kLanes = 32;
  let_next_kernel_start();
  const uint32_t first = blockIdx.x * kLanes;
  const uint32_t own = first + threadIdx.x % kLanes;
  wait_for_earlier_work();
  const uint32_t last = own < copy.tokens ? copy.last[own] : own;
  for (uint32_t left = __ballot_sync(~0u, last != own); left != 0; left &= left - 1) {
    const int lane = __ffs(int(left)) - 1;
    const uint32_t token = __shfl_sync(~0u, last, lane);
    const Page page = find_page(copy, load_slot(copy, token));
    for (uint32_t index = threadIdx.x; index < copy.units.divisor; index += kUnitThreads) {
      const UnitPlace place = find_unit(copy, index);
      const KvArguments::Side &side = copy.side[place.side];
      Unit::store(page_address(side, page) + unit_offset(side, place), Unit::load(token_address(side, token, place)),
                  load_scale<Unit>(copy, place.side));
    }
  }
}

// One thread for each unit of each token.
template <class Unit>
__global__ void __launch_bounds__(kUnitThreads) gather_units(const __grid_constant__ KvArguments copy) {
  let_next_kernel_start();
  const uint32_t index = blockIdx.x * kUnitThreads + threadIdx.x;
  const uint32_t token = copy.units.divide(index);
  wait_for_earlier_work();
  if (token >= copy.tokens) return;
  const UnitPlace place = find_unit(copy, index - token * copy.units.divisor);
  const KvArguments::Side &side = copy.side[place.side];
  const int64_t slot = load_slot(copy, token);
  const int64_t to = token_address(side, token, place);
  if (inside(copy, slot)) {
    const int64_t from = page_address(side, find_page(copy, slot)) + unit_offset(side, place);
    Unit::store(to, Unit::load(from), load_scale<Unit>(copy, place.side));
  } else {
    Unit::store_zero(to);
  }
}

// The host's side.

// `elements` of the row's are a unit, of so many bytes in the tokens and in the cache.
inline KvArguments make_arguments(const KvCopy &copy, int64_t row_units, int64_t token_unit, int64_t cache_unit,
                                  bool strided) {
  KvArguments arguments = {};
  for (int i = 0; i < 2; ++i) {
    const KvSide &side = copy.side[i];
    arguments.side[i] = {
        side.token_data,  side.token_step,     side.token_head, strided ? side.token_dim : token_unit, side.cache_data,
        side.cache_block, side.cache_position, side.cache_head, strided ? side.cache_dim : cache_unit, side.scale};
  }
  arguments.slots = copy.slots;
  arguments.last = copy.last;
  arguments.slot_step = copy.slot_step;
  arguments.wide_slots = copy.wide_slots;
  arguments.capacity = copy.capacity;
  arguments.block_size = copy.block_size;
  arguments.wide_capacity = copy.capacity > int64_t(UINT32_MAX);
  // A cache without slots has no block size to divide by.
  if (!arguments.wide_capacity && copy.block_size > 0 && copy.block_size <= int64_t(UINT32_MAX))
    arguments.block_size32 = Divider(uint32_t(copy.block_size));
  arguments.row_units = Divider(uint32_t(row_units));
  arguments.heads = Divider(uint32_t(copy.heads));
  arguments.units = Divider(uint32_t(2 * copy.heads * row_units));
  return arguments;
}

// Launches in stream order for at most `limit` tokens each.
template <class Body>
void for_each_part(KvArguments arguments, int64_t tokens, int64_t limit, const Body &body) {
  for (int64_t first = 0; first < tokens; first += limit) {
    arguments.tokens = uint32_t(tokens - first < limit ? tokens - first : limit);
    body(arguments);
    for (KvArguments::Side &side : arguments.side) side.tokens += limit * side.token_step;
    arguments.slots += limit * arguments.slot_step * (arguments.wide_slots ? 8 : 4);
  }
}

// Later launches write later tokens, so that only tokens of one launch must be looked through.
template <class Unit>
void launch_append(const KvArguments &whole, int64_t tokens, Stream stream) {
  const int64_t units = whole.units.divisor;
  if (tokens <= kFewTokens) {
    KvArguments arguments = whole;
    arguments.tokens = uint32_t(tokens);
    int threads = kUnitThreads;
    while (threads > 64 && threads / 2 >= units) threads /= 2;
    arguments.parts = Divider(uint32_t(ceil_div(units, threads)));
    const int64_t blocks = tokens * arguments.parts.divisor;
    launch(append_few<Unit>, {.blocks = blocks, .threads = threads, .early = true}, stream, arguments);
    return;
  }
  // With room for the blocks that write nothing.
  const int64_t most = (INT32_MAX - kManyTokens) / units;
  for_each_part(whole, tokens, most < kManyTokens ? most : kManyTokens, [&](const KvArguments &arguments) {
    const int64_t finders = ceil_div(arguments.tokens, kUnitThreads);
    const int64_t blocks = finders + ceil_div(arguments.tokens * units, kUnitThreads);
    launch(append_units<Unit>, {.blocks = blocks, .threads = kUnitThreads, .early = true}, stream, arguments);
    launch(mend_units<Unit>, {.blocks = ceil_div(arguments.tokens, 32), .threads = kUnitThreads, .early = true}, stream,
           arguments);
  });
}

template <class Unit>
void launch_gather(const KvArguments &whole, int64_t tokens, Stream stream) {
  const int64_t units = whole.units.divisor;
  for_each_part(whole, tokens, INT32_MAX / units, [&](const KvArguments &arguments) {
    const int64_t blocks = ceil_div(arguments.tokens * units, kUnitThreads);
    launch(gather_units<Unit>, {.blocks = blocks, .threads = kUnitThreads, .early = true}, stream, arguments);
  });
}

// Rows without gaps on both sides.
inline bool is_dense(const KvCopy &copy) {
  const int64_t size = nibbles(copy.dtype) / kNibblesPerByte;
  const int64_t cache_size = nibbles(copy.cache_dtype) / kNibblesPerByte;
  for (const KvSide &side : copy.side)
    if (side.token_dim != size || side.cache_dim != cache_size) return copy.dim == 1;
  return true;
}

// All addresses and steps between rows, or-ed: what divides this divides all of them.
inline int64_t token_bits(const KvCopy &copy) {
  int64_t bits = 0;
  for (const KvSide &side : copy.side) bits |= side.token_data | side.token_step | side.token_head;
  return bits;
}
inline int64_t cache_bits(const KvCopy &copy) {
  int64_t bits = 0;
  for (const KvSide &side : copy.side)
    bits |= side.cache_data | side.cache_block | side.cache_position | side.cache_head;
  return bits;
}

// Calls launch_word(TypeTag<Word>{}, arguments) with the widest word that the addresses allow.
template <class Body>
void with_word(const KvCopy &copy, const Body &body) {
  const int64_t size = nibbles(copy.dtype) / kNibblesPerByte;
  const bool dense = is_dense(copy);
  const int64_t row = copy.dim * size;
  const int64_t bits = token_bits(copy) | cache_bits(copy) | row | 16;
  const int64_t word = dense ? bits & -bits : size;
  const KvArguments arguments = make_arguments(copy, row / word, word, word, !dense);
  switch (word) {
    case 1:
      return body(TypeTag<uint8_t>{}, arguments);
    case 2:
      return body(TypeTag<uint16_t>{}, arguments);
    case 4:
      return body(TypeTag<uint32_t>{}, arguments);
    case 8:
      return body(TypeTag<uint2>{}, arguments);
    default:
      return body(TypeTag<uint4>{}, arguments);
  }
}

// Calls body(TypeTag<T>{}, TypeTag<Cache>{}, eight, arguments), where `eight` says whether units are
// of eight elements or of one.
template <class Body>
void with_conversion(const KvCopy &copy, const Body &body) {
  const int64_t size = nibbles(copy.dtype) / kNibblesPerByte;
  const bool eight = is_dense(copy) && copy.dim % 8 == 0 && token_bits(copy) % 16 == 0 && cache_bits(copy) % 8 == 0;
  const KvArguments arguments =
      eight ? make_arguments(copy, copy.dim / 8, 8 * size, 8, false) : make_arguments(copy, copy.dim, size, 1, true);
  dispatch_dtype<float16, bfloat16, float>(copy.dtype, [&](auto type) {
    dispatch_dtype<float8_e4m3fn, float8_e5m2>(copy.cache_dtype,
                                               [&](auto cache_type) { body(type, cache_type, eight, arguments); });
  });
}

void kv_cache_append_float8_cuda(const KvCopy &copy, Stream stream);

}  // namespace baracuda
