// Programmatic dependent launch (sm_90 and newer; elsewhere these do nothing).
//
// A dependent kernel may begin before the preceding kernel has ended. So every kernel that releases
// the next one must itself wait before it reads or writes data that a preceding kernel may still
// use: after this wait, all preceding kernels have ended.
//
// decode waits before it releases the next kernel. So when that kernel begins, all kernels before
// decode have ended, and it need not wait at once if it shares no data with decode. It waits at its
// end, for the kernels that wait for it.
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
