// What depends on the architecture around a launch, and clusters of CTAs.
#pragma once

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define PTX_90 true  // bulk copies, mbarriers, dependent launches, clusters
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

// Place of this CTA in its cluster; 0 where there are none.
__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank = 0;
#if PTX_90
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}

// All threads of a cluster arrive, and wait for each other to have arrived: then they see what the others wrote before.
__device__ __forceinline__ void cluster_arrive() {
#if PTX_90
    asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if PTX_90
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// The same place in the shared memory of another CTA of the cluster.
template <typename T>
__device__ __forceinline__ T* of_rank(T* shared, unsigned rank) {
#if PTX_90
    unsigned long long address;
    asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(shared), "r"(rank));
    return (T*)address;
#else
    return shared;
#endif
}
