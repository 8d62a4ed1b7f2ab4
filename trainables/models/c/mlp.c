/* A head with one hidden layer on a CPU, a tile of rows at a time: softmax(h W2), h = (tanh(x W1), 1).

As in `softmax.c` there are a wide and a narrow layout, and a lane has the same bits in either. `units`: the hidden ones
and, as the last, the constant beside them. Its weights in W1 are zero, and since 1 - h^2 is, so is what comes back to
it: nowhere is it a case of its own, but where it is set to 1. */

#include <float.h>

#include "products.h"
#include "residuals.h"

#define LN2 0.69314718f
#define LOG2E_TWICE 2.8853900818f

/* To about three units in the last place. With m = e^(-2|x|) - 1 it is -m / (2 + m), of x's sign; m has no sum that
cancels: 2^n 2^f - 1 = 2^n (2^f - 1) + (2^n - 1). nan stays nan. */
INLINE vector tanh_of(vector x) {
    const vector sign = (vector)((integers)x & (integers)all(-0.0f));
    vector exponent = (vector)((integers)x ^ (integers)sign) * -LOG2E_TWICE;
    exponent = larger(all(LEAST), exponent); /* nan is not below */
    vector whole, f = fraction_of(exponent, &whole);
    vector p = series(multiply_add(all(1.525273e-5f), f, all(SIXTH)), f) * f; /* a term more: it is divided by */
    vector m = multiply_add(whole, p, whole - 1.0f);
    return (vector)((integers)(-m / (m + 2.0f)) | (integers)sign);
}

/* A layer's inputs and outputs of a tile. */
typedef struct {
    float *h, *back;         /* (rows, columns of the units) */
    float *z;                /* (rows, columns of the classes) */
    float *turned;           /* (units or classes, LANES) */
    float *length, *factor;  /* (rows, LANES or one); the latter in groups of LANES rows, which are written whole */
} room;

INLINE room laid_out(float *scratch, int64_t units_columns, int64_t classes_columns) {
    float *z = scratch + 2 * TILE * units_columns, *length = z + TILE * classes_columns;
    return (room){scratch, scratch + TILE * units_columns, z, length + 2 * TILE * LANES, length, length + TILE * LANES};
}

