// SPDX-License-Identifier: Apache-2.0
#include "baracuda/kv_cache.h"
#include "kv_cache/kv_cache.h"
#include "runtime/plan.h"
#include "runtime/workspace.h"

namespace baracuda {

void merge_heads(KvCopy &copy) {
  const int64_t size = nibbles(copy.dtype) / kNibblesPerByte;
  const int64_t cache_size = nibbles(copy.cache_dtype) / kNibblesPerByte;
  if (copy.heads == 1) return;
  for (const KvSide &side : copy.side) {
    const bool dense = copy.dim == 1 || (side.token_dim == size && side.cache_dim == cache_size);
    if (!dense || side.token_head != copy.dim * size || side.cache_head != copy.dim * cache_size) return;
  }
  for (KvSide &side : copy.side) {
    side.token_dim = size;
    side.cache_dim = cache_size;
  }
  copy.dim *= copy.heads;
  copy.heads = 1;
}

namespace {

// Appending and gathering differ in the direction and in the operands' roles.
class KvCachePlan : public Plan {
 protected:
  template <class Descriptor>
  KvCachePlan(const char *name, const char *op, bool gather, const Descriptor &desc, Options options)
      : Plan(name, std::move(options)), dtype_(desc.dtype), block_size_(desc.block_size) {
    const DTypeInfo &dtype = check_dtype("dtype", desc.dtype);
    if (is_packed(desc.dtype) || desc.dtype.code == kDLComplex)
      unsupported(name, ": dtype: no kernel for ", dtype.name);
    const bool converts = desc.cache_dtype.bits != 0;
    cache_dtype_ = converts ? desc.cache_dtype : desc.dtype;
    if (converts) check_conversion(desc.dtype, desc.cache_dtype);
    const DTypeInfo &index = check_dtype("index_dtype", desc.index_dtype);
    if (!(index.dtype == DTypeOf<int32_t>::value || index.dtype == DTypeOf<int64_t>::value))
      refuse("index_dtype: expected int32 or int64, got ", index.name);

    Shape tokens;
    Shape cache;
    Shape slots;
    check_shape("tokens, heads, dim", {3, {desc.tokens, desc.heads, desc.dim}}, desc.dtype, tokens);
    check_shape("blocks, block_size, heads, dim", {4, {desc.blocks, desc.block_size, desc.heads, desc.dim}},
                cache_dtype_, cache);
    check_shape("tokens", {1, {desc.tokens}}, desc.index_dtype, slots);
    if (__int128(desc.heads) * desc.dim > kLongestToken)
      unsupported(name, ": heads, dim: at most ", kLongestToken, " elements a token, got ", desc.heads, " x ",
                  desc.dim);

    const Role token_role = gather ? Role::out : Role::in;
    const Role cache_role = gather ? Role::in : Role::inout;
    const OperandSpec key_cache = {"key_cache", cache_role, cache_dtype_, cache};
    const OperandSpec value_cache = {"value_cache", cache_role, cache_dtype_, cache};
    const OperandSpec slot_mapping = {"slot_mapping", Role::in, desc.index_dtype, slots};
    if (gather) {
      operands_ = {key_cache, value_cache, slot_mapping};
    } else {
      operands_ = {{"key", token_role, desc.dtype, tokens},
                   {"value", token_role, desc.dtype, tokens},
                   key_cache,
                   value_cache,
                   slot_mapping};
    }
    if (converts) {
      const Shape one = {1, {1}};
      operands_.push_back({"key_scale", Role::in, DTypeOf<float>::value, one});
      operands_.push_back({"value_scale", Role::in, DTypeOf<float>::value, one});
    }
    if (gather) {
      operands_.push_back({"key", token_role, desc.dtype, tokens});
      operands_.push_back({"value", token_role, desc.dtype, tokens});
    }

    launches_only_ = true;
    // A cache without slots takes nothing, but gathering from it still gives zeros.
    empty_ = tokens.count() == 0 || (!gather && cache.count() == 0);
    path_ = empty_ ? "empty" : converts ? "convert" : "copy";
    const int64_t elements = tokens.count();
    cost_ = {2 * (storage_bytes(desc.dtype, elements) + storage_bytes(cache_dtype_, elements)) +
                 storage_bytes(desc.index_dtype, slots.count()),
             converts ? 2 * elements : 0};
    const char *math = converts ? "float32" : "exact";
    sku_ = {"kv_cache",
            op,
            dtype.name,
            converts ? dtype_name(cache_dtype_) : index.name,
            "cpu",
            "cpu",
            {math, "none", true, true}};
    if constexpr (kWithCuda) {
      if (device().is_cuda()) {
        sku_.arch = kv_cache_arch(name);
        sku_.backend = "bespoke";
      }
    }
  }

