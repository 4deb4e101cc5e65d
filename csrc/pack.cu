// pack: whole pages of 16-bit keys and values -> page bytes. A thread block per page and KV head.
//
// Keys are balanced, rotated, divided by their norm and fitted per channel over a group of tokens;
// values are rotated and fitted per token over a group of channels (oscar_mm/ops/pack.py says the
// same in PyTorch, and the arithmetic follows it operation by operation where order matters).
//
// Compiled with, besides page.cuh's: CODE_BITS, ELEMENT (__half, __nv_bfloat16), ROTATE, FIT (0
// min-max, 1 least squares), LSQ_START and LSQ_ROUNDS (quant/fit.py), NORM_FIT (0 plain, 1 refit,
// 2 unbiased).

#include "hadamard.cuh"
#include "page.cuh"

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;
constexpr int STEPS = (1 << CODE_BITS) - 1;
// Floats and codes of a row: no bank conflicts along rows or columns.
constexpr int STRIDE = HEAD_DIM + 1;
constexpr int CODE_STRIDE = HEAD_DIM + 4;
using P = Page<CODE_BITS>;

struct Params {
  const ELEMENT* keys;  // (pages, KV heads, 128, HEAD_DIM), strides in elements
  const ELEMENT* values;
  uint8_t* pages;       // (pages, page_bytes)
  const float* sigma;   // (KV heads or 1, HEAD_DIM) or null
  const float* norms;   // (pages, 128): shared norms, made before; null with other scaling
  int* bad;             // set to 1 where a scale, zero or norm is no finite float16
  int64_t key_stride[3];
  int64_t value_stride[3];
  int kv_heads, sigma_rows;
};

struct Shared {
  float x[PAGE_TOKENS * STRIDE];
  uint8_t codes[PAGE_TOKENS * CODE_STRIDE];
  float scales[4 * PAGE_TOKENS];  // of keys (groups, channels)
  float zeros[4 * PAGE_TOKENS];
  float norms[PAGE_TOKENS];
};

struct Fit {
  float scale, zero, inverse;

  __device__ void invert() { inverse = scale > 0.0f ? 1.0f / scale : 0.0f; }

  __device__ float code(float x) const {
    return fminf(fmaxf(rintf((x - zero) * inverse), 0.0f), static_cast<float>(STEPS));
  }
};

__device__ float as_half(float x, int& bad) {
  x = __half2float(__float2half_rn(x));
  if (!isfinite(x)) bad = 1;
  return x;
}

// Scale and zero of COUNT values `step` floats apart (quant/fit.py).
template <int COUNT>
__device__ Fit fit_group(const float* x, int step, int& bad) {
  float low = x[0], high = x[0];
  bool finite = true;
#pragma unroll 8
  for (int i = 0; i < COUNT; ++i) {
    const float value = x[i * step];
    finite = finite && isfinite(value);
    low = fminf(low, value), high = fmaxf(high, value);
  }
  // fminf and fmaxf pass over NaN.
  if (!finite) bad = 1;
  Fit fit;
  const float range = high - low;
  if (FIT == 0) {
    fit.scale = range / STEPS, fit.zero = low;
  } else {
    fit.scale = range * (LSQ_START / STEPS);
    fit.zero = (high + low - range * LSQ_START) * 0.5f;
    for (int round = 0; round < LSQ_ROUNDS; ++round) {
      fit.invert();
      // Values are taken from the zero point, so that no digits are lost to a common offset.
      float codes = 0.0f, squares = 0.0f, values = 0.0f, products = 0.0f;
#pragma unroll 8
      for (int i = 0; i < COUNT; ++i) {
        const float value = x[i * step], code = fit.code(value), rest = value - fit.zero;
        codes += code, squares += code * code, values += rest, products += code * rest;
      }
      const float mean_code = codes / COUNT, mean_value = values / COUNT;
      const float variance = squares / COUNT - mean_code * mean_code;
      const float covariance = products / COUNT - mean_code * mean_value;
      if (variance > 0.0f) fit.scale = covariance / fmaxf(variance, 1e-12f);
      fit.zero += mean_value - fit.scale * mean_code;
    }
  }
  fit.scale = as_half(fit.scale, bad), fit.zero = as_half(fit.zero, bad);
  fit.invert();
  return fit;
}

