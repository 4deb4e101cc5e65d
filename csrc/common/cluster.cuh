// Clusters of thread blocks, which read each other's shared memory, and copies by tensor maps
// (sm_90 and newer).
#pragma once

#include "common/types.cuh"

// What cuTensorMapEncodeTiled makes.
struct alignas(64) TensorMap {
  uint64_t words[16];
};

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copy a box of a matrix's elements from `column` and `row`; elements beyond the matrix become 0.
// WEIGHTS: as in copy_piece (copy.cuh).
template <bool WEIGHTS>
__device__ __forceinline__ void copy_box(uint32_t target, const TensorMap& map, int column, int row,
                                         uint64_t* barrier) {
  if (WEIGHTS) {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
        "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(target),
        "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier))
        : "memory");
  }
}

// Address of the same place in the shared memory of the cluster's thread block `rank`.
__device__ __forceinline__ uint32_t remote_address(uint32_t local, int rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
  return remote;
}

// Write to a thread block's shared memory; its barrier counts the bytes as those of a copy.
__device__ __forceinline__ void store_remote(uint32_t remote, float x, float y,
                                             uint32_t remote_barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
          remote),
      "f"(x), "f"(y), "r"(remote_barrier)
      : "memory");
}

// Arrive at a thread block's barrier. It sees no memory operations before that, except those of
// which this thread knows that they have ended.
__device__ __forceinline__ void arrive_remote(uint32_t remote_barrier) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(remote_barrier)
               : "memory");
}

// All threads of a cluster arrive once, after `fence.mbarrier_init`; those that wait may then use
// the barriers of other thread blocks.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
