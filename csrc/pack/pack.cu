// pack: 16-bit keys and values -> pages with key scales per channel. One thread block per page and
// KV head.
//
// Keys are balanced, rotated, divided by their norm and fitted per channel over a group of tokens;
// values are rotated and fitted per token over a group of channels (oscar_mm/ops/pack.py does the
// same in PyTorch). Both stay in registers from the rotation to the codes: the rotation is a matrix
// product on the tensor cores. It is exact because its other factor is +-1 (divided by a sigma
// whose reciprocal has 8 bits, quant/basis.py), and its accumulators are the lines of fit.cuh. A
// warp has 16 channels of all tokens of the keys, and all channels of 16 tokens of the values.
//
// Compiled with, in addition to page.cuh's macros: CODE_BITS (2, 4), ELEMENT (__half,
// __nv_bfloat16), ROTATE, FIT (0 min-max, 1 least squares), KEY_START, VALUE_START and LSQ_ROUNDS
// (quant/fit.py), NORM_FIT (0 plain, 1 refit, 2 unbiased), VALUE_SCALE (0 plain, 1 unbiased).

#include "common/rows.cuh"
#include "pack/fit.cuh"
#include "pack/rotate.cuh"

constexpr int THREADS = HEAD_DIM * 2;
static_assert(THREADS >= PAGE_TOKENS, "a thread for every token");
constexpr int WARPS = THREADS / 32;  // one per 16 channels
using P = Page<CODE_BITS, CODE_BITS>;
constexpr int LANE_WORDS = P::Keys::WORDS;

struct Params {
  const ELEMENT* keys;    // (batch, KV heads, tokens, HEAD_DIM), strides in elements
  const ELEMENT* values;
  const ELEMENT* recent;  // (slots, 2, KV heads, HEAD_DIM)
  const int* source;      // (jobs, 128): token of keys and values, or ~slot of recent
  const int* rows;        // (jobs): row of the batch
  const int* slots;       // (jobs): slot of the page; negative: nothing to do
  uint8_t* pages;         // (slots, page_bytes)
  const float* sigma;     // (batch or 1, KV heads or 1, HEAD_DIM) or null
  const float* norms;     // (jobs, 128): shared norms (norms.cu); null with other scaling
  int* not_finite;        // set to 1 if a scale, zero or norm is not a finite float16
  int64_t key_stride[3];
  int64_t value_stride[3];
  int jobs, kv_heads;
  int sigma_row_stride, sigma_head_stride;  // 0 if all rows, or heads, share one
};

struct Shared {
  alignas(16) uint8_t rows[3][SIDE_BYTES];  // alternately keys and values
  int sources[2][PAGE_TOKENS];
  uint32_t sizes[HEAD_DIM / 2];  // factors that balance keys: pairs of 1 / sigma
  float norms[PAGE_TOKENS];
  float factors[PAGE_TOKENS];  // factors of keys
};
constexpr int PARITIES = CODE_BITS == 2 ? 2 : 1;

// Reuse of the memory of a page's keys, once they are in registers.
struct KeyShared {
  alignas(16) uint32_t codes[PARITIES][P::Keys::ALL / 4];
  float partial[WARPS][PAGE_TOKENS];  // sums over the channels of a warp
};
static_assert(sizeof(KeyShared) <= SIDE_BYTES);

// Initial value of a word, which cancels the bits of ROUND that are added with its codes: with all
// codes, or with those of one of two steps.
__device__ constexpr uint32_t first_word(bool one_step) {
  uint32_t sum = 0;
  for (int k = 0; k < 32 / CODE_BITS; ++k)
    if (!one_step || k / 2 % 2 == 0) sum += 0x4b400000u << (CODE_BITS * k);
  return 0u - sum;
}

// Index of a lane's word i among the words of a tile: up to four are consecutive (codes.cuh).
__device__ constexpr int word_index(int i, int lane) {
  constexpr int RUN_WORDS = LANE_WORDS < 4 ? LANE_WORDS : 4;
  return i / RUN_WORDS * 32 * RUN_WORDS + lane * RUN_WORDS + i % RUN_WORDS;
}

