/* Matrix products of a tile of rows. Every number is one chain of multiply-adds, so its bits do not depend on the block
it is computed in. With more than PART features, factors are used in parts that fit the cache. */

#include "products.h"

#define STRIP (16 * MOST_ROWS) /* features whose gradients are computed at a time, */
#define ACROSS 160             /* for this many columns */

/* Store the result as floats, or add it to doubles (`added`). */
INLINE void store_result(vector acc, const int added, void *into, int64_t at) {
    if (added) {
        double *to = (double *)into + at;
        doubles first, second;
        memcpy(&first, to, sizeof first);
        memcpy(&second, to + WIDTH / 2, sizeof second);
        first += first_half(acc);
        second += second_half(acc);
        memcpy(to, &first, sizeof first);
        memcpy(to + WIDTH / 2, &second, sizeof second);
    } else
        store((float *)into + at, acc);
}

/* M rows x N vectors of a product: sum over t of a[i, t] b[t][:]. `resumed`: the sum continues the one stored. */
INLINE void product(const int M, const int N, const int added, int resumed, const float *a, int64_t a_row,
                    int64_t a_step, const float *b, int64_t b_row, int64_t steps, void *into, int64_t into_row) {
    vector acc[MOST_ROWS][MOST_VECTORS];
    UNROLLED for (int i = 0; i < M; i++)
        UNROLLED for (int v = 0; v < N; v++)
            acc[i][v] = !added && resumed ? load((float *)into + i * into_row + WIDTH * v) : all(0);
    int64_t t = 0;
#ifdef BY_NUMBER
    if (a_step == 1)
        for (; t + 4 <= steps; t += 4) {
            vector ones[MOST_ROWS];
            UNROLLED for (int i = 0; i < M; i++) ones[i] = load(a + i * a_row + t);
#define STEP(S)                                                                                                       \
    {                                                                                                                  \
        vector factor[MOST_VECTORS];                                                                                   \
        UNROLLED for (int v = 0; v < N; v++) factor[v] = load(b + (t + S) * b_row + WIDTH * v);                        \
        UNROLLED for (int i = 0; i < M; i++)                                                                           \
            UNROLLED for (int v = 0; v < N; v++) acc[i][v] = BY_NUMBER(factor[v], ones[i], S, acc[i][v]);              \
    }
            STEP(0) STEP(1) STEP(2) STEP(3)
#undef STEP
        }
#endif
    for (; t < steps; t++) {
        vector factor[MOST_VECTORS];
        UNROLLED for (int v = 0; v < N; v++) factor[v] = load(b + t * b_row + WIDTH * v);
        UNROLLED for (int i = 0; i < M; i++) {
            vector one = all(a[i * a_row + t * a_step]);
            UNROLLED for (int v = 0; v < N; v++) acc[i][v] = multiply_add(factor[v], one, acc[i][v]);
        }
    }
    UNROLLED for (int i = 0; i < M; i++)
        UNROLLED for (int v = 0; v < N; v++) store_result(acc[i][v], added, into, i * into_row + WIDTH * v);
}

