// Programmatic dependent launch (sm_90 and newer; elsewhere these do nothing).
//
// A kernel that is launched as dependent may begin before the one in front of it has ended. So every
// kernel that lets the next one begin has to wait itself, before it reads or writes what a kernel in
// front of it may still work on: then all of them have ended where one has waited.
#pragma once

__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
