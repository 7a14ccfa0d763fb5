// A product of some rows by one weight of any kind.

#include "linear.h"
#include "memory.h"

namespace {

constexpr long OWN_ROWS = 32;  // so few rows each thread turns into bytes for itself: sooner done than sent between cores

// Weights that one thread multiplies before a second has woken up.
long one_thread(Kind kind) { return kind == BFLOAT16 ? 1 << 15 : 1 << 16; }

thread_local Kept kept;

}  // namespace

// result [rows, out] = x [rows, in] weight^T (+ bias) (+ residual [rows, out]).  `stride`, the numbers from one row of x to
// the next, is even.  `failed` becomes 1 where there is not enough memory.
extern "C" void linear_product(const Linear *linear, bfloat16 *x, long rows, long stride, const bfloat16 *residual,
                               bfloat16 *result, long *failed) {
    const bool own = linear->kind == BYTES && rows <= OWN_ROWS;
    const long slab = (prepared_bytes(*linear, rows) + 63) / 64 * 64, size = slab * (own ? omp_get_max_threads() : 1);
    char *const work = kept.of(size);
    *failed = size && !work;
    if (*failed) return;
    const Product alone = {linear, 1, nullptr};
#pragma omp parallel if (linear->in * linear->out > one_thread(Kind(linear->kind)))
    {
        const long thread = omp_get_thread_num(), threads = omp_get_num_threads();
        const Inputs inputs = {x, stride, rows, work + (own ? thread * slab : 0), slab};
        for (long row = own ? 0 : thread; row < rows; row += own ? 1 : threads) alone.prepare_row(inputs, row);
        if (!own) {
#pragma omp barrier
        }
        alone.run(inputs, {result, residual, linear->out}, thread, threads);
    }
}
