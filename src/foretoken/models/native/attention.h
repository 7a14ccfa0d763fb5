// Attention of one row and head over the slots that it sees.
#pragma once

#include "vectors.h"

// Keys or values of one head: slots are `stride` numbers apart.
struct Slots {
    const bfloat16 *start;
    long stride;

    const bfloat16 *operator[](long slot) const { return start + slot * stride; }
};

// Slots that a row sees, and how many: those where its mask is zero, all without a mask.  `seen` holds 16 more.
long listed(const bfloat16 *mask, long slots, std::int32_t *seen);

// result [size] of a query [size], 32, 64, 96, 128 or 256 numbers.  `weights` holds count + 16 numbers.
void attend(const bfloat16 *query, Slots keys, Slots values, const std::int32_t *seen, long count, long size, float scale,
            float *weights, bfloat16 *result);
