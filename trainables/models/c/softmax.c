/* The softmax head on a CPU: logits, clipped residuals and their gradient, a tile of rows at a time, in cache.

Two layouts. Wide: LANES lanes side by side, a row's classes one after the other, each as LANES neighbouring floats.
Narrow: a single lane, a row's classes side by side, filled up to whole vectors; its softmax runs over LANES rows at a
time. Whichever a lane is computed in, and in whose company, its numbers are the same to the last bit: every logit is
one chain of multiply-adds over the features, every gradient one over the rows of a tile, whose sums are added in double
precision; and everything between is arithmetic of a number with itself, in one function for both layouts. */

#include "products.h"
#include "residuals.h"

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
    int64_t columns = columns_of(classes, wide), lanes = wide ? LANES : 1;
    float *z = scratch, *turned = scratch + TILE * columns;
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t client = 0; client < clients; client++) {
            int64_t which = block * clients + client;
            const float *weights = w + (of_client ? which : block) * q * columns;
            sums of_all = {0};
            for (int64_t first = 0; first < sizes[client]; first += TILE) {
                int64_t row = client * most + first, left = sizes[client] - first, rows = left < TILE ? left : TILE;
                account of[LANES];
                begin(of);
                logits_of(x + row * q, q, rows, q, weights, columns, z);
                residuals_of_tile(z, rows, classes, columns, wide, label + row, norm + row, clip + block * lanes,
                                  automatic, turned, 0, loss ? of : 0);
                add_gradient(x + row * q, q, rows, q, z, columns, total + which * q * columns);
                add_account(&of_all, of);
            }
            if (loss) {
                memcpy(loss + which * lanes, of_all.loss, lanes * sizeof *loss);
                memcpy(clipped + which * lanes, of_all.clipped, lanes * sizeof *clipped);
            }
        }
}

/* Rows of one shard. `loss` (blocks, LANES or one): sums to base 2. `right` (blocks, LANES or one, rows). */
void evaluation(const float *x, const int64_t *label, int64_t all_rows, int64_t q, int64_t classes, const float *w,
                int64_t blocks, int64_t wide, double *loss, uint8_t *right, float *scratch) {
    int64_t columns = columns_of(classes, wide), lanes = wide ? LANES : 1;
    float *z = scratch, *turned = scratch + TILE * columns;
    for (int64_t block = 0; block < blocks; block++) {
        sums of_all = {0};
        for (int64_t row = 0; row < all_rows; row += TILE) {
            int64_t rows = all_rows - row < TILE ? all_rows - row : TILE;
            account of[LANES];
            begin(of);
            logits_of(x + row * q, q, rows, q, w + block * q * columns, columns, z);
            judge_tile(z, rows, classes, columns, wide, label + row, turned, of, right + block * lanes * all_rows + row,
                       all_rows);
            add_account(&of_all, of);
        }
        memcpy(loss + block * lanes, of_all.loss, lanes * sizeof *loss);
    }
}
