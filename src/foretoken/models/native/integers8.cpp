// Products with activations of 8 bits, see integers8.h.

#include "integers8.h"

// OpenMP's library is PyTorch's own, which is loaded already: two of them would have two pools of threads.
extern "C" int omp_get_thread_num(void);
extern "C" int omp_get_num_threads(void);

using namespace lanes::integers8;
using lanes::bfloat16;

namespace {

constexpr long ONE_THREAD = 1 << 16;  // weights that one thread multiplies before a second has woken up
constexpr long OWN_ROWS = 32;  // so few rows each thread turns into bytes for itself: sooner done than sent between cores

}

// result [rows, out] = x [rows, in] weight^T with weights in `bits` 8 or 4.  x is `stride` numbers from row to row, `in`
// a multiple of 8 and in 4 bits of `group`, a multiple of 32; `work` has Activations::num_bytes, for each thread where
// there are at most OWN_ROWS.
extern "C" void integer8_product(const bfloat16 *x, long rows, long in, long stride, const std::uint8_t *packed, long bits,
                                 long group, const bfloat16 *scales, long out, bfloat16 *result, char *work) {
    const Weight weight = {packed, scales, bits, group, out, in};
    const bool own = rows <= OWN_ROWS;
#pragma omp parallel if (in * out > ONE_THREAD)
    {
        const long thread = omp_get_thread_num(), threads = omp_get_num_threads(), blocks = weight.num_blocks();
        const Activations activations(work + (own ? thread * Activations::num_bytes(rows, in) : 0), rows, in);
        fill(x, rows, stride, activations, own ? 0 : thread, own ? 1 : threads);
        if (!own) {
#pragma omp barrier
        }
        const long from = blocks * thread / threads, to = blocks * (thread + 1) / threads;
        multiply(activations, rows, weight, {result, out}, from, to);
    }
}
