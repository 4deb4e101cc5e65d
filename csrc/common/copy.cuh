// Copies of page heads from global to shared memory, tracked by one mbarrier per buffer.
//
// USE_TMA 1: the bulk copy engine (sm_90 and newer), issued by one lane.
// USE_TMA 0: cp.async by all lanes of a warp (sm_80 and newer).
// All lanes of a warp call begin, then copy for each piece, then end; or copy_rows.
#pragma once

#include "common/types.cuh"

__device__ __forceinline__ void barrier_init(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(USE_TMA ? 1 : 32)
               : "memory");
}

// `bytes`: the total of all pieces.
__device__ __forceinline__ void copy_begin(uint64_t* barrier, uint32_t bytes, int lane) {
#if USE_TMA
  if (lane == 0)
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(
                     shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
#endif
}

// `bytes` and both addresses are multiples of 16. WEIGHTS: the data are read once per step and are
// evicted from L2 first, so that small data with many readers stay: instructions, parameters,
// activations.
template <bool WEIGHTS = false>
__device__ __forceinline__ void copy_piece(void* target, const uint8_t* source, uint32_t bytes,
                                           uint64_t* barrier, int lane) {
#if USE_TMA
  if (WEIGHTS && lane == 0) {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(target)),
        "l"(source), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
  } else if (lane == 0) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(target)),
        "l"(source), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
  }
#else
  for (uint32_t at = lane * 16; at < bytes; at += 512)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(target) + at),
                 "l"(source + at)
                 : "memory");
#endif
}

__device__ __forceinline__ void copy_end(uint64_t* barrier) {
#if !USE_TMA
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
#endif
}

// Copy a row of BYTES for each of the first LANES lanes that has one, with no copy_begin or
// copy_end; the row of lane l goes to the l-th place. Bulk copies of rows would be issued one after
// the other.
template <int BYTES, int LANES>
__device__ __forceinline__ void copy_rows(uint8_t* target, const uint8_t* source, bool has_one,
                                          uint64_t* barrier, int lane) {
  constexpr int CHUNKS = BYTES / 16 < 32 ? BYTES / 16 : 32;  // of a row at a time
  static_assert(32 % CHUNKS == 0 && BYTES % (16 * CHUNKS) == 0, "lanes divide rows among them");
  const uint32_t rows = __ballot_sync(~0u, has_one);
#pragma unroll 4
  for (int first = 0; first < LANES; first += 32 / CHUNKS) {
    const int row = first + lane / CHUNKS;
    const uint64_t from = __shfl_sync(~0u, reinterpret_cast<uint64_t>(source), row);
#pragma unroll
    for (int at = lane % CHUNKS * 16; at < BYTES; at += CHUNKS * 16)
      if (rows >> row & 1)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(target) +
                                                                       row * BYTES + at),
                     "l"(from + at)
                     : "memory");
  }
#if USE_TMA
  // Each lane's arrival adds to the count that the barrier waits for; the last one is expected.
  asm volatile("cp.async.mbarrier.arrive.shared.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
  __syncwarp();
  if (lane == 0)
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
#else
  copy_end(barrier);
#endif
}

__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done)
    asm volatile(
        "{ .reg .pred p;\n"
#if USE_TMA
        "mbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
#else
        "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
#endif
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
}

__device__ __forceinline__ void store_release(uint32_t* target, uint32_t value) {
  asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(shared_address(target)), "r"(value)
               : "memory");
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* source) {
  uint32_t value;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];"
               : "=r"(value)
               : "r"(shared_address(source))
               : "memory");
  return value;
}
