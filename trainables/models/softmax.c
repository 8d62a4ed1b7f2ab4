/* The softmax head on a CPU: logits, clipped residuals and their gradient, a tile of rows at a time, in cache.

Two layouts. Wide: LANES lanes side by side, a row's classes one after the other, each as LANES neighbouring floats.
Narrow: a single lane, a row's classes side by side, filled up to whole vectors; its softmax runs over LANES rows at a
time. Whichever a lane is computed in, and in whose company, its numbers are the same to the last bit: every logit is
one chain of multiply-adds over the features, every gradient one over the rows of a tile, whose sums are added in double
precision; and everything between is arithmetic of a number with itself, in one function for both layouts. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#endif

/* A vector, and how many rows of how many vectors of a product are held in registers, with both factors beside them. */
#ifdef __AVX512F__
#pragma GCC target("prefer-vector-width=512")
#define WIDTH 16
#define MOST_ROWS 8
#define MOST_VECTORS 3
#elif defined(__AVX__)
#define WIDTH 8
#define MOST_ROWS 4
#define MOST_VECTORS 3
#else
#define WIDTH 4
#define MOST_ROWS 5
#define MOST_VECTORS 4
#endif
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
    return (vector){0} + value;
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

/* ---- matrix products */

/* M rows of a product, N vectors each: the sum over t of a[i, t] b[t][:]. Written to floats, or `added` to doubles. */
INLINE void product(const int M, const int N, const int added, const float *a, int64_t a_row, int64_t a_step,
                    const float *b, int64_t b_row, int64_t steps, void *into, int64_t into_row) {
    vector found[MOST_ROWS][MOST_VECTORS];
    UNROLLED for (int i = 0; i < M; i++)
        UNROLLED for (int v = 0; v < N; v++) found[i][v] = all(0);
    for (int64_t t = 0; t < steps; t++) {
        vector factor[MOST_VECTORS];
        UNROLLED for (int v = 0; v < N; v++) factor[v] = load(b + t * b_row + WIDTH * v);
        UNROLLED for (int i = 0; i < M; i++) {
            vector one = all(a[i * a_row + t * a_step]);
            UNROLLED for (int v = 0; v < N; v++) found[i][v] = multiply_add(factor[v], one, found[i][v]);
        }
    }
    UNROLLED for (int i = 0; i < M; i++)
        UNROLLED for (int v = 0; v < N; v++) {
            int64_t at = i * into_row + WIDTH * v;
            if (added) {
                doubles total;
                memcpy(&total, (double *)into + at, sizeof total);
                total += __builtin_convertvector(found[i][v], doubles);
                memcpy((double *)into + at, &total, sizeof total);
            } else
                store((float *)into + at, found[i][v]);
        }
}

INLINE void product_of(int64_t rows, const int N, const int added, const float *a, int64_t a_row, int64_t a_step,
                       const float *b, int64_t b_row, int64_t steps, void *into, int64_t into_row) {
#define CASE(M) case M: product(M, N, added, a, a_row, a_step, b, b_row, steps, into, into_row); break;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4)
#if MOST_ROWS > 4
        CASE(5)
#endif
#if MOST_ROWS > 5
        CASE(6) CASE(7) CASE(8)
#endif
    }
#undef CASE
}

/* The whole of it, cut into blocks of about equal size that fit the registers. How it is cut changes no bit. */
INLINE void multiply(const int added, const float *a, int64_t a_row, int64_t a_step, int64_t rows, const float *b,
                     int64_t columns, int64_t steps, void *into) {
    int64_t vectors = columns / WIDTH, across = (vectors + MOST_VECTORS - 1) / MOST_VECTORS;
    int64_t down = (rows + MOST_ROWS - 1) / MOST_ROWS, size = added ? sizeof(double) : sizeof(float);
    for (int64_t j = 0; j < across; j++) {
        int64_t from = vectors * j / across, count = vectors * (j + 1) / across - from, at = from * WIDTH;
        for (int64_t i = 0; i < down; i++) {
            int64_t first = rows * i / down, some = rows * (i + 1) / down - first;
            const float *mine = a + first * a_row;
            void *there = (char *)into + (first * columns + at) * size;
#define CASE(N) case N: product_of(some, N, added, mine, a_row, a_step, b + at, columns, steps, there, columns); break;
            switch (count) {
                CASE(1) CASE(2) CASE(3)
#if MOST_VECTORS > 3
                CASE(4)
#endif
            }
#undef CASE
        }
    }
}