// Index of an element in a run of 32, in the order of fragments: quad, step % 2, half, odd
// (pages/fragments.py).
__device__ __forceinline__ int fragment_index(int index) {
  const int within = index % 32;
  return index - within + within / 2 % 4 * 8 + within / 16 * 4 + within / 8 % 2 * 2 + within % 2;
}

// Index of a token's norm: in a run of 64 tokens group, tile % 4, half (pages/fragments.py).
__device__ __forceinline__ int norm_index(int token) {
  const int within = token % 64;
  return token - within + within % 8 * 8 + within / 16 * 2 + within / 8 % 2;
}

// Write a group's scale and zero, by one of the two lanes that have them.
__device__ __forceinline__ void write_fit(__half* scale, __half* zero, const Fit& fit, int lane) {
  if (lane % 8 < 4) *scale = __float2half_rn(fit.scale), *zero = __float2half_rn(fit.zero);
}

// Write each token's sum over a warp's channels to shared memory; sums[tile][half] is the sum over
// this lane's four channels. Each of the four lanes of a token ends up with a quarter of the sums.
__device__ __forceinline__ void write_sums(KeyShared& shared, const float (&sums)[TILES][2],
                                           int warp, int lane) {
  float half[TILES], quarter[TILES / 2];
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    const float kept = lane & 1 ? sums[i][1] : sums[i][0];
    const float given = lane & 1 ? sums[i][0] : sums[i][1];
    half[i] = kept + __shfl_xor_sync(~0u, given, 1);
  }
#pragma unroll
  for (int i = 0; i < TILES / 2; ++i) {
    const float kept = lane & 2 ? half[2 * i + 1] : half[2 * i];
    const float given = lane & 2 ? half[2 * i] : half[2 * i + 1];
    quarter[i] = kept + __shfl_xor_sync(~0u, given, 2);
  }
  float* target = shared.partial[warp] + (lane & 2) * 8 + (lane & 1) * 8 + (lane >> 2);
#pragma unroll
  for (int i = 0; i < TILES / 2; ++i) target[32 * i] = quarter[i];
}

__device__ __forceinline__ float sum_of_token(const KeyShared& shared, int token) {
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) sum += shared.partial[warp][token];
  return sum;
}

// Divide keys by their norms, in stored units; `square` becomes the sum of squares of the thread's
// token, if it has one.
__device__ __forceinline__ void scale_keys(float (&x)[TILES][2][4], Shared& shared, KeyShared& own,
                                           const Params& params, int job, int warp, int lane,
                                           float& square, float& not_finite) {
  if (SCALING == 1) {
    float sums[TILES][2] = {};
#pragma unroll
    for (int i = 0; i < 8 * TILES; ++i) {
      const float value = x[i / 8][i / 4 % 2][i % 4];
      sums[i / 8][i / 2 % 2] = fmaf(value, value, sums[i / 8][i / 2 % 2]);
    }
    write_sums(own, sums, warp, lane);
    __syncthreads();
  }
  if (threadIdx.x < PAGE_TOKENS) {
    float norm;
    if (SCALING == 1) {
      square = sum_of_token(own, threadIdx.x) * (UNIT * UNIT);
      norm = sqrtf(square / HEAD_DIM);
    } else {
      norm = params.norms[static_cast<int64_t>(job) * PAGE_TOKENS + threadIdx.x];
    }
    norm = as_half(norm, not_finite);
    square *= norm > 0.0f ? 1.0f / (norm * norm) : 0.0f;
    shared.norms[threadIdx.x] = norm;
    shared.factors[threadIdx.x] = norm > 0.0f ? UNIT / norm : 0.0f;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2 * TILES; ++i) {
    const float factor = shared.factors[8 * i + (lane >> 2)];
#pragma unroll
    for (int j = 0; j < 4; ++j) x[i / 2][j / 2][i % 2 * 2 + j % 2] *= factor;
  }
}

