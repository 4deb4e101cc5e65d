// Names of <stdint.h> and <math.h>: NVRTC compiles without a C library.
#pragma once

using uint8_t = unsigned char;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int64_t = long long;

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

__device__ __forceinline__ uint4 load16(const void* pointer) {
  return *reinterpret_cast<const uint4*>(pointer);
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