static __attribute__((noinline)) void logits_of(const float *x, int64_t rows, int64_t q, const float *w,
                                                int64_t columns, float *z) {
    multiply(0, x, q, 1, rows, w, columns, q, z);
}

static __attribute__((noinline)) void add_gradient(const float *x, int64_t rows, int64_t q, const float *residuals,
                                                   int64_t columns, double *total) {
    multiply(1, x, 1, q, q, residuals, columns, rows, total);
}

/* ---- between them */

#define LEAST (-60.0f) /* a power below 2^-60 changes no sum; as zero it cannot become a subnormal number either */

/* 2^x for x <= 0, to about one unit in the last place; below 2^LEAST it is 0. nan stays nan. */
INLINE vector power_of_two(vector x) {
    vector shifted = x + 12582912.0f; /* 1.5 * 2^23: the nearest whole number is in the last bits */
    vector f = x - (shifted - 12582912.0f);
    vector p = all(1.540353e-4f); /* Taylor's series of 2^f on [-1/2, 1/2] */
    p = multiply_add(p, f, all(1.333355814e-3f));
    p = multiply_add(p, f, all(9.618129107e-3f));
    p = multiply_add(p, f, all(5.550410866e-2f));
    p = multiply_add(p, f, all(2.402265069e-1f));
    p = multiply_add(p, f, all(6.931471805e-1f));
    p = multiply_add(p, f, all(1.0f));
    /* a product, not a sum of exponents: it leaves every nan a nan */
    p = p * (vector)(((integers)shifted << 23) + (127 << 23));
    return where(x < LEAST, all(0), p);
}

/* What is known of LANES softmaxes beside their residuals. */
typedef struct {
    float sum[LANES];   /* of the powers */
    float label[LANES]; /* the label's shifted logit */
    float factor[LANES];
} seen;

/* Where each of LANES softmaxes has its label: all in one row (step 0), or each in a row of its own (step 1). */
#define OF_LABEL(l) (z + label[(l) * step] * LANES + (l))

/* `z` (classes, LANES): logits to base 2, in place of which come the clipped residuals. `automatic`: short ones are
stretched, too. */
INLINE void clipped_residuals(float *z, int64_t classes, const int64_t *label, const int step, const float *row_norm,
                              const float *clip, int64_t automatic, seen *said) {
    vector top[VECTORS], of_label[VECTORS], others[VECTORS], squares[VECTORS], scale[VECTORS];
    EACH top[v] = load(z + WIDTH * v);
    for (int64_t k = 1; k < classes; k++) EACH top[v] = larger(load(z + k * LANES + WIDTH * v), top[v]);
    for (int l = 0; l < LANES; l++) {
        said->label[l] = *OF_LABEL(l);
        *OF_LABEL(l) = -INFINITY;
    }
    EACH {
        of_label[v] = load(said->label + WIDTH * v) - top[v];
        others[v] = squares[v] = all(0);
    }
    for (int64_t k = 0; k < classes; k++) EACH {
        float *cell = z + k * LANES + WIDTH * v;
        vector power = power_of_two(load(cell) - top[v]);
        store(cell, power);
        others[v] += power;
        squares[v] = multiply_add(power, power, squares[v]);
    }
    EACH {
        vector sum = power_of_two(of_label[v]) + others[v], norm = multiply_add(others[v], others[v], squares[v]);
        for (int l = 0; l < WIDTH; l++) norm[l] = sqrtf(norm[l]);
        scale[v] = 1.0f / sum;
        vector of_row = step ? load(row_norm + WIDTH * v) : all(*row_norm);
        vector bound = step ? all(*clip) : load(clip + WIDTH * v);
        vector length = norm * scale[v] * of_row, factor = bound / (automatic ? length + SOFTENING : length);
        if (!automatic) factor = where(factor > 1.0f, all(1.0f), factor);
        scale[v] *= factor;
        store(said->sum + WIDTH * v, sum);
        store(said->label + WIDTH * v, of_label[v]);
        store(said->factor + WIDTH * v, factor);
    }
    float lost[LANES];
    EACH store(lost + WIDTH * v, -others[v]);
    for (int l = 0; l < LANES; l++) *OF_LABEL(l) = lost[l];
    for (int64_t k = 0; k < classes; k++) EACH {
        float *cell = z + k * LANES + WIDTH * v;
        store(cell, load(cell) * scale[v]);
    }
}

