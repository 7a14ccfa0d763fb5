// Products with activations of 8 bits, see integers8.h.

#include "integers8.h"
#include "integers8_amx.h"

using namespace lanes::integers8;

namespace {

constexpr long ONE_THREAD = 1 << 16;  // weights that one thread multiplies before a second has woken up
constexpr long OWN_ROWS = 32;  // so few rows each thread turns into bytes for itself: sooner done than sent between cores

}

long prepared_bytes8(long rows, long in) { return Activations::num_bytes(rows, in); }

void prepare_integers8(const Linear &linear, const Inputs &x, long row) {
    Activations(x.prepared, x.count, linear.in).fill(x.rows + row * x.stride, row);
}

void multiply_integers8(const Linear &linear, const Inputs &x, const Outputs &y, long from, long to) {
    const Activations inputs(x.prepared, x.count, linear.in);
    const Weight weight(linear);
#if defined(__AMX_INT8__)
    if (takes_amx(x.count, weight)) return multiply_amx(inputs, x.count, weight, linear.bias, y, from, to);
#endif
    multiply(inputs, x.count, weight, linear.bias, y, from, to);
}

// result [rows, out] = x [rows, in] weight^T (+ bias).  x is `stride` numbers from row to row; `work` has
// Activations::num_bytes, for each thread where there are at most OWN_ROWS.
extern "C" void integer8_product(const Linear *linear, bfloat16 *x, long rows, long stride, bfloat16 *result, char *work) {
    const bool own = rows <= OWN_ROWS;
#pragma omp parallel if (linear->in * linear->out > ONE_THREAD)
    {
        const long thread = omp_get_thread_num(), threads = omp_get_num_threads(), blocks = linear->blocks();
        Inputs inputs = {x, stride, rows, work, 0};
        if (own) inputs.prepared += thread * prepared_bytes8(rows, linear->in);
        for (long row = own ? 0 : thread; row < rows; row += own ? 1 : threads) prepare_integers8(*linear, inputs, row);
        if (!own) {
#pragma omp barrier
        }
        const long from = blocks * thread / threads, to = blocks * (thread + 1) / threads;
        multiply_integers8(*linear, inputs, {result, nullptr, linear->out}, from, to);
    }
}