// The norm to store for a token: `overlap` is the product of its key with the restored key,
// `square` that of the key, or of the restored key, with itself (quant/fit.py).
__device__ __forceinline__ float fitted_norm(float norm, float overlap, float square) {
  const float fitted = NORM_FIT == 2 ? norm * square / overlap : norm * overlap / square;
  if (!(overlap > 0.0f) || !isfinite(fitted)) return norm;
  return fminf(fmaxf(fitted, norm / 2), norm * 2);
}

__device__ __forceinline__ void pack_keys(Shared& shared, const Params& params, uint8_t* rows,
                                          uint8_t* page, int job, int warp, int lane,
                                          float& not_finite) {
  constexpr int GROUP_TILES = KEY_GROUP / TILE;
  constexpr bool FITS_NORM = SCALING == 1 && NORM_FIT != 0;
  constexpr bool UNBIASED_KEYS = FIT == 1 && NORM_FIT == 2;
  const int quad = lane & 3;
  float x[TILES][2][4], square = 0.0f;
  rotate_keys(x, rows, shared.sizes, warp, lane);
  __syncthreads();
  KeyShared& own = *reinterpret_cast<KeyShared*>(rows);
  constexpr float unit = SCALING ? 1.0f : UNIT;
  if (SCALING) scale_keys(x, shared, own, params, job, warp, lane, square, not_finite);
  const int line = line_of_lane(lane);
  const int place = fragment_index(16 * warp + line / 2 * 8 + 2 * quad + line % 2);
  __half* scales = reinterpret_cast<__half*>(page + P::key_scales) + place;
  __half* zeros = reinterpret_cast<__half*>(page + P::key_zeros) + place;
  // The steps of one word belong to two warps, so they stay separate.
  const int step = warp % PARITIES, at = warp / PARITIES;
  uint32_t* codes = own.codes[step] + word_index(at, lane);
  float overlaps[TILES][2] = {}, squares[TILES][2] = {};
#pragma unroll
  for (int part = 0; part < KEY_GROUPS; ++part) {
    const int first = part * GROUP_TILES;
    Fit fit = fit_group<GROUP_TILES>(x, first, KEY_START, lane);
    fit.round(unit, not_finite);
    const Assign assign(fit, unit, lane);
    uint32_t words[GROUP_TILES];
#pragma unroll
    for (int i = 0; i < GROUP_TILES; ++i) words[i] = first_word(PARITIES == 2);
    Agreement<GROUP_TILES> agreement;
#pragma unroll
    for (int i = 0; i < 2 * GROUP_TILES; ++i)
#pragma unroll
      for (int line = 0; line < LINES; ++line) {
        const float position = assign.position(value_of(x, first, line, i), line);
        const float raised = Assign::raised(position);
        const int k = line / 2 + 2 * PARITIES * (i % 2 + 2 * (line % 2));
        words[i / 2] += __float_as_uint(raised) << (CODE_BITS * k);
        if (UNBIASED_KEYS) agreement.add(position, raised, line);
      }
#pragma unroll
    for (int i = 0; i < GROUP_TILES; ++i)
      codes[(first + i) * 32 * LANE_WORDS] = words[i] << (2 * CODE_BITS * step);
    const Fit given = fit;
    if (UNBIASED_KEYS) fit = agreement.unbiased(fit, unit, lane);
    write_fit(scales + part * HEAD_DIM, zeros + part * HEAD_DIM, fit, lane);
    if (FITS_NORM) {
      // Codes are computed again, because there are no registers to keep them in.
      const Assign again(given, unit, lane);
      float scale[LINES], zero[LINES];
      broadcast(scale, fit.scale, lane), broadcast(zero, fit.zero, lane);
#pragma unroll
      for (int i = 0; i < 2 * GROUP_TILES; ++i)
#pragma unroll
        for (int line = 0; line < LINES; ++line) {
          const int tile = first + i / 2, half = i % 2;
          const float value = value_of(x, first, line, i);
          const float raised = Assign::raised(again.position(value, line));
          const float coded = fmaf(raised - ROUND, scale[line], zero[line]);
          overlaps[tile][half] = fmaf(value, coded, overlaps[tile][half]);
          if (NORM_FIT == 1) squares[tile][half] = fmaf(coded, coded, squares[tile][half]);
        }
    }
  }
  if (FITS_NORM) write_sums(own, overlaps, warp, lane);
  __syncthreads();
  const uint4* left = reinterpret_cast<const uint4*>(own.codes);
  uint4* target = reinterpret_cast<uint4*>(page + P::key_codes);
  for (int i = threadIdx.x; i < P::Keys::ALL / 16; i += THREADS) {
    uint4 four = left[i];
    if (PARITIES == 2) {
      const uint4 other = left[i + P::Keys::ALL / 16];
      four.x |= other.x, four.y |= other.y, four.z |= other.z, four.w |= other.w;
    }
    target[i] = four;
  }
  if (SCALING != 1) return;
  float overlap = 0.0f;
  if (FITS_NORM && threadIdx.x < PAGE_TOKENS) overlap = sum_of_token(own, threadIdx.x);
  if (NORM_FIT == 1) {
    __syncthreads();
    write_sums(own, squares, warp, lane);
    __syncthreads();
    if (threadIdx.x < PAGE_TOKENS) square = sum_of_token(own, threadIdx.x);
  }
  if (threadIdx.x < PAGE_TOKENS) {
    float norm = shared.norms[threadIdx.x];
    if (FITS_NORM) norm = fitted_norm(norm, overlap, square);
    reinterpret_cast<__half*>(page + P::norms)[norm_index(threadIdx.x)] =
        __float2half_rn(as_half(norm, not_finite));
  }
}