/* Whether the label's logit is above all others, and what the loss is made of; `z` is not needed after. */
INLINE void judged(float *z, int64_t classes, const int64_t *label, const int step, seen *said, uint8_t *right) {
    vector top[VECTORS], of_label[VECTORS], sum[VECTORS];
    for (int l = 0; l < LANES; l++) {
        said->label[l] = *OF_LABEL(l);
        *OF_LABEL(l) = -INFINITY;
    }
    EACH top[v] = load(z + WIDTH * v);
    for (int64_t k = 1; k < classes; k++) EACH top[v] = larger(load(z + k * LANES + WIDTH * v), top[v]);
    float highest[LANES];
    EACH {
        store(highest + WIDTH * v, top[v]);
        of_label[v] = load(said->label + WIDTH * v);
        top[v] = larger(of_label[v], top[v]);
        of_label[v] -= top[v];
        sum[v] = power_of_two(of_label[v]);
    }
    for (int64_t k = 0; k < classes; k++) EACH sum[v] += power_of_two(load(z + k * LANES + WIDTH * v) - top[v]);
    EACH {
        store(said->sum + WIDTH * v, sum[v]);
    }
    for (int l = 0; l < LANES; l++) right[l] = said->label[l] > highest[l] && said->sum[l] == said->sum[l]; /* no nan */
    EACH store(said->label + WIDTH * v, of_label[v]);
}

/* The loss of a tile, -ln 2 (label's logit - log2 of the sum): the sums are multiplied, so that one logarithm serves all
rows; they are between 1 and the number of classes, and doubles are long. */
typedef struct {
    double product, label, clipped;
} account;

INLINE void note(account *of, float sum, float label, float factor) {
    of->product *= sum;
    of->label += label;
    of->clipped += factor < 1.0f;
}

INLINE double loss_of(const account *of) { return log2(of->product) - of->label; }

/* The narrow layout's rows, LANES at a time, classes apart; what is filled up is a row of zeros. */
INLINE void turn(const float *z, int64_t rows, int64_t classes, int64_t columns, float *turned) {
    for (int64_t k = 0; k < classes; k++)
        for (int64_t l = 0; l < LANES; l++) turned[k * LANES + l] = l < rows ? z[l * columns + k] : 0;
}

INLINE void turn_back(const float *turned, int64_t rows, int64_t classes, int64_t columns, float *z) {
    for (int64_t l = 0; l < rows; l++)
        for (int64_t k = 0; k < classes; k++) z[l * columns + k] = turned[k * LANES + l];
}

/* LANES labels (and norms), where there are so many; filled up with the first class (and 1). */
INLINE void take(const int64_t *label, const float *norm, int64_t rows, int64_t *labels, float *norms) {
    for (int64_t l = 0; l < LANES; l++) {
        labels[l] = l < rows ? label[l] : 0;
        norms[l] = norm && l < rows ? norm[l] : 1;
    }
}

/* ---- what is called

`x` (clients, most rows, q), `norm` and `label` (clients, most rows), `sizes` (clients): how many rows are real.
`w` (blocks, clients or one, q, columns), logits to base 2. `wide`: columns are (classes, LANES) and `clip` (blocks,
LANES); else columns are classes, filled up with zeros to a whole number of vectors, and `clip` is (blocks).
`automatic`: how residuals are clipped.
`total` (blocks, clients, q, columns), zero before. `loss`, `clipped`: (blocks, clients, LANES or one), or none of them.
`scratch`: (TILE + classes) rows of columns, at least LANES each. */

int64_t vector_width(void) { return WIDTH; }

