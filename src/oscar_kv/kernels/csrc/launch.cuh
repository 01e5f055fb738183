// What depends on the architecture around a launch, and barriers between CTAs.
#pragma once

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define PTX_90 true  // bulk copies, mbarriers, dependent launches
#else
#define PTX_90 false
#endif

// Dependent launches: let the next kernel of the stream start, and wait for the end of the one before.
__device__ __forceinline__ void allow_launch() {
#if PTX_90
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void wait_for_launch() {
#if PTX_90
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