// Balance and rotate the rows of one side into shared memory, a warp a row.
__device__ void load_rows(Shared& shared, const ELEMENT* rows, int64_t stride, const float* sigma,
                          int warp, int lane) {
  for (int token = warp; token < PAGE_TOKENS; token += WARPS) {
    float x[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const int channel = channel_of(i, lane);
      x[i] = static_cast<float>(rows[token * stride + channel]);
      if (sigma != nullptr) x[i] /= sigma[channel];
    }
#if ROTATE
    hadamard(x, lane);
#endif
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) shared.x[token * STRIDE + channel_of(i, lane)] = x[i];
  }
}

// Place of an element in a run of 32: quad, step % 2, half, odd (cache/fragments.py).
__device__ int in_fragments(int index) {
  const int within = index % 32;
  return index - within + within / 2 % 4 * 8 + within / 16 * 4 + within / 8 % 2 * 2 + within % 2;
}

// Place of a token's norm: in a run of 64 tokens group, tile % 4, half (cache/fragments.py).
__device__ int norm_place(int token) {
  const int within = token % 64;
  return token - within + within % 8 * 8 + within / 16 * 2 + within / 8 % 2;
}

// Words of codes in fragment order, from the codes of shared memory.
template <bool VALUES>
__device__ void write_codes(const Shared& shared, uint8_t* target) {
  constexpr int WORDS = P::LANE_WORDS, NEAR = WORDS < 4 ? WORDS : 4;
  constexpr int PARITIES = CODE_BITS == 2 ? 2 : 1;
  for (int word = threadIdx.x; word < P::CODES / 4; word += THREADS) {
    const int tile = word / (32 * WORDS), within = word % (32 * WORDS);
    const int far = within / (32 * NEAR), lane = within / NEAR % 32, near = within % NEAR;
    const int group = lane >> 2, quad = lane & 3, unit = far * NEAR + near;
    uint32_t bits = 0;
#pragma unroll
    for (int k = 0; k < 32 / CODE_BITS; ++k) {
      // From the lowest bit: half of the channels, step % 2, half of the tokens, odd; of values
      // the token has quad and odd, the channel the group.
      const int chalf = k % 2, parity = k / 2 % PARITIES, half = k / (2 * PARITIES) % 2;
      const int odd = k / (4 * PARITIES), step = unit * PARITIES + parity;
      const int token = 16 * tile + 8 * half + (VALUES ? 2 * quad + odd : group);
      const int channel =
          VALUES ? value_channel(step, chalf, group) : 16 * step + 8 * chalf + 2 * quad + odd;
      bits |= static_cast<uint32_t>(shared.codes[token * CODE_STRIDE + channel]) << (CODE_BITS * k);
    }
    reinterpret_cast<uint32_t*>(target)[word] = bits;
  }
}

