/* Clipped residuals, or losses and predictions, from logits: LANES softmaxes at a time, for LANES lanes of one row
(wide layout) or for LANES rows of one lane (narrow layout). */

#ifndef RESIDUALS_H
#define RESIDUALS_H

#include "vectors.h"

#define LEAST (-60.0f) /* powers below 2^-60 change no sum and are set to 0, so no subnormal numbers arise */

#define SIXTH 1.540353e-4f /* sixth coefficient of the Taylor series of 2^f on [-1/2, 1/2] */

/* x = n + f with n the nearest integer. Returns f; `whole` is 2^n. */
INLINE vector fraction_of(vector x, vector *whole) {
    vector shifted = x + 12582912.0f; /* 1.5 * 2^23: the last bits are the nearest integer */
    *whole = (vector)(((integers)shifted << 23) + (127 << 23));
    return x - (shifted - 12582912.0f);
}

/* (2^f - 1) / f by its Taylor series; p: the terms from the sixth on. */
INLINE vector series(vector p, vector f) {
    p = multiply_add(p, f, all(1.333355814e-3f));
    p = multiply_add(p, f, all(9.618129107e-3f));
    p = multiply_add(p, f, all(5.550410866e-2f));
    p = multiply_add(p, f, all(2.402265069e-1f));
    return multiply_add(p, f, all(6.931471805e-1f));
}

/* 2^x for x <= 0, accurate to about one unit in the last place; 0 below 2^LEAST. nan stays nan. */
INLINE vector power_of_two(vector x) {
    vector whole, f = fraction_of(x, &whole);
    /* a product, not a sum of exponents, keeps nan */
    vector p = multiply_add(series(all(SIXTH), f), f, all(1.0f)) * whole;
    return where(x < LEAST, all(0), p);
}

/* What else is computed for LANES softmaxes. */
typedef struct {
    float sum[LANES];   /* of the powers 2^(z - max z) */
    float label[LANES]; /* the label's logit minus the largest */
    float length[LANES]; /* norm of the residual before clipping, times the row's norm */
    float factor[LANES];
} row_stats;

/* Address of the label's logit of softmax l: all have the same row (step 0), or a different one each (step 1). */
#define OF_LABEL(l) (z + label[(l) * step] * LANES + (l))

/* The clipping factor of contributions of this length. */
INLINE vector clip_factor(vector bound, vector length, int64_t automatic) {
    vector factor = bound / (automatic ? length + SOFTENING : length);
    return automatic ? factor : where(factor > 1.0f, all(1.0f), factor);
}

/* Norms of rows, (rows, columns), and the column that each lane uses: lanes may have different centres. */
typedef struct {
    const float *norm;
    int64_t columns;
    const int64_t *of_lane;
} row_norms;

/* From this row on. */
INLINE row_norms from_row(row_norms of, int64_t row) {
    of.norm += row * of.columns;
    return of;
}

/* The norms of LANES softmaxes: of LANES lanes of one row (wide), or of up to LANES rows of one lane, 1 for others. */
INLINE void select_norms(row_norms of, int64_t wide, int64_t rows, float *norms) {
    for (int64_t l = 0; l < LANES; l++)
        norms[l] = wide ? of.norm[of.of_lane[l]] : l < rows ? of.norm[l * of.columns + *of.of_lane] : 1;
}

/* `z` (classes, LANES): logits in base 2, replaced by the clipped residuals. `row_norm`: LANES norms. `automatic`:
automatic clipping. */
INLINE void clipped_residuals(float *z, int64_t classes, const int64_t *label, const int step, const float *row_norm,
                              const float *clip, int64_t automatic, row_stats *stats) {
    vector top[VECTORS], of_label[VECTORS], others[VECTORS], squares[VECTORS], scale[VECTORS];
    EACH top[v] = load(z + WIDTH * v);
    for (int64_t k = 1; k < classes; k++) EACH top[v] = larger(load(z + k * LANES + WIDTH * v), top[v]);
    for (int l = 0; l < LANES; l++) {
        stats->label[l] = *OF_LABEL(l);
        *OF_LABEL(l) = -INFINITY;
    }
    EACH {
        of_label[v] = load(stats->label + WIDTH * v) - top[v];
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
        vector bound = step ? all(*clip) : load(clip + WIDTH * v);
        vector length = norm * scale[v] * load(row_norm + WIDTH * v), factor = clip_factor(bound, length, automatic);
        scale[v] *= factor;
        store(stats->sum + WIDTH * v, sum);
        store(stats->label + WIDTH * v, of_label[v]);
        store(stats->length + WIDTH * v, length);
        store(stats->factor + WIDTH * v, factor);
    }
    float lost[LANES];
    EACH store(lost + WIDTH * v, -others[v]);
    for (int l = 0; l < LANES; l++) *OF_LABEL(l) = lost[l];
    for (int64_t k = 0; k < classes; k++) EACH {
        float *cell = z + k * LANES + WIDTH * v;
        store(cell, load(cell) * scale[v]);
    }
}

