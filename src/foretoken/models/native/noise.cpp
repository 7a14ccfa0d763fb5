// The noise of a position of a seed, of all tokens or of some.

#include "noise.h"

using namespace noise;

// The exponential numbers [size] of a position, -log of uniform ones.
extern "C" void exponentials(const Place *place, long size, double *result) {
#pragma omp parallel for if (size > ONE_THREAD)
    for (long from = 0; from < size; from += PIECE) {
        const long to = size - from < PIECE ? size : from + PIECE;
        for (long i = from; i < to; i += 4) {
            const Words words = place->words(i / 4);
            for (long j = 0; j < 4 && i + j < to; j++) result[i + j] = uniform(words.at[j]);
        }
        for (long i = from; i < to; i++) result[i] = negative_log(result[i]);
    }
}

// Those of some tokens [count] in order.
extern "C" void exponentials_of(const Place *place, const std::int64_t *tokens, long count, double *result) {
    long block = -1;
    Words words;
    for (long i = 0; i < count; i++) {
        if (tokens[i] / 4 != block) words = place->words(block = tokens[i] / 4);
        result[i] = negative_log(uniform(words.at[tokens[i] % 4]));
    }
}

// -log of positive numbers [size], in their place.
extern "C" void negative_logs(double *numbers, long size) {
#pragma omp parallel for if (size > ONE_THREAD)
    for (long i = 0; i < size; i++) numbers[i] = negative_log(numbers[i]);
}
