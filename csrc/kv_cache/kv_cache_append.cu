// SPDX-License-Identifier: Apache-2.0
#include "kv_cache/kv_cache.cuh"

namespace baracuda {

void kv_cache_append_cuda(const KvCopy &copy, Stream stream) {
  if (copy.converts()) {
    kv_cache_append_float8_cuda(copy, stream);
    return;
  }
  with_word(copy, [&](auto word, const KvArguments &arguments) {
    launch_append<CopyUnit<typename decltype(word)::type>>(arguments, copy.tokens, stream);
  });
}

std::string kv_cache_arch(const char *plan) {
  return kernel_arch(plan, reinterpret_cast<const void *>(append_few<CopyUnit<uint4>>));
}

}  // namespace baracuda