/* Whether the label's logit is above all others, and the parts of the loss; overwrites `z`. */
INLINE void evaluate_rows(float *z, int64_t classes, const int64_t *label, const int step, row_stats *stats,
                          uint8_t *right) {
    vector top[VECTORS], of_label[VECTORS], sum[VECTORS];
    for (int l = 0; l < LANES; l++) {
        stats->label[l] = *OF_LABEL(l);
        *OF_LABEL(l) = -INFINITY;
    }
    EACH top[v] = load(z + WIDTH * v);
    for (int64_t k = 1; k < classes; k++) EACH top[v] = larger(load(z + k * LANES + WIDTH * v), top[v]);
    float highest[LANES];
    EACH {
        store(highest + WIDTH * v, top[v]);
        of_label[v] = load(stats->label + WIDTH * v);
        top[v] = larger(of_label[v], top[v]);
        of_label[v] -= top[v];
        sum[v] = power_of_two(of_label[v]);
    }
    for (int64_t k = 0; k < classes; k++) EACH sum[v] += power_of_two(load(z + k * LANES + WIDTH * v) - top[v]);
    EACH {
        store(stats->sum + WIDTH * v, sum[v]);
    }
    for (int l = 0; l < LANES; l++) /* a nan is never right */
        right[l] = stats->label[l] > highest[l] && stats->sum[l] == stats->sum[l];
    EACH store(stats->label + WIDTH * v, of_label[v]);
}

/* The loss of a tile in base 2: log2 of the sum - label's logit. Sums are multiplied, so that many rows need one
logarithm: they are between 1 and the number of classes, and a double has a large exponent. */
typedef struct {
    double product, loss, clipped;
} tile_sums;

/* Rows whose product of sums fits a double: a tile for up to 255 classes, 32 rows for up to 2^31 classes. */
INLINE int64_t rows_of_product(int64_t classes) { return classes < 256 ? TILE : 32; }

INLINE void add_row(tile_sums *of, const row_stats *stats, int l) {
    of->product *= stats->sum[l];
    of->loss -= stats->label[l];
}

INLINE void take_logarithms(tile_sums *of, int64_t lanes) {
    for (int64_t l = 0; l < lanes; l++) {
        of[l].loss += log2(of[l].product);
        of[l].product = 1;
    }
}

/* LANES rows of the narrow layout as (classes, LANES); missing rows are 0. */
INLINE void transpose(const float *z, int64_t rows, int64_t classes, int64_t columns, float *transposed) {
    for (int64_t k = 0; k < classes; k++)
        for (int64_t l = 0; l < LANES; l++) transposed[k * LANES + l] = l < rows ? z[l * columns + k] : 0;
}

INLINE void transpose_back(const float *transposed, int64_t rows, int64_t classes, int64_t columns, float *z) {
    for (int64_t l = 0; l < rows; l++)
        for (int64_t k = 0; k < classes; k++) z[l * columns + k] = transposed[k * LANES + l];
}

/* LANES labels; those of missing rows are 0. */
INLINE void pad_labels(const int64_t *label, int64_t rows, int64_t *labels) {
    for (int64_t l = 0; l < LANES; l++) labels[l] = l < rows ? label[l] : 0;
}

