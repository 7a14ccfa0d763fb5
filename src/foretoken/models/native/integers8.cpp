// Products with activations of 8 bits, see integers8.h.

#include "integers8.h"

// OpenMP's library is PyTorch's own, which is loaded already: two of them would have two pools of threads.
extern "C" int omp_get_thread_num(void);
extern "C" int omp_get_num_threads(void);

namespace {

constexpr long ONE_THREAD = 1 << 16;  // weights that one thread multiplies before a second has woken up

}

// result [rows, out] = x [rows, in] weight^T with weights in `bits` 8 or 4.  x is `stride` numbers from row to row, `in`
// a multiple of 8 and in 4 bits of `group`, a multiple of 32; `work` has Activations::num_bytes.
extern "C" void integer8_product(const bfloat16 *x, long rows, long in, long stride, const std::uint8_t *weight, long bits,
                             long group, const bfloat16 *scales, long out, bfloat16 *result, char *work) {
    const integers8::Activations activations(work, rows, in);
    const integers8::Weight matrix = {weight, scales, bits, group, out, in};
#pragma omp parallel if (in * out > ONE_THREAD)
    {
        const long thread = omp_get_thread_num(), threads = omp_get_num_threads();
        integers8::fill(x, rows, stride, activations, thread, threads);
#pragma omp barrier
        integers8::multiply(activations, rows, matrix, result, thread, threads);
    }
}
