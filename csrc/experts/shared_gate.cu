// shared_gate: what follows the first products of a mixture with an expert that all rows use
//
//   between[row] = silu(g) * u * sigmoid(s)     with (g, u) = inner[row], (router's logits, s) = outer[row]
//
// and the router's logits by themselves. One thread block per row. The sigmoid factors out of the
// expert's second product, which then adds the residual stream.
//
// Compiled with: ELEMENT (__half, __nv_bfloat16).

#include "common/overlap.cuh"
#include "common/rounding.cuh"

constexpr int THREADS = 256;

struct Params {
  const ELEMENT* inner;  // (rows, 2 * width)
  const ELEMENT* outer;  // (rows, experts + 1)
  ELEMENT* between;      // (rows, width)
  ELEMENT* logits;       // (rows, experts)
  int64_t inner_stride;  // elements between rows
  int64_t outer_stride;
  int width;
  int experts;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    shared_gate(const __grid_constant__ Params params) {
  const int64_t row = blockIdx.x;
  const ELEMENT* inner = params.inner + row * params.inner_stride;
  const ELEMENT* outer = params.outer + row * params.outer_stride;
  let_next_begin();
  wait_for_previous();
  const float logit = static_cast<float>(outer[params.experts]);
  const float share = rounded(1.0f / (1.0f + __expf(-logit)));
  for (int i = threadIdx.x; i < params.width; i += THREADS) {
    const float gate = static_cast<float>(inner[i]);
    const float up = static_cast<float>(inner[params.width + i]);
    params.between[row * params.width + i] = ELEMENT(rounded(gated(gate, up)) * share);
  }
  for (int i = threadIdx.x; i < params.experts; i += THREADS)
    params.logits[row * params.experts + i] = outer[i];
}