/* Clipped residuals of a tile's logits `z` (rows, columns), in place, wide or narrow. `of_rows`: the rows' norms, or
null for 1. `length` (rows, LANES or 1), or null: norms of the residuals before clipping, times the norms of the
rows. `of`, or null: the sums of every lane. */
INLINE void residuals_of_tile(float *z, int64_t rows, int64_t classes, int64_t columns, int64_t wide,
                              const int64_t *label, const row_norms *of_rows, const float *clip, int64_t automatic,
                              float *transposed, float *length, tile_sums *of) {
    const int64_t at_once = rows_of_product(classes);
    float norms[LANES];
    for (int l = 0; l < LANES; l++) norms[l] = 1;
    row_stats stats;
    if (wide)
        for (int64_t i = 0; i < rows; i++) {
            if (of_rows) select_norms(from_row(*of_rows, i), 1, 1, norms);
            clipped_residuals(z + i * columns, classes, label + i, 0, norms, clip, automatic, &stats);
            if (length) memcpy(length + i * LANES, stats.length, sizeof stats.length);
            if (of)
                for (int l = 0; l < LANES; l++) {
                    add_row(of + l, &stats, l);
                    of[l].clipped += stats.factor[l] < 1.0f;
                }
            if (of && (i + 1) % at_once == 0) take_logarithms(of, LANES);
        }
    else
        for (int64_t i = 0; i < rows; i += LANES) {
            int64_t some = rows - i < LANES ? rows - i : LANES, labels[LANES];
            pad_labels(label + i, some, labels);
            if (of_rows) select_norms(from_row(*of_rows, i), 0, some, norms);
            transpose(z + i * columns, some, classes, columns, transposed);
            clipped_residuals(transposed, classes, labels, 1, norms, clip, automatic, &stats);
            transpose_back(transposed, some, classes, columns, z + i * columns);
            if (length) memcpy(length + i, stats.length, sizeof stats.length);
            if (of)
                for (int l = 0; l < some; l++) {
                    add_row(of, &stats, l);
                    of->clipped += stats.factor[l] < 1.0f;
                }
            if (of && (i + LANES) % at_once == 0) take_logarithms(of, 1);
        }
    if (of) take_logarithms(of, wide ? LANES : 1);
}

/* Losses of a tile's logits, and whether each row is `right`, (LANES or 1, all rows); overwrites `z`. */
INLINE void evaluate_tile(float *z, int64_t rows, int64_t classes, int64_t columns, int64_t wide, const int64_t *label,
                       float *transposed, tile_sums *of, uint8_t *right, int64_t all_rows) {
    const int64_t at_once = rows_of_product(classes);
    uint8_t yes[LANES];
    row_stats stats;
    if (wide)
        for (int64_t i = 0; i < rows; i++) {
            evaluate_rows(z + i * columns, classes, label + i, 0, &stats, yes);
            for (int l = 0; l < LANES; l++) {
                add_row(of + l, &stats, l);
                right[l * all_rows + i] = yes[l];
            }
            if ((i + 1) % at_once == 0) take_logarithms(of, LANES);
        }
    else
        for (int64_t i = 0; i < rows; i += LANES) {
            int64_t some = rows - i < LANES ? rows - i : LANES, labels[LANES];
            pad_labels(label + i, some, labels);
            transpose(z + i * columns, some, classes, columns, transposed);
            evaluate_rows(transposed, classes, labels, 1, &stats, yes);
            for (int l = 0; l < some; l++) add_row(of, &stats, l);
            memcpy(right + i, yes, some);
            if ((i + LANES) % at_once == 0) take_logarithms(of, 1);
        }
    take_logarithms(of, wide ? LANES : 1);
}

/* Sums over all tiles of a client, or of an evaluation, per lane. */
typedef struct {
    double loss[LANES], clipped[LANES];
} lane_sums;

INLINE void reset(tile_sums *of) {
    for (int l = 0; l < LANES; l++) of[l] = (tile_sums){1, 0, 0};
}

INLINE void add_tile(lane_sums *to, const tile_sums *of) {
    for (int l = 0; l < LANES; l++) {
        to->loss[l] += of[l].loss;
        to->clipped[l] += of[l].clipped;
    }
}

/* Columns of a row with this many numbers, in the wide or narrow layout. */
INLINE int64_t columns_of(int64_t numbers, int64_t wide) {
    return wide ? numbers * LANES : (numbers + WIDTH - 1) / WIDTH * WIDTH;
}

#endif
