// norms: root mean square of the balanced keys over all KV heads, for every token to be packed
// (token_scaling "shared"); a thread block of pack.cu has only one head. One warp per token.
//
// Compiled with, in addition to page.cuh's macros: ELEMENT (__half, __nv_bfloat16).

#include "common/rows.cuh"

constexpr int THREADS = 256;
constexpr int LANES = HEAD_DIM / 8;  // lanes per head: 16 bytes each
constexpr int HEADS_AT_ONCE = 32 / LANES;

// Fields have the same meaning as in pack.cu.
struct Params {
  const ELEMENT* keys;
  const ELEMENT* recent;
  const int* source;
  const int* rows;
  const int* slots;
  const float* sigma;
  float* norms;  // (jobs, 128)
  int64_t key_stride[3];
  int kv_heads, sigma_row_stride, sigma_head_stride;
};

extern "C" __global__ void __launch_bounds__(THREADS) norms(const __grid_constant__ Params params) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, job = blockIdx.x;
  if (params.slots[job] < 0) return;
  const int first = lane / LANES, channel = lane % LANES * 8, row = params.rows[job];
  for (int token = warp; token < PAGE_TOKENS; token += THREADS / 32) {
    const int which = params.source[job * PAGE_TOKENS + token];
    float sum = 0.0f;
    for (int head = first; head < params.kv_heads; head += HEADS_AT_ONCE) {
      const Source source = Source::of(params.keys, params.key_stride, params.recent, 0, row, head,
                                       params.kv_heads);
      const uint4 eight = load16(source.row(which) + channel * 2);
      const ELEMENT* x = reinterpret_cast<const ELEMENT*>(&eight);
      const float* sigma = params.sigma;
      if (sigma != nullptr)
        sigma += row * params.sigma_row_stride + head * params.sigma_head_stride + channel;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float value = static_cast<float>(x[i]);
        if (sigma != nullptr) value = __fdividef(value, sigma[i]);
        sum = fmaf(value, value, sum);
      }
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0)
      params.norms[static_cast<int64_t>(job) * PAGE_TOKENS + token] =
          sqrtf(sum / (params.kv_heads * HEAD_DIM));
  }
}