  KvCopy describe(const Tensor &key, const Tensor &value, const Tensor &key_cache, const Tensor &value_cache,
                  const Tensor &slots, const Tensor *scales) const {
    KvCopy copy = {};
    copy.dtype = dtype_;
    copy.cache_dtype = cache_dtype_;
    copy.tokens = key.shape[0];
    copy.heads = key.shape[1];
    copy.dim = key.shape[2];
    copy.block_size = block_size_;
    copy.capacity = key_cache.shape[0] * key_cache.shape[1];
    copy.slots = slots.data;
    copy.slot_step = slots.stride[0];
    copy.wide_slots = slots.dtype.bits == 64;
    const Tensor *tokens[2] = {&key, &value};
    const Tensor *caches[2] = {&key_cache, &value_cache};
    const int64_t size = nibbles(dtype_) / kNibblesPerByte;
    const int64_t cache_size = nibbles(cache_dtype_) / kNibblesPerByte;
    for (int i = 0; i < 2; ++i) {
      const Tensor &from = *tokens[i];
      const Tensor &to = *caches[i];
      copy.side[i] = {int64_t(reinterpret_cast<uintptr_t>(from.data)),
                      from.stride[0] * size,
                      from.stride[1] * size,
                      from.stride[2] * size,
                      int64_t(reinterpret_cast<uintptr_t>(to.data)),
                      to.stride[0] * cache_size,
                      to.stride[1] * cache_size,
                      to.stride[2] * cache_size,
                      to.stride[3] * cache_size,
                      scales ? scales[i].as<float>() : nullptr};
    }
    merge_heads(copy);
    return copy;
  }

  bool converts() const { return !(dtype_ == cache_dtype_); }

  bool empty_;

 private:
  static constexpr int64_t kLongestToken = int64_t(1) << 27;

  void check_conversion(DLDataType from, DLDataType to) const {
    const bool float8 = to == DTypeOf<float8_e4m3fn>::value || to == DTypeOf<float8_e5m2>::value;
    const bool wider =
        from == DTypeOf<float16>::value || from == DTypeOf<bfloat16>::value || from == DTypeOf<float>::value;
    if (!float8 || !wider)
      unsupported(name_, ": cache_dtype: no conversion from ", std::string(dtype_name(from)), " to ", dtype_name(to));
  }

  DLDataType dtype_;
  DLDataType cache_dtype_;
  int64_t block_size_;
};

class KvCacheAppendPlan final : public KvCachePlan {
 public:
  static constexpr const char *kName = "KvCacheAppendPlan";

  KvCacheAppendPlan(const baracuda_kv_cache_append_desc &desc, Options options)
      : KvCachePlan(kName, "kv_cache_append", false, desc, std::move(options)) {
    if (empty_ || !device().is_cuda() || desc.tokens <= kFewTokens) return;
    Workspace counter(nullptr);
    take_last(counter);
    workspace_size_ = counter.size();
    launches_only_ = false;
  }

 protected:
  enum { kKey, kValue, kKeyCache, kValueCache, kSlots, kKeyScale };

  void run(const Call &call) const override {
    if (empty_) return;
    const Operands &given = call.operands;
    KvCopy copy = describe(given[kKey], given[kValue], given[kKeyCache], given[kValueCache], given[kSlots],
                           converts() ? &given[kKeyScale] : nullptr);
    if (workspace_size_ != 0) {
      Workspace workspace(call.workspace);
      copy.last = take_last(workspace);
    }
    if constexpr (kWithCuda) {
      if (device().is_cuda()) {
        kv_cache_append_cuda(copy, call.stream);
        return;
      }
    }
    kv_cache_append_cpu(copy);
  }

 private:
  uint32_t *take_last(Workspace &workspace) const {
    const int64_t tokens = operands_[kKey].shape[0];
    return workspace.take<uint32_t>(tokens < kManyTokens ? tokens : kManyTokens);
  }
};

class KvCacheGatherPlan final : public KvCachePlan {
 public:
  static constexpr const char *kName = "KvCacheGatherPlan";

  KvCacheGatherPlan(const baracuda_kv_cache_gather_desc &desc, Options options)
      : KvCachePlan(kName, "kv_cache_gather", true, desc, std::move(options)) {}

 protected:
  enum { kKeyCache, kValueCache, kSlots, kKeyScale };

  void run(const Call &call) const override {
    if (empty_) return;
    const Operands &given = call.operands;
    const int key = kKeyScale + (converts() ? 2 : 0);
    const KvCopy copy = describe(given[key], given[key + 1], given[kKeyCache], given[kValueCache], given[kSlots],
                                 converts() ? &given[kKeyScale] : nullptr);
    if constexpr (kWithCuda) {
      if (device().is_cuda()) {
        kv_cache_gather_cuda(copy, call.stream);
        return;
      }
    }
    kv_cache_gather_cpu(copy);
  }
};

}  // namespace
}  // namespace baracuda

extern "C" baracuda_status baracuda_kv_cache_append_plan_create(const baracuda_kv_cache_append_desc *desc,
                                                                const baracuda_plan_options *options,
                                                                baracuda_plan **plan) {
  return baracuda::create_plan<baracuda::KvCacheAppendPlan>(desc, options, plan);
}

extern "C" baracuda_status baracuda_kv_cache_gather_plan_create(const baracuda_kv_cache_gather_desc *desc,
                                                                const baracuda_plan_options *options,
                                                                baracuda_plan **plan) {
  return baracuda::create_plan<baracuda::KvCacheGatherPlan>(desc, options, plan);
}
