// The likeliest tokens of a row of logits.
#pragma once

#include <cmath>

#include "lanes.h"

// How many of them, the scale of the logits, and where they go: log-probabilities [rows, count] and places
// [rows, count], largest first; of equal ones the first place.  Missing ones are -inf.
struct Best {
    long count;
    double scale;
    float *values;
    std::int32_t *places;
};

// One more candidate among `held` ones, which are in order.
inline long inserted(float value, std::int32_t place, long held, long count, float *values, std::int32_t *places) {
    if (held == count) held--;
    long at = held;
    for (; at > 0 && values[at - 1] < value; at--) {
        values[at] = values[at - 1];
        places[at] = places[at - 1];
    }
    values[at] = value;
    places[at] = place;
    return held + 1;
}

// Of logits [size], whose row is the `row`-th.  What is summed does not depend on what else is in the call.
inline void choose(const Best &best, const bfloat16 *logits, long size, long row) {
    constexpr long STEP = 4 * LANES;
    const float none = -__builtin_inff();
    float *values = best.values + row * best.count;
    std::int32_t *places = best.places + row * best.count;
    long held = 0;
    float least = none;
    for (long from = 0; from < size; from += STEP) {
        Floats top = spread(none);
        for (long i = from; i < from + STEP && i < size; i += LANES)
            top = larger(first_of(load(logits + i, size - i), size - i, spread(none)), top);
        if (!(largest(top) > least)) continue;
        for (long place = from; place < from + STEP && place < size; place++) {
            const float value = widened(logits[place]);
            if (!(value > least)) continue;
            held = inserted(value, std::int32_t(place), held, best.count, values, places);
            if (held == best.count) least = values[held - 1];
        }
    }
    const float scale = float(best.scale), most = held ? values[0] : 0;
    Floats sums = no_floats();
    for (long from = 0; from < size; from += LANES) {
        const long left = size - from;
        const Floats part = exponential((load(logits + from, left) - spread(most)) * spread(scale));
        sums = sums + first_of(part, left, no_floats());
    }
    const float all = std::log(total(sums));
    for (long i = 0; i < best.count; i++) {
        values[i] = i < held ? (values[i] - most) * scale - all : none;
        if (i >= held) places[i] = 0;
    }
}
