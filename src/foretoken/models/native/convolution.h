// Convolutions over the rows of a sequence whose kernels follow the rows (DFlash2).
#pragma once

#include "linear.h"

// A channel c of row r becomes the sum over t of (base[side, t, c] + kernels[r, side, t, c / group]) times the channel of
// row r - t.  Groups are whole vectors.
struct Convolution {
    Product kernels;            // of the normed input of the sublayer; no parts: there is no convolution
    const float *base;          // [2, taps, width]: in front of the sublayer, and behind it
    long taps, group;

    // LANES channels, from `from` on, of a row x with `before` rows of its sequence in front of it, `stride` apart; `moving`
    // are the kernels of the row.
    Floats at(long side, const bfloat16 *moving, long before, long width, long from, const bfloat16 *x, long stride) const {
        const long groups = width / group, count = before + 1 < taps ? before + 1 : taps;
        Floats sum = no_floats();
        for (long tap = 0; tap < count; tap++) {
            const long place = side * taps + tap;
            const Floats kernel = load(base + place * width + from, LANES)
                                + spread(widened(moving[place * groups + from / group]));
            sum = times_plus(kernel, load(x - tap * stride + from, LANES), sum);
        }
        return sum;
    }
};
