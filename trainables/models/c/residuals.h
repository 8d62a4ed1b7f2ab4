/* From logits to clipped residuals, or to what an evaluation asks for: LANES softmaxes at a time, all of one row or of
LANES rows. */

#ifndef RESIDUALS_H
#define RESIDUALS_H

#include "vectors.h"

#define LEAST (-60.0f) /* a power below 2^-60 changes no sum; as zero it cannot become a subnormal number either */

#define SIXTH 1.540353e-4f /* of Taylor's series of 2^f on [-1/2, 1/2] */

/* x is a whole number, whose power of two is `whole`, and what comes out. */
INLINE vector fraction_of(vector x, vector *whole) {
    vector shifted = x + 12582912.0f; /* 1.5 * 2^23: the nearest whole number is in the last bits */
    *whole = (vector)(((integers)shifted << 23) + (127 << 23));
    return x - (shifted - 12582912.0f);
}

/* (2^f - 1) / f by Taylor's series, whose terms from the sixth on are p. */
INLINE vector series(vector p, vector f) {
    p = multiply_add(p, f, all(1.333355814e-3f));
    p = multiply_add(p, f, all(9.618129107e-3f));
    p = multiply_add(p, f, all(5.550410866e-2f));
    p = multiply_add(p, f, all(2.402265069e-1f));
    return multiply_add(p, f, all(6.931471805e-1f));
}

/* 2^x for x <= 0, to about one unit in the last place; below 2^LEAST it is 0. nan stays nan. */
INLINE vector power_of_two(vector x) {
    vector whole, f = fraction_of(x, &whole);
    /* a product, not a sum of exponents: it leaves every nan a nan */
    vector p = multiply_add(series(all(SIXTH), f), f, all(1.0f)) * whole;
    return where(x < LEAST, all(0), p);
}

/* What is known of LANES softmaxes beside their residuals. */
typedef struct {
    float sum[LANES];   /* of the powers */
    float label[LANES]; /* the label's shifted logit */
    float length[LANES]; /* of the residuals, before they are clipped, times the row's */
    float factor[LANES];
} seen;

/* Where each of LANES softmaxes has its label: all in one row (step 0), or each in a row of its own (step 1). */
#define OF_LABEL(l) (z + label[(l) * step] * LANES + (l))

/* What brings contributions of some length to their bound. */
INLINE vector brought_to(vector bound, vector length, int64_t automatic) {
    vector factor = bound / (automatic ? length + SOFTENING : length);
    return automatic ? factor : where(factor > 1.0f, all(1.0f), factor);
}

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
        vector length = norm * scale[v] * of_row, factor = brought_to(bound, length, automatic);
        scale[v] *= factor;
        store(said->sum + WIDTH * v, sum);
        store(said->label + WIDTH * v, of_label[v]);
        store(said->length + WIDTH * v, length);
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

/* The loss of a tile, -ln 2 (label's logit - log2 of the sum): the sums are multiplied, so that one logarithm serves many
rows; they are between 1 and the number of classes, and doubles are long. */
typedef struct {
    double product, loss, clipped;
} account;

/* Rows whose sums have room in a double: of up to 255 classes those of a tile, of 2^31 32 of them. */
INLINE int64_t rows_of_product(int64_t classes) { return classes < 256 ? TILE : 32; }

INLINE void note(account *of, const seen *said, int l) {
    of->product *= said->sum[l];
    of->loss -= said->label[l];
}

INLINE void take_logarithms(account *of, int64_t lanes) {
    for (int64_t l = 0; l < lanes; l++) {
        of[l].loss += log2(of[l].product);
        of[l].product = 1;
    }
}

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

