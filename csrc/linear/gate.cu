// gate: silu(gate) * up of products that are already rounded, written over gate. Each thread
// computes eight elements.
//
// Compiled with: ELEMENT (__half, __nv_bfloat16).

#include "common/overlap.cuh"
#include "common/rounding.cuh"

constexpr int THREADS = 256;

struct Params {
  ELEMENT* gates;      // (rows, width)
  const ELEMENT* ups;  // (rows, width)
  int64_t stride;      // elements between rows of gates, and of ups; a multiple of 8
  int64_t rows;
  int width;  // a multiple of 8
};

extern "C" __global__ void __launch_bounds__(THREADS)
    gate(const __grid_constant__ Params params) {
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x) * 8;
  let_next_begin();
  wait_for_previous();
  const int64_t row = at / params.width;
  if (row >= params.rows) return;
  const int64_t from = row * params.stride + at % params.width;
  const uint4 gates = load16(params.gates + from), ups = load16(params.ups + from);
  const uint32_t gate_words[4] = {gates.x, gates.y, gates.z, gates.w};
  const uint32_t up_words[4] = {ups.x, ups.y, ups.z, ups.w};
  uint4 eight;
  ELEMENT* output = reinterpret_cast<ELEMENT*>(&eight);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 gate = unpacked(gate_words[i], ELEMENT()), up = unpacked(up_words[i], ELEMENT());
    output[2 * i] = ELEMENT(gated(gate.x, up.x));
    output[2 * i + 1] = ELEMENT(gated(gate.y, up.y));
  }
  *reinterpret_cast<uint4*>(params.gates + from) = eight;
}
