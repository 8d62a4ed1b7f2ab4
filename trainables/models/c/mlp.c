/* A head with one hidden layer on a CPU, a tile of rows at a time: softmax(h W2), h = (tanh(x W1), 1).

Wide and narrow layout as in `softmax.c`, with the same bits in both. `units`: the hidden units and, last, the constant.
The constant's weights in W1 are zero, and so is its error, since 1 - h^2 = 0. Only its h is a special case: it is set
to 1. */

#include <float.h>

#include "products.h"
#include "residuals.h"

#define LN2 0.69314718f
#define LOG2E_TWICE 2.8853900818f

/* tanh, accurate to about three units in the last place: sign(x) (-m) / (2 + m) with m = e^(-2|x|) - 1, computed
without cancellation as 2^n 2^f - 1 = 2^n (2^f - 1) + (2^n - 1). nan stays nan. */
INLINE vector tanh_of(vector x) {
    const vector sign = (vector)((integers)x & (integers)all(-0.0f));
    vector exponent = (vector)((integers)x ^ (integers)sign) * -LOG2E_TWICE;
    exponent = larger(all(LEAST), exponent); /* keeps nan */
    vector whole, f = fraction_of(exponent, &whole);
    vector p = series(multiply_add(all(1.525273e-5f), f, all(SIXTH)), f) * f; /* one more term, as m divides */
    vector m = multiply_add(whole, p, whole - 1.0f);
    return (vector)((integers)(-m / (m + 2.0f)) | (integers)sign);
}

/* Intermediate results of a tile. */
typedef struct {
    float *h, *back;         /* (rows, columns of the units) */
    float *z;                /* (rows, columns of the classes) */
    float *transposed;           /* (units or classes, LANES) */
    float *length, *factor;  /* (rows, LANES or 1); narrow: written LANES rows at a time */
} buffers;

INLINE buffers split_scratch(float *scratch, int64_t units_columns, int64_t classes_columns) {
    float *z = scratch + 2 * TILE * units_columns, *length = z + TILE * classes_columns;
    float *back = scratch + TILE * units_columns, *transposed = length + 2 * TILE * LANES;
    return (buffers){scratch, back, z, transposed, length, length + TILE * LANES};
}

/* The hidden layer of a tile, and its logits in base 2. */
static void forward(const float *x, int64_t rows, int64_t q, int64_t units, int64_t classes, int64_t wide,
                    const float *w1, const float *w2, buffers in) {
    int64_t across = columns_of(units, wide), side_by_side = wide ? LANES : 1;
    logits_of(x, q, rows, q, w1, across, in.h);
    for (int64_t i = 0; i < rows * across; i += WIDTH) store(in.h + i, tanh_of(load(in.h + i)));
    for (int64_t i = 0; i < rows; i++)
        for (int64_t l = 0; l < side_by_side; l++) in.h[i * across + (units - 1) * side_by_side + l] = 1;
    if (wide)
        logits_of_lanes(in.h, rows, units, w2, classes, in.z);
    else
        logits_of(in.h, across, rows, units, w2, columns_of(classes, wide), in.z);
}

/* Sums of squares of LANES columns of numbers, each multiplied by its `scale`. */
INLINE void squares_of(const float *values, int64_t numbers, const float *scale, float *sum) {
    vector acc[VECTORS], by[VECTORS];
    EACH {
        acc[v] = all(0);
        by[v] = load(scale + WIDTH * v);
    }
    for (int64_t j = 0; j < numbers; j++) EACH {
        vector value = load(values + j * LANES + WIDTH * v) * by[v];
        acc[v] = multiply_add(value, value, acc[v]);
    }
    EACH store(sum + WIDTH * v, acc[v]);
}

/* Clipping factors of LANES gradients with squared norm ||x||^2 ||back||^2 + ||h||^2 ||residual||^2. `back` and `h` are
squared norms; `back` includes ||x||, because the square of a small number may underflow. */
INLINE void factors_of(const float *back, const float *h, const float *length, const int step, const float *clip,
                       int64_t automatic, float *factor) {
    EACH {
        vector residual = load(length + WIDTH * v);
        vector whole = multiply_add(load(h + WIDTH * v), residual * residual, load(back + WIDTH * v));
        for (int l = 0; l < WIDTH; l++) whole[l] = sqrtf(whole[l]);
        vector bound = step ? all(*clip) : load(clip + WIDTH * v);
        store(factor + WIDTH * v, clip_factor(bound, whole, automatic));
    }
}

