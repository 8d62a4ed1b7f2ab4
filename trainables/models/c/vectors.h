/* Vectors of floats as this processor has them, and what is done with them. */

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

/* A vector, and how many rows of how many vectors of a product are held in registers, with both factors beside them;
MOST_SIDE of either where the rows are vectors, too. */
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
typedef double doubles __attribute__((vector_size(8 * WIDTH)));

INLINE vector load(const float *from) {
    vector found;
    memcpy(&found, from, sizeof found);
    return found;
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
    return value - (vector){0}; /* a sum would make -0 a 0 */
#endif
}

INLINE vector where(integers yes, vector a, vector b) {
    return (vector)(((integers)a & yes) | ((integers)b & ~yes));
}

/* a b + c, rounded once where the processor can. Always said, never left to the compiler, whose taste may differ from one
copy of a function to the next: both layouts must round alike. */
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

INLINE vector larger(vector a, vector b) { return where(a > b, a, b); }

#endif
