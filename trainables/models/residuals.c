/* From logits to clipped residuals, one pass over a chunk: see residuals.py, which says the same in torch.

A row holds its classes one after the other, each as LANES neighbouring floats. Only multiplications, additions and
comparisons of a lane with itself: what a lane gets does not depend on the others, nor on the width of the vectors. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#define WIDTH 16
#elif defined(__AVX__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
#define VECTORS (LANES / WIDTH)
/* all lanes of a row side by side, so that one vector's arithmetic hides the other's latency */
#define EACH _Pragma("GCC unroll 16") for (int v = 0; v < VECTORS; v++)

typedef float vector __attribute__((vector_size(4 * WIDTH)));
typedef int32_t integers __attribute__((vector_size(4 * WIDTH)));

static inline vector load(const float *from) {
    vector found;
    memcpy(&found, from, sizeof found);
    return found;
}

static inline void store(float *into, vector values) { memcpy(into, &values, sizeof values); }

static inline vector all(float value) { return (vector){0} + value; }

static inline vector where(integers yes, vector a, vector b) {
    return (vector)(((integers)a & yes) | ((integers)b & ~yes));
}

/* 2^x for x <= 0, to about one unit in the last place; what is below 2^-126 counts as that. nan stays nan. */
static inline vector power_of_two(vector x) {
    x = where(x < -126.0f, all(-126.0f), x);
    vector shifted = x + 12582912.0f; /* 1.5 * 2^23: the nearest whole number is in the last bits */
    vector f = x - (shifted - 12582912.0f);
    vector p = all(1.540353e-4f); /* Taylor's series of 2^f on [-1/2, 1/2] */
    p = p * f + 1.333355814e-3f;
    p = p * f + 9.618129107e-3f;
    p = p * f + 5.550410866e-2f;
    p = p * f + 2.402265069e-1f;
    p = p * f + 6.931471805e-1f;
    p = p * f + 1.0f;
    /* a product, not a sum of exponents: it leaves every nan a nan */
    return p * (vector)(((integers)shifted << 23) + (127 << 23));
}

/* `z` (rows, classes, LANES): logits to base 2, in place of which come the clipped residuals. The last three (rows,
LANES), or none of them: the sum of the powers, the label's shifted logit, the factor of clipping. */
void clipped_residuals(float *z, const int64_t *label, const float *row_norm, const float *clip, int64_t rows,
                       int64_t classes, float *sums, float *label_logits, float *factors) {
    for (int64_t i = 0; i < rows; i++) {
        float *row = z + i * classes * LANES, *own = row + label[i] * LANES;
        vector top[VECTORS], of_label[VECTORS], others[VECTORS], squares[VECTORS], scale[VECTORS];
        EACH top[v] = load(row + WIDTH * v);
        for (int64_t k = 1; k < classes; k++) EACH {
            vector logit = load(row + k * LANES + WIDTH * v);
            top[v] = where(logit > top[v], logit, top[v]);
        }
        EACH {
            of_label[v] = load(own + WIDTH * v) - top[v];
            store(own + WIDTH * v, all(-INFINITY));
            others[v] = squares[v] = all(0);
        }
        for (int64_t k = 0; k < classes; k++) EACH {
            float *cell = row + k * LANES + WIDTH * v;
            vector power = power_of_two(load(cell) - top[v]);
            store(cell, power);
            others[v] += power;
            squares[v] += power * power;
        }
        EACH {
            vector sum = power_of_two(of_label[v]) + others[v], norm = squares[v] + others[v] * others[v];
            for (int l = 0; l < WIDTH; l++) norm[l] = sqrtf(norm[l]);
            scale[v] = 1.0f / sum;
            vector factor = load(clip + WIDTH * v) / (norm * scale[v] * row_norm[i]);
            factor = where(factor > 1.0f, all(1.0f), factor);
            scale[v] *= factor;
            store(own + WIDTH * v, -others[v]);
            if (sums) {
                store(sums + i * LANES + WIDTH * v, sum);
                store(label_logits + i * LANES + WIDTH * v, of_label[v]);
                store(factors + i * LANES + WIDTH * v, factor);
            }
        }
        for (int64_t k = 0; k < classes; k++) EACH {
            float *cell = row + k * LANES + WIDTH * v;
            store(cell, load(cell) * scale[v]);
        }
    }
}
