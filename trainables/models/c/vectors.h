/* SIMD vectors of floats of this processor's width, and their basic operations. */

#ifndef VECTORS_H
#define VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#endif

/* WIDTH: floats per vector. A matrix product holds a block of MOST_ROWS rows x MOST_VECTORS vectors in registers,
together with its factors. If every lane has its own matrices, a block has MOST_SIDE x MOST_SIDE vectors. */
#ifdef __AVX512F__
#pragma GCC target("prefer-vector-width=512")
#define WIDTH 16
#define MOST_ROWS 8
#define MOST_VECTORS 3
#define MOST_SIDE 4
#elif defined(__AVX__)
#define WIDTH 8
#define MOST_ROWS 4
#define MOST_VECTORS 3
#define MOST_SIDE 3
#else
#define WIDTH 4
#define MOST_ROWS 5
#define MOST_VECTORS 4
#define MOST_SIDE 4
#endif
_Static_assert(LANES % WIDTH == 0 && TILE % LANES == 0 && LANES <= 32 && 32 % LANES == 0, "groups of LANES fill tiles");

#define VECTORS (LANES / WIDTH)
#define UNROLLED _Pragma("GCC unroll 16")
#define EACH UNROLLED for (int v = 0; v < VECTORS; v++)
#define INLINE static inline __attribute__((always_inline))

typedef float vector __attribute__((vector_size(4 * WIDTH)));
typedef int32_t integers __attribute__((vector_size(4 * WIDTH)));
typedef double doubles __attribute__((vector_size(4 * WIDTH))); /* half as many numbers */

INLINE vector load(const float *from) {
    vector values;
    memcpy(&values, from, sizeof values);
    return values;
}

INLINE void store(float *into, vector values) { memcpy(into, &values, sizeof values); }

INLINE vector all(float value) {
#if defined(__AVX512F__)
    return (vector)_mm512_set1_ps(value);
#elif defined(__AVX__)
    return (vector)_mm256_set1_ps(value);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (vector)vdupq_n_f32(value);
#else
    return value - (vector){0}; /* value + 0 would make -0 a 0 */
#endif
}

/* The halves of a vector in double precision. __builtin_convertvector would pass a vector twice as wide through memory. */
#if defined(__AVX512F__)
INLINE doubles first_half(vector a) { return (doubles)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)a)); }
INLINE doubles second_half(vector a) {
    return (doubles)_mm512_cvtps_pd((__m256)_mm512_extractf64x4_pd((__m512d)a, 1));
}
#elif defined(__AVX__)
INLINE doubles first_half(vector a) { return (doubles)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)a)); }
INLINE doubles second_half(vector a) { return (doubles)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)a, 1)); }
#elif defined(__ARM_NEON) && defined(__aarch64__)
INLINE doubles first_half(vector a) { return (doubles)vcvt_f64_f32(vget_low_f32((float32x4_t)a)); }
INLINE doubles second_half(vector a) { return (doubles)vcvt_high_f64_f32((float32x4_t)a); }
#else
typedef float half_vector __attribute__((vector_size(2 * WIDTH)));
INLINE doubles first_half(vector a) {
    half_vector half;
    memcpy(&half, &a, sizeof half);
    return __builtin_convertvector(half, doubles);
}
INLINE doubles second_half(vector a) {
    half_vector half;
    memcpy(&half, (const char *)&a + sizeof half, sizeof half);
    return __builtin_convertvector(half, doubles);
}
#endif

INLINE vector where(integers yes, vector a, vector b) {
    return (vector)(((integers)a & yes) | ((integers)b & ~yes));
}

/* a b + c, rounded once if the processor has a fused multiply-add. Always explicit: a compiler may contract differently
in each copy of a function, and both layouts must round the same way. */
INLINE vector multiply_add(vector a, vector b, vector c) {
#if defined(__AVX512F__)
    return (vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX__) && defined(__FMA__)
    return (vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (vector)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

/* a b[which] + c, where the processor can do this without copying b[which] into a vector first. */
#if defined(__ARM_NEON) && defined(__aarch64__)
#define BY_NUMBER(a, b, which, c) ((vector)vfmaq_laneq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b), which))
#endif

INLINE vector larger(vector a, vector b) { return where(a > b, a, b); }

#endif
