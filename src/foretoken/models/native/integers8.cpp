// Products with activations of 8 bits, see integers8.h.

#include "integers8.h"
#include "integers8_amx.h"

using namespace lanes::integers8;

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
