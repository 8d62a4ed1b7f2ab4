/* The softmax head on a CPU: logits, clipped residuals and gradient, one tile of rows (in cache) at a time.

Two layouts. Wide: LANES lanes interleaved; a row is (classes, LANES). Narrow: a single lane; a row is its classes,
padded to whole vectors, and softmaxes are computed for LANES rows at a time. A lane has the same bits in both layouts
and whatever the other lanes are: every logit is one chain of multiply-adds over the features, every gradient one over
the rows of a tile, tiles are added in double precision, and the elementwise part is one function for both layouts. */

#include "products.h"
#include "residuals.h"

/* ---- exported functions

`x` (clients, most, q), `label` (clients, most), `sizes` (clients): rows without padding.
`norm` (clients, most, norm_columns); `norm_of_lane` (blocks, LANES or 1): the column of `norm` that a lane uses.
`w` (blocks, clients or 1, q, columns), for logits in base 2; `of_client`: whether clients have different weights.
`wide`: columns are (classes, LANES) and `clip` is (blocks, LANES); else columns are classes, padded with zeros to whole
vectors, and `clip` is (blocks). `automatic`: automatic clipping.
`total` (blocks, clients, q, columns), initially zero. `loss`, `clipped`: (blocks, clients, LANES or 1), or null.
`scratch`: GROUP * TILE * columns + classes * LANES floats. */

int64_t vector_width(void) { return WIDTH; }

void gradient_sums(const float *x, const float *norm, const int64_t *label, const int64_t *sizes, int64_t norm_columns,
                   int64_t clients, int64_t most, int64_t q, int64_t classes, const float *w, int64_t of_client,
                   int64_t blocks, int64_t wide, const float *clip, const int64_t *norm_of_lane, int64_t automatic,
                   double *total, double *loss, double *clipped, float *scratch) {
    int64_t columns = columns_of(classes, wide), lanes = wide ? LANES : 1, most_rows = q > PART ? GROUP * TILE : TILE;
    float *z = scratch, *transposed = scratch + GROUP * TILE * columns;
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t client = 0; client < clients; client++) {
            int64_t which = block * clients + client;
            const float *weights = w + (of_client ? which : block) * q * columns;
            lane_sums totals = {0};
            for (int64_t first = 0, rows; first < sizes[client]; first += rows) {
                rows = sizes[client] - first < most_rows ? sizes[client] - first : most_rows;
                const float *mine = x + (client * most + first) * q;
                logits_of(mine, q, rows, q, weights, columns, z);
                for (int64_t tile = 0; tile < rows; tile += TILE) {
                    int64_t row = client * most + first + tile, some = rows - tile < TILE ? rows - tile : TILE;
                    row_norms norms = {norm + row * norm_columns, norm_columns, norm_of_lane + block * lanes};
                    tile_sums of[LANES];
                    reset(of);
                    residuals_of_tile(z + tile * columns, some, classes, columns, wide, label + row, &norms,
                                      clip + block * lanes, automatic, transposed, 0, loss ? of : 0);
                    add_tile(&totals, of);
                }
                add_gradient(mine, q, rows, q, z, columns, total + which * q * columns);
            }
            if (loss) {
                memcpy(loss + which * lanes, totals.loss, lanes * sizeof *loss);
                memcpy(clipped + which * lanes, totals.clipped, lanes * sizeof *clipped);
            }
        }
}

/* Rows of one shard. `loss` (blocks, LANES or 1): sums in base 2. `right` (blocks, LANES or 1, rows). */
void evaluation(const float *x, const int64_t *label, int64_t all_rows, int64_t q, int64_t classes, const float *w,
                int64_t blocks, int64_t wide, double *loss, uint8_t *right, float *scratch) {
    int64_t columns = columns_of(classes, wide), lanes = wide ? LANES : 1;
    float *z = scratch, *transposed = scratch + TILE * columns;
    for (int64_t block = 0; block < blocks; block++) {
        lane_sums totals = {0};
        for (int64_t row = 0; row < all_rows; row += TILE) {
            int64_t rows = all_rows - row < TILE ? all_rows - row : TILE;
            tile_sums of[LANES];
            reset(of);
            logits_of(x + row * q, q, rows, q, w + block * q * columns, columns, z);
            evaluate_tile(z, rows, classes, columns, wide, label + row, transposed, of,
                          right + block * lanes * all_rows + row, all_rows);
            add_tile(&totals, of);
        }
        memcpy(loss + block * lanes, totals.loss, lanes * sizeof *loss);
    }
}
