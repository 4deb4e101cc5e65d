// Programmatic dependent launch (sm_90 and newer; elsewhere these do nothing).
//
// A kernel that is launched as dependent may begin before the one in front of it has ended. So every
// kernel that lets the next one begin has to wait itself, before it reads or writes what a kernel in
// front of it may still work on: then all of them have ended where one has waited.
//
// decode waits before it lets the next one begin. So all that is in front of decode has ended where
// the next one begins, which need not wait at once if it has nothing to do with decode; it waits
// at its end, for those that wait for it.
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