/* Clipped residuals of both layers. `w2_transposed`: W2^T, for the narrow layout. */
static void backward(int64_t rows, int64_t units, int64_t classes, int64_t wide, const float *w2,
                     const float *w2_transposed, row_norms of_rows, const float *clip, int64_t automatic, buffers in) {
    int64_t across = columns_of(units, wide), classes_across = columns_of(classes, wide);
    const float one[LANES] = {[0 ... LANES - 1] = 1};
    float of_back[LANES], of_h[LANES], norms[LANES];
    if (wide)
        back_of_lanes(in.z, rows, units, w2, classes, in.back);
    else
        logits_of(in.z, classes_across, rows, classes, w2_transposed, across, in.back);
    for (int64_t i = 0; i < rows * across; i += WIDTH) { /* W2 is in base 2, hence LN2 */
        vector h = load(in.h + i);
        store(in.back + i, load(in.back + i) * (multiply_add(-h, h, all(1)) * LN2));
    }
    if (wide)
        for (int64_t i = 0; i < rows; i++) {
            float *back = in.back + i * across, *residual = in.z + i * classes_across, *factor = in.factor + i * LANES;
            select_norms(from_row(of_rows, i), 1, 1, norms);
            squares_of(back, units, norms, of_back);
            squares_of(in.h + i * across, units, one, of_h);
            factors_of(of_back, of_h, in.length + i * LANES, 0, clip, automatic, factor);
            for (int64_t j = 0; j < across; j += LANES)
                EACH store(back + j + WIDTH * v, load(back + j + WIDTH * v) * load(factor + WIDTH * v));
            for (int64_t k = 0; k < classes_across; k += LANES)
                EACH store(residual + k + WIDTH * v, load(residual + k + WIDTH * v) * load(factor + WIDTH * v));
        }
    else
        for (int64_t i = 0; i < rows; i += LANES) {
            int64_t some = rows - i < LANES ? rows - i : LANES;
            select_norms(from_row(of_rows, i), 0, some, norms);
            transpose(in.back + i * across, some, units, across, in.transposed);
            squares_of(in.transposed, units, norms, of_back);
            transpose(in.h + i * across, some, units, across, in.transposed);
            squares_of(in.transposed, units, one, of_h);
            factors_of(of_back, of_h, in.length + i, 1, clip, automatic, in.factor + i);
            for (int64_t l = i; l < i + some; l++) {
                for (int64_t j = 0; j < across; j++) in.back[l * across + j] *= in.factor[l];
                for (int64_t k = 0; k < classes_across; k++) in.z[l * classes_across + k] *= in.factor[l];
            }
        }
}

/* ---- exported functions

As in `softmax.c`. `w1` (blocks, clients or 1, q, columns of the units); `w2` (blocks, clients or 1, units, columns of
the classes), for logits in base 2; `w2_transposed` (blocks, clients or 1, classes, columns of the units), narrow only.
`total1` and `total2`: shaped like the weights of every client, initially zero.
`scratch`: TILE * (2 * columns of the units + columns of the classes + 2 * LANES) + max(units, classes) * LANES floats.
*/

void mlp_gradient_sums(const float *x, const float *norm, const int64_t *label, const int64_t *sizes,
                       int64_t norm_columns, int64_t clients, int64_t most, int64_t q, int64_t units, int64_t classes,
                       const float *w1, const float *w2, const float *w2_transposed, int64_t of_client, int64_t blocks,
                       int64_t wide, const float *clip, const int64_t *norm_of_lane, int64_t automatic, double *total1,
                       double *total2, double *loss, double *clipped, float *scratch) {
    int64_t across = columns_of(units, wide), classes_across = columns_of(classes, wide), lanes = wide ? LANES : 1;
    buffers in = split_scratch(scratch, across, classes_across);
    float no_bound[LANES];
    for (int l = 0; l < LANES; l++) no_bound[l] = FLT_MAX;
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t client = 0; client < clients; client++) {
            int64_t which = block * clients + client, whose = of_client ? which : block;
            const float *first_layer = w1 + whose * q * across, *second = w2 + whose * units * classes_across;
            const float *transposed = wide ? 0 : w2_transposed + whose * classes * across;
            double *into1 = total1 + which * q * across, *into2 = total2 + which * units * classes_across;
            lane_sums totals = {0};
            for (int64_t first = 0; first < sizes[client]; first += TILE) {
                int64_t row = client * most + first, left = sizes[client] - first, rows = left < TILE ? left : TILE;
                row_norms norms = {norm + row * norm_columns, norm_columns, norm_of_lane + block * lanes};
                tile_sums of[LANES];
                reset(of);
                forward(x + row * q, rows, q, units, classes, wide, first_layer, second, in);
                residuals_of_tile(in.z, rows, classes, classes_across, wide, label + row, 0, no_bound, 0, in.transposed,
                                  in.length, loss ? of : 0);
                backward(rows, units, classes, wide, second, transposed, norms, clip + block * lanes, automatic, in);
                add_gradient(x + row * q, q, rows, q, in.back, across, into1);
                if (wide)
                    add_gradient_of_lanes(in.h, rows, units, in.z, classes, into2);
                else
                    add_gradient(in.h, across, rows, units, in.z, classes_across, into2);
                if (loss)
                    for (int64_t i = 0; i < rows * lanes; i++) of[i % lanes].clipped += in.factor[i] < 1.0f;
                add_tile(&totals, of);
            }
            if (loss) {
                memcpy(loss + which * lanes, totals.loss, lanes * sizeof *loss);
                memcpy(clipped + which * lanes, totals.clipped, lanes * sizeof *clipped);
            }
        }
}

void mlp_evaluation(const float *x, const int64_t *label, int64_t all_rows, int64_t q, int64_t units, int64_t classes,
                    const float *w1, const float *w2, int64_t blocks, int64_t wide, double *loss, uint8_t *right,
                    float *scratch) {
    int64_t across = columns_of(units, wide), classes_across = columns_of(classes, wide), lanes = wide ? LANES : 1;
    buffers in = split_scratch(scratch, across, classes_across);
    for (int64_t block = 0; block < blocks; block++) {
        lane_sums totals = {0};
        for (int64_t row = 0; row < all_rows; row += TILE) {
            int64_t rows = all_rows - row < TILE ? all_rows - row : TILE;
            tile_sums of[LANES];
            reset(of);
            forward(x + row * q, rows, q, units, classes, wide, w1 + block * q * across,
                    w2 + block * units * classes_across, in);
            evaluate_tile(in.z, rows, classes, classes_across, wide, label + row, in.transposed, of,
                       right + block * lanes * all_rows + row, all_rows);
            add_tile(&totals, of);
        }
        memcpy(loss + block * lanes, totals.loss, lanes * sizeof *loss);
    }
}
