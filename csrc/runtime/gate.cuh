// SPDX-License-Identifier: Apache-2.0
// Copies between global and shared memory that go on while threads do other things: by the thread that asks for them,
// or by the copy engine (from sm_90 on), with the gates that tell of their end.
#pragma once

#include <cstddef>
#include <cstdint>

namespace baracuda {

__device__ __forceinline__ uint32_t shared_address(const void *p) { return uint32_t(__cvta_generic_to_shared(p)); }

// A thread's own copies, of 4, 8 or 16 bytes each; those of a group are waited for together.
template <int kBytes>
__device__ __forceinline__ void copy_ahead(uint32_t to, const void *from) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(kBytes) : "memory");
  }
}
template <int kBytes>
__device__ __forceinline__ void copy_ahead(void *to, const void *from) {
  copy_ahead<kBytes>(shared_address(to), from);
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until no more groups than kPending, the last ones, are under way.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// What the copy engine moves begins at a multiple of so many bytes, on both sides, and is one.
constexpr uint32_t kBulkBytes = 16;
// Both sides should lie alike within lines of so many bytes: else the second-level cache gets more than twice as many
// requests.
constexpr uint32_t kBulkLine = 128;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// A gate is a word in shared memory that opens when enough have arrived, and all bytes that were announced; time and
// again, each time with the other parity.
__device__ __forceinline__ void set_gate(uint64_t *gate, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(gate)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive(uint64_t *gate) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(gate)) : "memory");
}
__device__ __forceinline__ void arrive_and_announce(uint64_t *gate, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(gate)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void announce(uint64_t *gate, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(gate)), "r"(bytes)
               : "memory");
}
// Whether the gate has opened `parity`'s time.
__device__ __forceinline__ bool is_open(uint64_t *gate, uint32_t parity) {
  uint32_t open;
  asm volatile(
      "{\n\t.reg .pred p;\n\t"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
      "selp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(open)
      : "r"(shared_address(gate)), "r"(parity)
      : "memory");
  return open;
}
__device__ __forceinline__ void pass(uint64_t *gate, uint32_t parity) {
  uint32_t open;
  do {
    asm volatile(
        "{\n\t.reg .pred p;\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(open)
        : "r"(shared_address(gate)), "r"(parity)
        : "memory");
  } while (!open);
}
// Copies of the engine.
__device__ __forceinline__ void bulk_load(std::byte *to, const std::byte *from, uint32_t bytes, uint64_t *gate) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(gate))
               : "memory");
}
// The second-level cache keeps it rather than other things.
__device__ __forceinline__ void bulk_load_and_keep(std::byte *to, const std::byte *from, uint32_t bytes,
                                                   uint64_t *gate) {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(gate)), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void bulk_store(std::byte *to, const std::byte *from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void close_bulk_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until shared memory may be written again.
__device__ __forceinline__ void wait_for_bulk_reads() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void wait_for_bulk_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// What the thread wrote is there for the copy engine.
__device__ __forceinline__ void show_copy_engine() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#endif

}  // namespace baracuda
