// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "kv_cache/kv_cache.h"
#include "runtime/parallel.h"

namespace baracuda {
namespace {

template <class T>
T load(int64_t address) {
  T value;
  std::memcpy(&value, reinterpret_cast<const void *>(uintptr_t(address)), sizeof value);
  return value;
}

template <class T>
void store(int64_t address, T value) {
  std::memcpy(reinterpret_cast<void *>(uintptr_t(address)), &value, sizeof value);
}

int64_t slot_of(const KvCopy &copy, int64_t token) {
  const int64_t place = token * copy.slot_step;
  return copy.wide_slots ? reinterpret_cast<const int64_t *>(copy.slots)[place]
                         : reinterpret_cast<const int32_t *>(copy.slots)[place];
}

bool inside(const KvCopy &copy, int64_t slot) { return slot >= 0 && slot < copy.capacity; }

int64_t cache_address(const KvCopy &copy, const KvSide &side, int64_t slot, int64_t head) {
  return side.cache_data + slot / copy.block_size * side.cache_block + slot % copy.block_size * side.cache_position +
         head * side.cache_head;
}

int64_t token_address(const KvSide &side, int64_t token, int64_t head) {
  return side.token_data + token * side.token_step + head * side.token_head;
}

struct Row {
  int64_t data;
  int64_t step;
};

// Elements as they are; `kSize` 0: a contiguous row of `size` bytes, which is `count` then.
template <int kSize>
void copy_row(Row to, Row from, int64_t count) {
  if constexpr (kSize == 0) {
    std::memcpy(reinterpret_cast<void *>(uintptr_t(to.data)), reinterpret_cast<const void *>(uintptr_t(from.data)),
                size_t(count));
  } else {
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(reinterpret_cast<void *>(uintptr_t(to.data + i * to.step)),
                  reinterpret_cast<const void *>(uintptr_t(from.data + i * from.step)), kSize);
  }
}

template <class T, class Cache>
void quantize_row(Row to, Row from, int64_t count, float scale) {
  for (int64_t i = 0; i < count; ++i)
    store(to.data + i * to.step, Cache(float(load<T>(from.data + i * from.step)) / scale));
}

template <class T, class Cache>
void dequantize_row(Row to, Row from, int64_t count, float scale) {
  for (int64_t i = 0; i < count; ++i)
    store(to.data + i * to.step, T(float(load<Cache>(from.data + i * from.step)) * scale));
}

void zero_row(Row to, int64_t count, int64_t size) {
  for (int64_t i = 0; i < count; ++i)
    std::memset(reinterpret_cast<void *>(uintptr_t(to.data + i * to.step)), 0, size_t(size));
}

// Calls body(move), where move(to, from, side) moves a row, for the copy's types.
template <bool kGather, class Body>
void with_move(const KvCopy &copy, const Body &body) {
  const int64_t dim = copy.dim;
  if (copy.converts()) {
    dispatch_dtype<float16, bfloat16, float>(copy.dtype, [&](auto type) {
      using T = decltype(type)::type;
      dispatch_dtype<float8_e4m3fn, float8_e5m2>(copy.cache_dtype, [&](auto cache_type) {
        using Cache = decltype(cache_type)::type;
        body([dim](Row to, Row from, const KvSide &side) {
          if constexpr (kGather) {
            dequantize_row<T, Cache>(to, from, dim, *side.scale);
          } else {
            quantize_row<T, Cache>(to, from, dim, *side.scale);
          }
        });
      });
    });
    return;
  }
  const int64_t size = nibbles(copy.dtype) / kNibblesPerByte;
  bool contiguous = true;
  for (const KvSide &side : copy.side) contiguous = contiguous && side.token_dim == size && side.cache_dim == size;
  const auto with_copy = [&](void (*copy_one)(Row, Row, int64_t), int64_t count) {
    body([=](Row to, Row from, const KvSide &) { copy_one(to, from, count); });
  };
  if (contiguous || dim == 1) {
    with_copy(copy_row<0>, dim * size);
  } else if (size == 1) {
    with_copy(copy_row<1>, dim);
  } else if (size == 2) {
    with_copy(copy_row<2>, dim);
  } else if (size == 4) {
    with_copy(copy_row<4>, dim);
  } else {
    with_copy(copy_row<8>, dim);
  }
}

int64_t work_of(const KvCopy &copy) {
  const int64_t cost = copy.converts() ? 8 : nibbles(copy.dtype) / kNibblesPerByte;
  return 2 * copy.tokens * copy.heads * copy.dim * cost;
}

}  // namespace

void kv_cache_append_cpu(const KvCopy &copy) {
  // Tokens go in order, so that the last one of a slot stays; sides and heads go in parallel.
  with_move<false>(copy, [&](const auto &move) {
    parallel_for(2 * copy.heads, work_of(copy), [&](int64_t begin, int64_t end) {
      for (int64_t token = 0; token < copy.tokens; ++token) {
        const int64_t slot = slot_of(copy, token);
        if (!inside(copy, slot)) continue;
        for (int64_t row = begin; row < end; ++row) {
          const KvSide &side = copy.side[row / copy.heads];
          const int64_t head = row % copy.heads;
          move(Row{cache_address(copy, side, slot, head), side.cache_dim},
               Row{token_address(side, token, head), side.token_dim}, side);
        }
      }
    });
  });
}

void kv_cache_gather_cpu(const KvCopy &copy) {
  const int64_t size = nibbles(copy.dtype) / kNibblesPerByte;
  with_move<true>(copy, [&](const auto &move) {
    parallel_for(copy.tokens, work_of(copy), [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const int64_t slot = slot_of(copy, token);
        for (int64_t row = 0; row < 2 * copy.heads; ++row) {
          const KvSide &side = copy.side[row / copy.heads];
          const int64_t head = row % copy.heads;
          const Row to = {token_address(side, token, head), side.token_dim};
          if (inside(copy, slot)) {
            move(to, Row{cache_address(copy, side, slot, head), side.cache_dim}, side);
          } else {
            zero_row(to, copy.dim, size);
          }
        }
      }
    });
  });
}

}  // namespace baracuda
