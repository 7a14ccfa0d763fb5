// What a row goes through between the products: norms, rotary embeddings, gates.  Numbers are float32 inside a stage and
// rounded once where it ends.
#pragma once

#include "lanes.h"


// x / sqrt(mean(x^2) + eps) * weight; without a weight the norm is the identity.
struct Norm {
    const float *weight;
    double eps;
};

inline float inverse_length(const bfloat16 *x, long size, double eps) {
    Floats squares = no_floats();
    for (long i = 0; i < size; i += LANES) {
        const Floats part = load(x + i, size - i);
        squares = times_plus(part, part, squares);
    }
    return 1.0f / __builtin_sqrtf(total(squares) / float(size) + float(eps));
}

inline void normalise(Norm norm, const bfloat16 *x, long size, bfloat16 *result) {
    if (!norm.weight) {
        std::memcpy(result, x, 2 * size);
        return;
    }
    const Floats scale = spread(inverse_length(x, size, norm.eps));
    for (long i = 0; i < size; i += LANES) {
        const long left = size - i;
        store(result + i, load(x + i, left) * scale * load(norm.weight + i, left), left);
    }
}

// x += scale * norm(y), the end of a sublayer that norms or scales what it adds.
inline void add(Norm norm, float scale, const bfloat16 *y, long size, bfloat16 *x) {
    const float length = norm.weight ? inverse_length(y, size, norm.eps) : 1.0f;
    for (long i = 0; i < size; i += LANES) {
        const long left = size - i;
        Floats part = load(y + i, left) * spread(length);
        if (norm.weight) part = part * load(norm.weight + i, left);
        store(x + i, times_plus(part, spread(scale), load(x + i, left)), left);
    }
}

// Cosines and signed sines [size] of one row: the sines of the first half are negative.
struct Turn {
    const float *cos, *sin;
    long size;
};

// A head of a query or key: times `length` and the weights of its norm where it has one, its first numbers turned.
inline void turn_head(const bfloat16 *x, const float *weight, float length, Turn turn, long dim, bfloat16 *result) {
    const auto normed = [=](long i, long left) {
        const Floats part = load(x + i, left);
        return weight ? part * spread(length) * load(weight + i, left) : part;
    };
    const long half = turn.size / 2;
    for (long i = 0; i < half; i += LANES) {
        const long left = half - i;
        const Floats a = normed(i, left), b = normed(half + i, left);
        const Floats first = times_plus(b, load(turn.sin + i, left), a * load(turn.cos + i, left));
        const Floats second = times_plus(a, load(turn.sin + half + i, left), b * load(turn.cos + half + i, left));
        store(result + i, first, left);
        store(result + half + i, second, left);
    }
    for (long i = turn.size; i < dim; i += LANES) store(result + i, normed(i, dim - i), dim - i);
}

enum Activation : long { SILU = 0, GELU_TANH = 1 };

// 1 / (1 + e^-x), by the exponential of a number that is not positive.
inline Floats sigmoid(Floats x) {
    const Floats e = exponential(no_floats() - of_bits(magnitude_bits(x)));
    const Floats small = e / (spread(1) + e), large = spread(1) / (spread(1) + e);
    return where_negative(x, small, large);
}

// activation(gate) * up.  The tanh form of gelu is x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)).
inline void gate(Activation activation, const bfloat16 *gates, const bfloat16 *ups, long size, bfloat16 *result) {
    for (long i = 0; i < size; i += LANES) {
        const long left = size - i;
        const Floats x = load(gates + i, left);
        Floats inner = x;
        if (activation == GELU_TANH)
            inner = spread(1.59576912f) * times_plus(spread(0.044715f) * x * x, x, x);
        store(result + i, x * sigmoid(inner) * load(ups + i, left), left);
    }
}
