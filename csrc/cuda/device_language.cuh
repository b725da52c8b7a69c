// The language that kernels are written in: CUDA's with nvcc, its stand-in on the host otherwise.
// Also the two warp instructions that C++ has no words for.
#pragma once
#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define TORCHWELD_SHARED_MEMORY(name) extern __shared__ __align__(16) unsigned char name[]
#define TORCHWELD_UNROLL _Pragma("unroll")
#else
#include "cuda_on_host.h"
#define TORCHWELD_SHARED_MEMORY(name) unsigned char* const name = cuda_on_host::shared_memory
#define TORCHWELD_UNROLL
#endif

namespace {

// 16-bit elements are bit patterns in memory.
struct bf16_t {
  uint16_t bits;
};
struct fp16_t {
  uint16_t bits;
};

constexpr int kLanesOfWarp = 32;

// The matrices of a product on tensor cores: parts of A [16, 16] and B [16, 8] in a lane.
struct FragmentA {
  uint32_t of[4];
};
struct FragmentB {
  uint32_t of[2];
};

#ifdef __CUDACC__

__device__ __forceinline__ void multiply_add(float (&sums)[4], const FragmentA& a,
                                             const FragmentB& b, fp16_t) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a.of[0]), "r"(a.of[1]), "r"(a.of[2]), "r"(a.of[3]), "r"(b.of[0]), "r"(b.of[1]));
}
__device__ __forceinline__ void multiply_add(float (&sums)[4], const FragmentA& a,
                                             const FragmentB& b, bf16_t) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a.of[0]), "r"(a.of[1]), "r"(a.of[2]), "r"(a.of[3]), "r"(b.of[0]), "r"(b.of[1]));
}

// Matrices of 8 x 8 values of 16 bits; each lane gives the address of a row, 16 bytes.
__device__ __forceinline__ uint32_t shared_address(const void* row) {
  return uint32_t(__cvta_generic_to_shared(row));
}
template <bool turned>
__device__ __forceinline__ FragmentA load_four(const void* row) {
  FragmentA a;
  if constexpr (turned)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a.of[0]), "=r"(a.of[1]), "=r"(a.of[2]), "=r"(a.of[3])
                 : "r"(shared_address(row))
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a.of[0]), "=r"(a.of[1]), "=r"(a.of[2]), "=r"(a.of[3])
                 : "r"(shared_address(row))
                 : "memory");
  return a;
}
template <bool turned>
__device__ __forceinline__ FragmentB load_two(const void* row) {
  FragmentB b;
  if constexpr (turned)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(b.of[0]), "=r"(b.of[1])
                 : "r"(shared_address(row))
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(b.of[0]), "=r"(b.of[1])
                 : "r"(shared_address(row))
                 : "memory");
  return b;
}

#else

template <float (*value)(uint16_t)>
void multiply_add_on_host(float (&sums)[4], const FragmentA& a, const FragmentB& b) {
  cuda_on_host::Slot& own = cuda_on_host::slots[cuda_on_host::me->number];
  std::memcpy(own.in, a.of, sizeof a.of);
  std::memcpy(own.in + 4, b.of, sizeof b.of);
  std::memcpy(own.sums, sums, sizeof sums);
  cuda_on_host::meet(cuda_on_host::multiply_warp<value>);
  std::memcpy(sums, own.sums, sizeof sums);
}
inline void multiply_add(float (&sums)[4], const FragmentA& a, const FragmentB& b, fp16_t) {
  multiply_add_on_host<cuda_on_host::half_value>(sums, a, b);
}
inline void multiply_add(float (&sums)[4], const FragmentA& a, const FragmentB& b, bf16_t) {
  multiply_add_on_host<cuda_on_host::bf16_value>(sums, a, b);
}

template <class Fragment, bool turned>
Fragment load_on_host(const void* row) {
  constexpr int count = int(sizeof(Fragment) / 4);
  cuda_on_host::Slot& own = cuda_on_host::slots[cuda_on_host::me->number];
  own.far = row;
  cuda_on_host::meet(cuda_on_host::load_warp<count, turned>);
  Fragment found;
  std::memcpy(found.of, own.out, sizeof found.of);
  return found;
}
template <bool turned>
FragmentA load_four(const void* row) {
  return load_on_host<FragmentA, turned>(row);
}
template <bool turned>
FragmentB load_two(const void* row) {
  return load_on_host<FragmentB, turned>(row);
}

#endif

}  // namespace
