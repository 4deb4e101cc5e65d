// Rows of keys and values: the rows of a page, and their copy to shared memory.
//
// Compiled with, in addition to page.cuh's macros: ELEMENT (__half, __nv_bfloat16).
#pragma once

#include "common/page.cuh"

constexpr int ROW_BYTES = HEAD_DIM * 2;
constexpr int CHUNKS = ROW_BYTES / 16;
constexpr int SIDE_BYTES = PAGE_TOKENS * ROW_BYTES;  // of a page's keys, or of its values

// Offset of a 16-byte chunk of a row, swizzled so that a chunk of eight rows uses each bank once.
__device__ __forceinline__ int chunk_offset(int token, int chunk) {
  return (token * CHUNKS + (chunk ^ token % 8)) * 16;
}

// Rows of one side (keys or values) and head: of new tokens, and of tokens stored in 16-bit
// precision.
struct Source {
  const uint8_t* tokens;
  const uint8_t* recent;
  uint32_t stride;  // bytes from token to token
  uint32_t slot_bytes;

  // states: one side, (batch, KV heads, tokens, HEAD_DIM), strides in elements. recent: (slots,
  // 2, KV heads, HEAD_DIM).
  __device__ __forceinline__ static Source of(const ELEMENT* states, const int64_t (&stride)[3],
                                              const ELEMENT* recent, int side, int row, int head,
                                              int kv_heads) {
    return {reinterpret_cast<const uint8_t*>(states + row * stride[0] + head * stride[1]),
            reinterpret_cast<const uint8_t*>(recent + (side * kv_heads + head) * HEAD_DIM),
            static_cast<uint32_t>(stride[2]) * 2, 2u * kv_heads * ROW_BYTES};
  }

  // Row of a new token, or of slot ~token.
  __device__ __forceinline__ const uint8_t* row(int token) const {
    if (token >= 0) return tokens + static_cast<uint64_t>(token) * stride;
    return recent + static_cast<uint64_t>(~token) * slot_bytes;
  }

  // Request the rows listed in `which`; eight lanes per row.
  template <int THREADS>
  __device__ __forceinline__ void request(uint8_t* target, const int* which) const {
    constexpr int AT_ONCE = THREADS / 8;
    static_assert(AT_ONCE % 8 == 0, "a thread's rows are all swapped alike");
    const int first = threadIdx.x / 8, lane = threadIdx.x % 8;
    const uint32_t place = shared_address(target) + chunk_offset(first, lane);
#pragma unroll
    for (int i = 0; i < PAGE_TOKENS / AT_ONCE; ++i) {
      const uint8_t* from = row(which[first + i * AT_ONCE]);
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; chunk += 8)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                         place + i * AT_ONCE * ROW_BYTES + chunk * 16),
                     "l"(from + (chunk + lane) * 16)
                     : "memory");
    }
  }
};

__device__ __forceinline__ void close_request() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Wait until at most the last LEFT requests of this thread are in flight.
template <int LEFT>
__device__ __forceinline__ void wait_request() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
