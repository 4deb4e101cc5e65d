// Matrix products of a warpgroup (sm_90a): d += A B^T, with 64 rows of A and some rows of B, both
// 16 elements wide, in shared memory with a 128-byte swizzle, as TMA stores them. Or A is in
// registers: each warp has fragments of its 16 rows as in mma.cuh; then B may also be transposed:
// 16 rows of some elements.
//
// Lane 4 * group + quad of the warpgroup's warp w has of d, for each j:
//   d[4 j], d[4 j + 1]:  row 16 w + group, columns 8 j + 2 quad, 8 j + 2 quad + 1
//   d[4 j + 2], d[4 j + 3]:  row 16 w + group + 8
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/types.cuh"

// Descriptor of rows of 128 bytes, in groups of 8 that begin at multiples of 1024 bytes. The
// address is in its low bits, in units of 16 bytes.
__device__ __forceinline__ uint64_t swizzled_rows(uint32_t address) {
  return 1ull << 62 | 64ull << 32 | 1ull << 16 | address >> 4;
}

// Descriptor of a transposed B: rows as above for its first 64 columns, and after `panel_bytes` for
// the next 64.
__device__ __forceinline__ uint64_t swizzled_columns(uint32_t address, uint32_t panel_bytes) {
  return 1ull << 62 | 64ull << 32 | static_cast<uint64_t>(panel_bytes >> 4) << 16 | address >> 4;
}

#define TEN(d) \
  "%" #d "0,%" #d "1,%" #d "2,%" #d "3,%" #d "4,%" #d "5,%" #d "6,%" #d "7,%" #d "8,%" #d "9,"
#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
#define WGMMA_OF_FRAGMENTS(FUNCTION, TRANSPOSED, ROWS, ELEMENTS, NAME, NAMES, A, B, A2, A3, AFTER, \
                           ...)                                                                   \
  __device__ __forceinline__ void FUNCTION(float(&d)[ROWS / 2], const uint32_t(&a)[4], uint64_t b, \
                                           ELEMENTS) {                                            \
    asm volatile(                                                                                 \
        "{ .reg .pred add;\n setp.eq.u32 add, 0, 0;\n"                                            \
        "wgmma.mma_async.sync.aligned.m64n" #ROWS "k16.f32." NAME "." NAME " {" NAMES "}, {" A    \
        ", " B ", " A2 ", " A3 "}, " AFTER ", add, 1, 1, " #TRANSPOSED "; }"                      \
        : __VA_ARGS__                                                                             \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                    \
  }
#define WGMMA(ROWS, ELEMENTS, NAME, NAMES, A, B, A2, A3, AFTER, ...)                             \
  __device__ __forceinline__ void wgmma(float(&d)[ROWS / 2], uint64_t a, uint64_t b, ELEMENTS) {  \
    asm volatile(                                                                                 \
        "{ .reg .pred add;\n setp.eq.u32 add, 0, 0;\n"                                            \
        "wgmma.mma_async.sync.aligned.m64n" #ROWS "k16.f32." NAME "." NAME " {" NAMES "}, " A     \
        ", " B ", add, 1, 1, 0, 0; }"                                                             \
        : __VA_ARGS__                                                                             \
        : "l"(a), "l"(b));                                                                        \
  }                                                                                               \
  WGMMA_OF_FRAGMENTS(wgmma, 0, ROWS, ELEMENTS, NAME, NAMES, A, B, A2, A3, AFTER, __VA_ARGS__)     \
  WGMMA_OF_FRAGMENTS(wgmma_transposed, 1, ROWS, ELEMENTS, NAME, NAMES, A, B, A2, A3, AFTER,       \
                     __VA_ARGS__)
#define WGMMAS(ELEMENTS, NAME)                                                                    \
  WGMMA(16, ELEMENTS, NAME, "%0,%1,%2,%3,%4,%5,%6,%7", "%8", "%9", "%10", "%11", "%12", FOUR(0),  \
        FOUR(4))                                                                                  \
  WGMMA(32, ELEMENTS, NAME, TEN() "%10,%11,%12,%13,%14,%15", "%16", "%17", "%18", "%19", "%20",   \
        SIXTEEN(0))                                                                               \
  WGMMA(64, ELEMENTS, NAME, TEN() TEN(1) TEN(2) "%30,%31", "%32", "%33", "%34", "%35", "%36",     \
        SIXTEEN(0), SIXTEEN(16))                                                                  \
  WGMMA(96, ELEMENTS, NAME, TEN() TEN(1) TEN(2) TEN(3) "%40,%41,%42,%43,%44,%45,%46,%47", "%48",  \
        "%49", "%50", "%51", "%52", SIXTEEN(0), SIXTEEN(16), SIXTEEN(32))                         \
  WGMMA(128, ELEMENTS, NAME, TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) "%60,%61,%62,%63", "%64",   \
        "%65", "%66", "%67", "%68", SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48))
WGMMAS(__half, "f16")
WGMMAS(__nv_bfloat16, "bf16")
#undef WGMMAS
#undef WGMMA
#undef WGMMA_OF_FRAGMENTS
#undef SIXTEEN
#undef FOUR
#undef TEN

// Keep accumulators in their registers: no other instruction may touch them while a product runs.
template <int COUNT>
__device__ __forceinline__ void pin(float (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

__device__ __forceinline__ void wgmma_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Wait until at most PENDING committed groups of products still run.
template <int PENDING = 0>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