/* A tile's logits `z` (rows, columns), wide or narrow, to clipped residuals. `norm`: the rows' lengths, or none for 1.
`length`, where wanted: the residuals', times that, before they are clipped, (rows, LANES or one). `of`: the lanes'
accounts, where wanted. */
INLINE void residuals_of_tile(float *z, int64_t rows, int64_t classes, int64_t columns, int64_t wide,
                              const int64_t *label, const float *norm, const float *clip, int64_t automatic,
                              float *turned, float *length, account *of) {
    const int64_t at_once = rows_of_product(classes);
    const float one = 1;
    seen said;
    if (wide)
        for (int64_t i = 0; i < rows; i++) {
            clipped_residuals(z + i * columns, classes, label + i, 0, norm ? norm + i : &one, clip, automatic, &said);
            if (length) memcpy(length + i * LANES, said.length, sizeof said.length);
            if (of)
                for (int l = 0; l < LANES; l++) {
                    note(of + l, &said, l);
                    of[l].clipped += said.factor[l] < 1.0f;
                }
            if (of && (i + 1) % at_once == 0) take_logarithms(of, LANES);
        }
    else
        for (int64_t i = 0; i < rows; i += LANES) {
            int64_t some = rows - i < LANES ? rows - i : LANES, labels[LANES];
            float norms[LANES];
            take(label + i, norm ? norm + i : 0, some, labels, norms);
            turn(z + i * columns, some, classes, columns, turned);
            clipped_residuals(turned, classes, labels, 1, norms, clip, automatic, &said);
            turn_back(turned, some, classes, columns, z + i * columns);
            if (length) memcpy(length + i, said.length, sizeof said.length);
            if (of)
                for (int l = 0; l < some; l++) {
                    note(of, &said, l);
                    of->clipped += said.factor[l] < 1.0f;
                }
            if (of && (i + LANES) % at_once == 0) take_logarithms(of, 1);
        }
    if (of) take_logarithms(of, wide ? LANES : 1);
}

/* A tile's logits to losses and to whether each row is `right`, (LANES or one, all rows); `z` is not needed after. */
INLINE void judge_tile(float *z, int64_t rows, int64_t classes, int64_t columns, int64_t wide, const int64_t *label,
                       float *turned, account *of, uint8_t *right, int64_t all_rows) {
    const int64_t at_once = rows_of_product(classes);
    uint8_t yes[LANES];
    seen said;
    if (wide)
        for (int64_t i = 0; i < rows; i++) {
            judged(z + i * columns, classes, label + i, 0, &said, yes);
            for (int l = 0; l < LANES; l++) {
                note(of + l, &said, l);
                right[l * all_rows + i] = yes[l];
            }
            if ((i + 1) % at_once == 0) take_logarithms(of, LANES);
        }
    else
        for (int64_t i = 0; i < rows; i += LANES) {
            int64_t some = rows - i < LANES ? rows - i : LANES, labels[LANES];
            float norms[LANES];
            take(label + i, 0, some, labels, norms);
            turn(z + i * columns, some, classes, columns, turned);
            judged(turned, classes, labels, 1, &said, yes);
            for (int l = 0; l < some; l++) note(of, &said, l);
            memcpy(right + i, yes, some);
            if ((i + LANES) % at_once == 0) take_logarithms(of, 1);
        }
    take_logarithms(of, wide ? LANES : 1);
}

/* The tiles of one client, or of an evaluation, one after the other: what is known of their lanes. */
typedef struct {
    double loss[LANES], clipped[LANES];
} sums;

INLINE void begin(account *of) {
    for (int l = 0; l < LANES; l++) of[l] = (account){1, 0, 0};
}

INLINE void add_account(sums *to, const account *of) {
    for (int l = 0; l < LANES; l++) {
        to->loss[l] += of[l].loss;
        to->clipped[l] += of[l].clipped;
    }
}

/* Columns of so many numbers of a row. */
INLINE int64_t columns_of(int64_t numbers, int64_t wide) {
    return wide ? numbers * LANES : (numbers + WIDTH - 1) / WIDTH * WIDTH;
}

#endif