void gradient_sums(const float *x, const float *norm, const int64_t *label, const int64_t *sizes, int64_t clients,
                   int64_t most, int64_t q, int64_t classes, const float *w, int64_t of_client, int64_t blocks,
                   int64_t wide, const float *clip, int64_t automatic, double *total, double *loss, double *clipped,
                   float *scratch) {
    int64_t columns = wide ? classes * LANES : (classes + WIDTH - 1) / WIDTH * WIDTH, lanes = wide ? LANES : 1;
    float *z = scratch, *turned = scratch + TILE * columns;
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t client = 0; client < clients; client++) {
            const float *weights = w + (block * (of_client ? clients : 1) + (of_client ? client : 0)) * q * columns;
            const float *bound = clip + block * lanes;
            double *sum = total + (block * clients + client) * q * columns;
            double losses[LANES] = {0}, cut[LANES] = {0};
            for (int64_t first = 0; first < sizes[client]; first += TILE) {
                int64_t row = client * most + first, left = sizes[client] - first, rows = left < TILE ? left : TILE;
                account of[LANES];
                seen said;
                for (int64_t l = 0; l < lanes; l++) of[l] = (account){1, 0, 0};
                logits_of(x + row * q, rows, q, weights, columns, z);
                if (wide)
                    for (int64_t i = 0; i < rows; i++) {
                        clipped_residuals(z + i * columns, classes, label + row + i, 0, norm + row + i, bound, automatic,
                                          &said);
                        if (loss) for (int l = 0; l < LANES; l++) note(of + l, said.sum[l], said.label[l], said.factor[l]);
                    }
                else
                    for (int64_t i = 0; i < rows; i += LANES) {
                        int64_t some = rows - i < LANES ? rows - i : LANES, labels[LANES];
                        float norms[LANES];
                        take(label + row + i, norm + row + i, some, labels, norms);
                        turn(z + i * columns, some, classes, columns, turned);
                        clipped_residuals(turned, classes, labels, 1, norms, bound, automatic, &said);
                        turn_back(turned, some, classes, columns, z + i * columns);
                        if (loss) for (int64_t l = 0; l < some; l++) note(of, said.sum[l], said.label[l], said.factor[l]);
                    }
                add_gradient(x + row * q, rows, q, z, columns, sum);
                if (loss) for (int64_t l = 0; l < lanes; l++) {
                    losses[l] += loss_of(of + l);
                    cut[l] += of[l].clipped;
                }
            }
            if (loss) {
                memcpy(loss + (block * clients + client) * lanes, losses, lanes * sizeof *losses);
                memcpy(clipped + (block * clients + client) * lanes, cut, lanes * sizeof *cut);
            }
        }
}

/* Rows of one shard. `loss` (blocks, LANES or one): sums to base 2. `right` (blocks, LANES or one, rows). */
void evaluation(const float *x, const int64_t *label, int64_t all_rows, int64_t q, int64_t classes, const float *w,
                int64_t blocks, int64_t wide, double *loss, uint8_t *right, float *scratch) {
    int64_t columns = wide ? classes * LANES : (classes + WIDTH - 1) / WIDTH * WIDTH, lanes = wide ? LANES : 1;
    float *z = scratch, *turned = scratch + TILE * columns;
    for (int64_t block = 0; block < blocks; block++) {
        uint8_t *mine = right + block * lanes * all_rows;
        double losses[LANES] = {0};
        for (int64_t row = 0; row < all_rows; row += TILE) {
            int64_t rows = all_rows - row < TILE ? all_rows - row : TILE;
            account of[LANES];
            seen said;
            uint8_t yes[LANES];
            for (int64_t l = 0; l < lanes; l++) of[l] = (account){1, 0, 0};
            logits_of(x + row * q, rows, q, w + block * q * columns, columns, z);
            if (wide)
                for (int64_t i = 0; i < rows; i++) {
                    judged(z + i * columns, classes, label + row + i, 0, &said, yes);
                    for (int l = 0; l < LANES; l++) {
                        note(of + l, said.sum[l], said.label[l], 1);
                        mine[l * all_rows + row + i] = yes[l];
                    }
                }
            else
                for (int64_t i = 0; i < rows; i += LANES) {
                    int64_t some = rows - i < LANES ? rows - i : LANES, labels[LANES];
                    float norms[LANES];
                    take(label + row + i, 0, some, labels, norms);
                    turn(z + i * columns, some, classes, columns, turned);
                    judged(turned, classes, labels, 1, &said, yes);
                    for (int64_t l = 0; l < some; l++) note(of, said.sum[l], said.label[l], 1);
                    memcpy(mine + row + i, yes, some);
                }
            for (int64_t l = 0; l < lanes; l++) losses[l] += loss_of(of + l);
        }
        memcpy(loss + block * lanes, losses, lanes * sizeof *losses);
    }
}
