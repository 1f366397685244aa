// SPDX-License-Identifier: Apache-2.0
#include "kv_cache/kv_cache.cuh"

namespace baracuda {

void kv_cache_append_float8_cuda(const KvCopy &copy, Stream stream) {
  with_conversion(copy, [&](auto type, auto cache_type, bool eight, const KvArguments &arguments) {
    using T = typename decltype(type)::type;
    using Cache = typename decltype(cache_type)::type;
    if (eight) {
      launch_append<QuantizeUnit<T, Cache>>(arguments, copy.tokens, stream);
    } else {
      launch_append<QuantizeElement<T, Cache>>(arguments, copy.tokens, stream);
    }
  });
}

}  // namespace baracuda
