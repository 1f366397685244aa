// SPDX-License-Identifier: Apache-2.0
#include "kv_cache/kv_cache.cuh"

namespace baracuda {

void kv_cache_gather_cuda(const KvCopy &copy, Stream stream) {
  if (!copy.converts()) {
    with_word(copy, [&](auto word, const KvArguments &arguments) {
      launch_gather<CopyUnit<typename decltype(word)::type>>(arguments, copy.tokens, stream);
    });
    return;
  }
  with_conversion(copy, [&](auto type, auto cache_type, bool eight, const KvArguments &arguments) {
    using T = typename decltype(type)::type;
    using Cache = typename decltype(cache_type)::type;
    if (eight) {
      launch_gather<DequantizeUnit<T, Cache>>(arguments, copy.tokens, stream);
    } else {
      launch_gather<DequantizeElement<T, Cache>>(arguments, copy.tokens, stream);
    }
  });
}

}  // namespace baracuda
