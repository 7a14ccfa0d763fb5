// Attention of a row over the slots that it sees.
#pragma once

#include "lanes.h"

// Keys or values of one head: slots are `stride` numbers apart.
struct Slots {
    const bfloat16 *start;
    long stride;

    const bfloat16 *operator[](long slot) const { return start + slot * stride; }
};

// Slots that a row sees, and how many: those where its mask is zero, all without a mask.  `seen` holds 16 more.
long listed(const bfloat16 *mask, long slots, std::int32_t *seen);

constexpr long HEADS_AT_ONCE = 3;  // as many sums as registers hold, of heads of 128 numbers

// result [heads, size] of up to HEADS_AT_ONCE queries [size], 32, 64, 96, 128 or 256 numbers, that are `stride` apart and
// share keys and values.  `weights` holds heads times count + 16 numbers.
void attend(const bfloat16 *query, long stride, long heads, Slots keys, Slots values, const std::int32_t *seen,
            long count, long size, float scale, float *weights, bfloat16 *result);