__device__ __forceinline__ void pack_values(const uint8_t* rows, uint8_t* page, int tile, int lane,
                                            float& not_finite) {
  constexpr int GROUP_TILES = VALUE_GROUP / TILE;
  float x[CHANNEL_TILES][2][4];
  rotate_values(x, rows, tile, lane);
  const int line = line_of_lane(lane);
  const int place = fragment_index(16 * tile + line / 2 * 8 + 2 * (lane & 3) + line % 2);
  __half* scales = reinterpret_cast<__half*>(page + P::value_scales) + place;
  __half* zeros = reinterpret_cast<__half*>(page + P::value_zeros) + place;
  uint32_t words[LANE_WORDS];
#pragma unroll
  for (int i = 0; i < LANE_WORDS; ++i) words[i] = first_word(false);
#pragma unroll
  for (int part = 0; part < VALUE_GROUPS; ++part) {
    const int first = part * GROUP_TILES;
    Fit fit = fit_group<GROUP_TILES>(x, first, VALUE_START, lane);
    fit.round(UNIT, not_finite);
    __half *scale = scales + part * PAGE_TOKENS, *zero = zeros + part * PAGE_TOKENS;
    if (VALUE_SCALE == 0) write_fit(scale, zero, fit, lane);
    const Assign assign(fit, UNIT, lane);
    Agreement<GROUP_TILES> agreement;
#pragma unroll
    for (int i = 0; i < 2 * GROUP_TILES; ++i)
#pragma unroll
      for (int line = 0; line < LINES; ++line) {
        const int step = first + i / 2, half = line / 2, odd = line % 2;
        const int k = i % 2 + 2 * (step % PARITIES + PARITIES * (half + 2 * odd));
        const float position = assign.position(value_of(x, first, line, i), line);
        const float raised = Assign::raised(position);
        words[step / PARITIES] += __float_as_uint(raised) << (CODE_BITS * k);
        if (VALUE_SCALE == 1) agreement.add(position, raised, line);
      }
    if (VALUE_SCALE == 1) write_fit(scale, zero, agreement.unbiased(fit, UNIT, lane), lane);
  }
  uint32_t* codes =
      reinterpret_cast<uint32_t*>(page + P::value_codes + tile * P::Values::TILE_BYTES);
#pragma unroll
  for (int i = 0; i < LANE_WORDS; ++i)
    codes[word_index(i, lane)] = words[i];
}

// An item of work is one head of one job. A thread block takes every gridDim-th item.
struct Item {
  int job, head, slot;