__device__ void pack_keys(Shared& shared, const Params& params, uint8_t* page, int warp, int lane,
                          int& bad) {
  if (SCALING) {
    for (int token = warp; token < PAGE_TOKENS; token += WARPS) {
      float norm;
      if (SCALING == 2) {
        norm = params.norms[static_cast<int64_t>(blockIdx.x) * PAGE_TOKENS + token];
      } else {
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
          const float x = shared.x[token * STRIDE + channel_of(i, lane)];
          squares += x * x;
        }
#pragma unroll
        for (int step = 1; step < 32; step *= 2) squares += __shfl_xor_sync(~0u, squares, step);
        norm = sqrtf(squares / HEAD_DIM);
      }
      norm = as_half(norm, bad);
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) {
        float& x = shared.x[token * STRIDE + channel_of(i, lane)];
        x = norm > 0.0f ? x / norm : 0.0f;
      }
      if (lane == 0) shared.norms[token] = norm;
    }
    __syncthreads();
  }
  __half* scales = reinterpret_cast<__half*>(page + P::key_scales);
  __half* zeros = reinterpret_cast<__half*>(page + P::key_zeros);
  for (int task = threadIdx.x; task < KEY_GROUPS * HEAD_DIM; task += THREADS) {
    const int group = task / HEAD_DIM, channel = task % HEAD_DIM, first = group * KEY_GROUP;
    const Fit fit = fit_group<KEY_GROUP>(shared.x + first * STRIDE + channel, STRIDE, bad);
#pragma unroll 8
    for (int i = 0; i < KEY_GROUP; ++i)
      shared.codes[(first + i) * CODE_STRIDE + channel] =
          static_cast<uint8_t>(fit.code(shared.x[(first + i) * STRIDE + channel]));
    const int place = group * HEAD_DIM + in_fragments(channel);
    scales[place] = __float2half_rn(fit.scale), zeros[place] = __float2half_rn(fit.zero);
    shared.scales[task] = fit.scale, shared.zeros[task] = fit.zero;
  }
  __syncthreads();
  write_codes<false>(shared, page + P::key_codes);
  if (SCALING != 1) return;
  // The norm to store, now that the codes are known (quant/scaling.py).
  for (int token = threadIdx.x; token < PAGE_TOKENS; token += THREADS) {
    const float norm = shared.norms[token];
    float fitted = norm;
    if (NORM_FIT) {
      float overlap = 0.0f, squares = 0.0f;
      const int row = token / KEY_GROUP * HEAD_DIM;
#pragma unroll 8
      for (int channel = 0; channel < HEAD_DIM; ++channel) {
        const float x = shared.x[token * STRIDE + channel];
        const uint8_t code = shared.codes[token * CODE_STRIDE + channel];
        const float coded = code * shared.scales[row + channel] + shared.zeros[row + channel];
        overlap += x * coded;
        squares += NORM_FIT == 2 ? x * x : coded * coded;
      }
      fitted = NORM_FIT == 2 ? norm * squares / overlap : norm * overlap / squares;
      if (!(overlap > 0.0f) || !isfinite(fitted)) fitted = norm;
      fitted = fminf(fmaxf(fitted, norm / 2), norm * 2);
    }
    reinterpret_cast<__half*>(page + P::norms)[norm_place(token)] =
        __float2half_rn(as_half(fitted, bad));
  }
}

__device__ void pack_values(Shared& shared, uint8_t* page, int& bad) {
  __half* scales = reinterpret_cast<__half*>(page + P::value_scales);
  __half* zeros = reinterpret_cast<__half*>(page + P::value_zeros);
  for (int task = threadIdx.x; task < VALUE_GROUPS * PAGE_TOKENS; task += THREADS) {
    const int group = task / PAGE_TOKENS, token = task % PAGE_TOKENS;
    const int first = token * STRIDE + group * VALUE_GROUP;
    const Fit fit = fit_group<VALUE_GROUP>(shared.x + first, 1, bad);
#pragma unroll 8
    for (int i = 0; i < VALUE_GROUP; ++i)
      shared.codes[token * CODE_STRIDE + group * VALUE_GROUP + i] =
          static_cast<uint8_t>(fit.code(shared.x[first + i]));
    const int place = group * PAGE_TOKENS + in_fragments(token);
    scales[place] = __float2half_rn(fit.scale), zeros[place] = __float2half_rn(fit.zero);
  }
  __syncthreads();
  write_codes<true>(shared, page + P::value_codes);
}

extern "C" __global__ void __launch_bounds__(THREADS) pack(const __grid_constant__ Params params) {
  extern __shared__ __align__(16) uint8_t raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y;
  uint8_t* whole = params.pages + static_cast<int64_t>(blockIdx.x) * P::page_bytes(params.kv_heads);
  uint8_t* page = whole + static_cast<int64_t>(head) * P::head_bytes;
  int bad = 0;
  const float* sigma = params.sigma;
  if (sigma != nullptr && params.sigma_rows > 1) sigma += head * HEAD_DIM;
  load_rows(shared, params.keys + blockIdx.x * params.key_stride[0] + head * params.key_stride[1],
            params.key_stride[2], sigma, warp, lane);
  __syncthreads();
  pack_keys(shared, params, page, warp, lane, bad);
  __syncthreads();
  load_rows(shared,
            params.values + blockIdx.x * params.value_stride[0] + head * params.value_stride[1],
            params.value_stride[2], nullptr, warp, lane);
  __syncthreads();
  pack_values(shared, page, bad);
  if (SCALING == 2 && head == 0)
    for (int token = threadIdx.x; token < PAGE_TOKENS; token += THREADS)
      reinterpret_cast<__half*>(whole + params.kv_heads * P::head_bytes)[norm_place(token)] =
          __float2half_rn(shared.norms[token]);
  if (bad) *params.bad = 1;
}