/* Logits to base 2 of a tile, and the hidden layer. */
static void forward(const float *x, int64_t rows, int64_t q, int64_t units, int64_t classes, int64_t wide,
                    const float *w1, const float *w2, room in) {
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

/* The sum of squares of LANES columns of so many numbers, each times the row's `scale` (of LANES rows with step 1). */
INLINE void squares_of(const float *values, int64_t numbers, const float *scale, const int step, float *sum) {
    vector found[VECTORS], by[VECTORS];
    EACH {
        found[v] = all(0);
        by[v] = step ? load(scale + WIDTH * v) : all(*scale);
    }
    for (int64_t j = 0; j < numbers; j++) EACH {
        vector value = load(values + j * LANES + WIDTH * v) * by[v];
        found[v] = multiply_add(value, value, found[v]);
    }
    EACH store(sum + WIDTH * v, found[v]);
}

/* What clips LANES gradients, whose squared length is ||x||^2 ||back||^2 + ||h||^2 ||residual||^2. `back` and `h`: what
belongs to each layer, squared; the first with the row's norm in it, for the square of a small number may be nothing. */
INLINE void factors_of(const float *back, const float *h, const float *length, const int step, const float *clip,
                       int64_t automatic, float *factor) {
    EACH {
        vector residual = load(length + WIDTH * v);
        vector whole = multiply_add(load(h + WIDTH * v), residual * residual, load(back + WIDTH * v));
        for (int l = 0; l < WIDTH; l++) whole[l] = sqrtf(whole[l]);
        vector bound = step ? all(*clip) : load(clip + WIDTH * v);
        store(factor + WIDTH * v, brought_to(bound, whole, automatic));
    }
}

/* Residuals to clipped ones, in both layers. `w2_turned`: W2^T, for the narrow layout. */
static void backward(int64_t rows, int64_t units, int64_t classes, int64_t wide, const float *w2,
                     const float *w2_turned, const float *norm, const float *clip, int64_t automatic, room in) {
    int64_t across = columns_of(units, wide), classes_across = columns_of(classes, wide);
    const float one[LANES] = {[0 ... LANES - 1] = 1};
    float of_back[LANES], of_h[LANES];
    if (wide)
        back_of_lanes(in.z, rows, units, w2, classes, in.back);
    else
        logits_of(in.z, classes_across, rows, classes, w2_turned, across, in.back);
    for (int64_t i = 0; i < rows * across; i += WIDTH) { /* W2 is to base 2, hence the logarithm */
        vector h = load(in.h + i);
        store(in.back + i, load(in.back + i) * (multiply_add(-h, h, all(1)) * LN2));
    }
    if (wide)
        for (int64_t i = 0; i < rows; i++) {
            float *back = in.back + i * across, *residual = in.z + i * classes_across, *factor = in.factor + i * LANES;
            squares_of(back, units, norm + i, 0, of_back);
            squares_of(in.h + i * across, units, one, 0, of_h);
            factors_of(of_back, of_h, in.length + i * LANES, 0, clip, automatic, factor);
            for (int64_t j = 0; j < across; j += LANES)
                EACH store(back + j + WIDTH * v, load(back + j + WIDTH * v) * load(factor + WIDTH * v));
            for (int64_t k = 0; k < classes_across; k += LANES)
                EACH store(residual + k + WIDTH * v, load(residual + k + WIDTH * v) * load(factor + WIDTH * v));
        }
    else
        for (int64_t i = 0; i < rows; i += LANES) {
            int64_t some = rows - i < LANES ? rows - i : LANES;
            float norms[LANES];
            for (int64_t l = 0; l < LANES; l++) norms[l] = l < some ? norm[i + l] : 1;
            turn(in.back + i * across, some, units, across, in.turned);
            squares_of(in.turned, units, norms, 1, of_back);
            turn(in.h + i * across, some, units, across, in.turned);
            squares_of(in.turned, units, one, 1, of_h);
            factors_of(of_back, of_h, in.length + i, 1, clip, automatic, in.factor + i);
            for (int64_t l = i; l < i + some; l++) {
                for (int64_t j = 0; j < across; j++) in.back[l * across + j] *= in.factor[l];
                for (int64_t k = 0; k < classes_across; k++) in.z[l * classes_across + k] *= in.factor[l];
            }
        }
}

/* ---- what is called

As in `softmax.c`. `w1` (blocks, clients or one, q, columns of the units), `w2` (blocks, clients or one, units, columns
of the classes), its logits to base 2; `w2_turned`, for the narrow layout, (…, classes, columns of the units).
`total1` and `total2` as the weights, zero before.
`scratch`: TILE rows of twice the units' columns, the classes' columns and 2 LANES; LANES of the units or classes. */

void mlp_gradient_sums(const float *x, const float *norm, const int64_t *label, const int64_t *sizes, int64_t clients,
                       int64_t most, int64_t q, int64_t units, int64_t classes, const float *w1, const float *w2,
                       const float *w2_turned, int64_t of_client, int64_t blocks, int64_t wide, const float *clip,
                       int64_t automatic, double *total1, double *total2, double *loss, double *clipped,
                       float *scratch) {
    int64_t across = columns_of(units, wide), classes_across = columns_of(classes, wide), lanes = wide ? LANES : 1;
    room in = laid_out(scratch, across, classes_across);
    float no_bound[LANES];
    for (int l = 0; l < LANES; l++) no_bound[l] = FLT_MAX;
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t client = 0; client < clients; client++) {
            int64_t which = block * clients + client, whose = of_client ? which : block;
            const float *first_layer = w1 + whose * q * across, *second = w2 + whose * units * classes_across;
            const float *turned = wide ? 0 : w2_turned + whose * classes * across;
            double *into1 = total1 + which * q * across, *into2 = total2 + which * units * classes_across;
            sums of_all = {0};
            for (int64_t first = 0; first < sizes[client]; first += TILE) {
                int64_t row = client * most + first, left = sizes[client] - first, rows = left < TILE ? left : TILE;
                account of[LANES];
                begin(of);
                forward(x + row * q, rows, q, units, classes, wide, first_layer, second, in);
                residuals_of_tile(in.z, rows, classes, classes_across, wide, label + row, 0, no_bound, 0, in.turned,
                                  in.length, loss ? of : 0);
                backward(rows, units, classes, wide, second, turned, norm + row, clip + block * lanes, automatic, in);
                add_gradient(x + row * q, q, rows, q, in.back, across, into1);
                if (wide)
                    add_gradient_of_lanes(in.h, rows, units, in.z, classes, into2);
                else
                    add_gradient(in.h, across, rows, units, in.z, classes_across, into2);
                if (loss)
                    for (int64_t i = 0; i < rows * lanes; i++) of[i % lanes].clipped += in.factor[i] < 1.0f;
                add_account(&of_all, of);
            }
            if (loss) {
                memcpy(loss + which * lanes, of_all.loss, lanes * sizeof *loss);
                memcpy(clipped + which * lanes, of_all.clipped, lanes * sizeof *clipped);
            }
        }
}

void mlp_evaluation(const float *x, const int64_t *label, int64_t all_rows, int64_t q, int64_t units, int64_t classes,
                    const float *w1, const float *w2, int64_t blocks, int64_t wide, double *loss, uint8_t *right,
                    float *scratch) {
    int64_t across = columns_of(units, wide), classes_across = columns_of(classes, wide), lanes = wide ? LANES : 1;
    room in = laid_out(scratch, across, classes_across);
    for (int64_t block = 0; block < blocks; block++) {
        sums of_all = {0};
        for (int64_t row = 0; row < all_rows; row += TILE) {
            int64_t rows = all_rows - row < TILE ? all_rows - row : TILE;
            account of[LANES];
            begin(of);
            forward(x + row * q, rows, q, units, classes, wide, w1 + block * q * across,
                    w2 + block * units * classes_across, in);
            judge_tile(in.z, rows, classes, classes_across, wide, label + row, in.turned, of,
                       right + block * lanes * all_rows + row, all_rows);
            add_account(&of_all, of);
        }
        memcpy(loss + block * lanes, of_all.loss, lanes * sizeof *loss);
    }
}