  // Starting with item `at`; past the end, no job.
  __device__ __forceinline__ static Item from(const Params& params, int& at) {
    for (; at < params.jobs * params.kv_heads; at += gridDim.x) {
      const int job = at / params.kv_heads, slot = params.slots[job];
      if (slot >= 0) return {job, at % params.kv_heads, slot};
    }
    return {-1, 0, 0};
  }

  // Request a side's rows, if there is a job. The request is closed in any case, so that requests
  // can be counted.
  __device__ __forceinline__ void request(const Params& params, int side, uint8_t* target,
                                          const int* which) const {
    if (job >= 0)
      Source::of(side ? params.values : params.keys, side ? params.value_stride : params.key_stride,
                 params.recent, side, params.rows[job], head, params.kv_heads)
          .request<THREADS>(target, which);
    close_request();
  }

  // Write 1 / sigma of this thread's pair of channels, if there is a job.
  __device__ __forceinline__ void write_sizes(const Params& params, uint32_t* sizes) const {
    if (job < 0 || threadIdx.x >= HEAD_DIM / 2) return;
    float even = 1.0f, odd = 1.0f;
    if (params.sigma != nullptr) {
      const float* sigma = params.sigma + params.rows[job] * params.sigma_row_stride +
                           head * params.sigma_head_stride + 2 * threadIdx.x;
      even /= sigma[0], odd /= sigma[1];
    }
    sizes[threadIdx.x] = packed(even, odd, ELEMENT());
  }

  // Load this thread's part of the list of sources.
  __device__ __forceinline__ int which(const Params& params) const {
    if (job < 0 || threadIdx.x >= PAGE_TOKENS) return 0;
    return params.source[job * PAGE_TOKENS + threadIdx.x];
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS)
    pack(const __grid_constant__ Params params) {
  extern __shared__ __align__(16) uint8_t raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  int at = blockIdx.x;
  Item item = Item::from(params, at);
  if (item.job < 0) return;
  at += gridDim.x;
  Item next = Item::from(params, at);
  if (threadIdx.x < PAGE_TOKENS) {
    shared.sources[0][threadIdx.x] = item.which(params);
    shared.sources[1][threadIdx.x] = next.which(params);
  }
  __syncthreads();
  item.request(params, 0, shared.rows[0], shared.sources[0]);
  item.request(params, 1, shared.rows[1], shared.sources[0]);
  item.write_sizes(params, shared.sizes);
  float not_finite = 0.0f;
  // Two sides are loading while one is packed.
  for (int turn = 0, first = 0; item.job >= 0; turn ^= 1) {
    const int second = first < 2 ? first + 1 : 0, third = second < 2 ? second + 1 : 0;
    uint8_t* page = params.pages +
                    static_cast<int64_t>(item.slot) * P::page_bytes(params.kv_heads) +
                    item.head * P::head_bytes;
    next.request(params, 0, shared.rows[third], shared.sources[turn ^ 1]);
    wait_request<2>();
    __syncthreads();
    pack_keys(shared, params, shared.rows[first], page, item.job, warp, lane, not_finite);
    __syncthreads();
    next.request(params, 1, shared.rows[first], shared.sources[turn ^ 1]);
    next.write_sizes(params, shared.sizes);
    at += gridDim.x;
    const Item after = Item::from(params, at);
    const int which = after.which(params);
    wait_request<2>();
    __syncthreads();
    for (int tile = warp; tile < TILES; tile += WARPS)
      pack_values(shared.rows[second], page, tile, lane, not_finite);
    if (threadIdx.x < PAGE_TOKENS) {
      if (SCALING == 2 && item.head == 0)
        reinterpret_cast<__half*>(page + params.kv_heads * P::head_bytes)[norm_index(
            threadIdx.x)] = __float2half_rn(shared.norms[threadIdx.x]);
      shared.sources[turn][threadIdx.x] = which;
    }
    __syncthreads();
    item = next, next = after, first = third;
  }
  if (isnan(not_finite)) *params.not_finite = 1;
}