INLINE void product_of(int64_t rows, const int N, const int added, int resumed, const float *a, int64_t a_row,
                       int64_t a_step, const float *b, int64_t b_row, int64_t steps, void *into, int64_t into_row) {
#define CASE(M) case M: product(M, N, added, resumed, a, a_row, a_step, b, b_row, steps, into, into_row); break;
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

/* The whole product, in blocks of about equal size that fit the registers. Rows of b and of the result are `row` numbers
apart. If that is far, a block's columns of b are copied first: they would be spread over many pages of memory. At most
PART steps. */
INLINE void multiply(const int added, int resumed, const float *a, int64_t a_row, int64_t a_step, int64_t rows,
                     const float *b, int64_t columns, int64_t row, int64_t steps, void *into) {
    float packed[PART * MOST_VECTORS * WIDTH] __attribute__((aligned(64)));
    int64_t vectors = columns / WIDTH, across = (vectors + MOST_VECTORS - 1) / MOST_VECTORS;
    int64_t down = (rows + MOST_ROWS - 1) / MOST_ROWS, size = added ? sizeof(double) : sizeof(float);
    for (int64_t j = 0; j < across; j++) {
        int64_t from = vectors * j / across, count = vectors * (j + 1) / across - from, at = from * WIDTH;
        const float *panel = b + at;
        int64_t panel_row = row;
        if (row > ACROSS) {
            panel = packed, panel_row = count * WIDTH;
            for (int64_t t = 0; t < steps; t++)
                for (int64_t v = 0; v < count; v++)
                    store(packed + (t * count + v) * WIDTH, load(b + t * row + at + v * WIDTH));
        }
        for (int64_t i = 0; i < down; i++) {
            int64_t first = rows * i / down, some = rows * (i + 1) / down - first;
            const float *mine = a + first * a_row;
            void *there = (char *)into + (first * row + at) * size;
#define CASE(N)                                                                                                        \
    case N: product_of(some, N, added, resumed, mine, a_row, a_step, panel, panel_row, steps, there, row); break;
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

void logits_of(const float *x, int64_t x_row, int64_t rows, int64_t q, const float *w, int64_t columns, float *z) {
    for (int64_t at = 0; at < columns; at += ACROSS)
        for (int64_t k = 0; k < q; k += PART)
            multiply(0, k > 0, x + k, x_row, 1, rows, w + k * columns + at,
                     columns - at < ACROSS ? columns - at : ACROSS, columns, q - k < PART ? q - k : PART, z + at);
}

/* Not inlined, because every copy would take seconds to compile. */
static __attribute__((noinline)) void multiply_and_add(const float *a, int64_t a_row, int64_t a_step, int64_t rows,
                                                       const float *b, int64_t columns, int64_t row, int64_t steps,
                                                       double *into) {
    multiply(1, 0, a, a_row, a_step, rows, b, columns, row, steps, into);
}

/* Some columns of `rows` rows of x, next to each other, in the order that `product` reads fastest. Rows are longer than
needed: with a power of two, many would compete for the same place in the cache. */
#ifdef BY_NUMBER
#define STRIP_ROW 1
#define STRIP_FEATURE (TILE + 16)
#else
#define STRIP_ROW (STRIP + 16)
#define STRIP_FEATURE 1
#endif
INLINE void copy_strip(const float *x, int64_t x_row, int64_t rows, int64_t features, float *to) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t f = 0; f < features; f++) to[f * STRIP_FEATURE + row * STRIP_ROW] = x[row * x_row + f];
}

void add_gradient(const float *x, int64_t x_row, int64_t rows, int64_t q, const float *residuals, int64_t columns,
                  double *total) {
    if (q <= PART) { /* at most one tile */
        multiply_and_add(x, 1, x_row, q, residuals, columns, columns, rows, total);
        return;
    }
#define EACH_TILE for (int64_t tile = 0, some; some = rows - tile < TILE ? rows - tile : TILE, tile < rows; tile += TILE)
    float strip[GROUP][(STRIP + 16) * (TILE + 16)];
    for (int64_t k = 0; k < q; k += STRIP) {
        int64_t features = q - k < STRIP ? q - k : STRIP;
        EACH_TILE copy_strip(x + tile * x_row + k, x_row, some, features, strip[tile / TILE]);
        for (int64_t at = 0; at < columns; at += ACROSS)
            EACH_TILE
                multiply_and_add(strip[tile / TILE], STRIP_FEATURE, STRIP_ROW, features, residuals + tile * columns + at,
                                 columns - at < ACROSS ? columns - at : ACROSS, columns, some, total + k * columns + at);
    }
#undef EACH_TILE
}

/* ---- a different matrix per lane, lanes interleaved */

/* M x N numbers of every lane, WIDTH lanes at a time: sum over t of a[i, t] b[t, j]. */
INLINE void lane_product(const int M, const int N, const int added, const float *a, int64_t a_row, int64_t a_step,
                  const float *b, int64_t b_step, int64_t b_column, int64_t steps, void *into, int64_t into_row) {
    for (int part = 0; part < LANES; part += WIDTH) {
        vector acc[MOST_SIDE][MOST_SIDE];
        UNROLLED for (int i = 0; i < M; i++)
            UNROLLED for (int j = 0; j < N; j++) acc[i][j] = all(0);
        for (int64_t t = 0; t < steps; t++) {
            vector factor[MOST_SIDE];
            UNROLLED for (int j = 0; j < N; j++) factor[j] = load(b + t * b_step + j * b_column + part);
            UNROLLED for (int i = 0; i < M; i++) {
                vector one = load(a + i * a_row + t * a_step + part);
                UNROLLED for (int j = 0; j < N; j++) acc[i][j] = multiply_add(factor[j], one, acc[i][j]);
            }
        }
        UNROLLED for (int i = 0; i < M; i++)
            UNROLLED for (int j = 0; j < N; j++) store_result(acc[i][j], added, into, i * into_row + j * LANES + part);
    }
}

/* The whole product (rows, columns, LANES), in blocks that fit the registers. */
INLINE void multiply_laned(const int added, const float *a, int64_t a_row, int64_t a_step, int64_t rows, const float *b,
                           int64_t b_step, int64_t b_column, int64_t columns, int64_t steps, void *into) {
    int64_t across = (columns + MOST_SIDE - 1) / MOST_SIDE, size = added ? sizeof(double) : sizeof(float);
    for (int64_t i = 0, some; i < rows; i += some) {
        some = rows - i < MOST_SIDE ? 1 : MOST_SIDE;
        for (int64_t j = 0; j < across; j++) {
            int64_t from = columns * j / across, count = columns * (j + 1) / across - from;
            const float *mine = a + i * a_row, *its = b + from * b_column;
            void *there = (char *)into + (i * columns + from) * LANES * size;
#define BLOCK(M, N) lane_product(M, N, added, mine, a_row, a_step, its, b_step, b_column, steps, there, columns * LANES)
#define CASE(N) case N: if (some == 1) BLOCK(1, N); else BLOCK(MOST_SIDE, N); break;
            switch (count) {
                CASE(1) CASE(2) CASE(3)
#if MOST_SIDE > 3
                CASE(4)
#endif
            }
#undef CASE
#undef BLOCK
        }
    }
}

void logits_of_lanes(const float *h, int64_t rows, int64_t units, const float *w, int64_t classes, float *z) {
    multiply_laned(0, h, units * LANES, LANES, rows, w, classes * LANES, LANES, classes, units, z);
}

void add_gradient_of_lanes(const float *h, int64_t rows, int64_t units, const float *residuals, int64_t classes,
                           double *total) {
    multiply_laned(1, h, LANES, units * LANES, units, residuals, classes * LANES, LANES, classes, rows, total);
}

void back_of_lanes(const float *residuals, int64_t rows, int64_t units, const float *w, int64_t classes, float *back) {
    multiply_laned(0, residuals, classes * LANES, LANES, rows, w, LANES, classes * LANES, units, classes, back);
}
