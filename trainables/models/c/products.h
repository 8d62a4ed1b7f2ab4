/* Matrix products of a tile of rows. */

#ifndef PRODUCTS_H
#define PRODUCTS_H

#include "vectors.h"

/* z (rows, columns) = x (rows, q) w (q, columns). Rows of x are `x_row` floats apart. */
void logits_of(const float *x, int64_t x_row, int64_t rows, int64_t q, const float *w, int64_t columns, float *z);

/* Features whose weights are used at a time. */
#define PART 256

/* total (q, columns) += x^T residuals (rows, columns), a tile of TILE rows after the other. At most one tile; with more
than PART features at most GROUP tiles, which is faster, because large totals stay in the cache in between. */
void add_gradient(const float *x, int64_t x_row, int64_t rows, int64_t q, const float *residuals, int64_t columns,
                  double *total);

/* The same with a different x per lane: h (rows, units, LANES), w (units, classes, LANES). */
void logits_of_lanes(const float *h, int64_t rows, int64_t units, const float *w, int64_t classes, float *z);
void add_gradient_of_lanes(const float *h, int64_t rows, int64_t units, const float *residuals, int64_t classes,
                           double *total);

/* back (rows, units, LANES) = residuals (rows, classes, LANES) w^T */
void back_of_lanes(const float *residuals, int64_t rows, int64_t units, const float *w, int64_t classes, float *back);

#endif
