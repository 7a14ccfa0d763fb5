// What a row goes through between the products: norms, rotary embeddings, gates.  Numbers are float32 inside a stage and
// rounded once where it ends.
#pragma once

#include "vectors.h"

// x / sqrt(mean(x^2) + eps) * weight; without a weight the norm is the identity.
struct Norm {
    const float *weight;
    double eps;
};

VECTORS inline float inverse_length(const bfloat16 *x, long size, double eps) {
    Floats squares = Floats::of(0);
    for (long i = 0; i < size; i += 16) {
        const Floats part = Floats::load(x + i, size - i);
        squares = multiply_add(part, part, squares);
    }
    return 1.0f / __builtin_sqrtf(squares.sum() / float(size) + float(eps));
}

VECTORS inline void normalise(Norm norm, const bfloat16 *x, long size, bfloat16 *result) {
    if (!norm.weight) {
        std::memcpy(result, x, 2 * size);
        return;
    }
    const Floats scale = Floats::of(inverse_length(x, size, norm.eps));
    for (long i = 0; i < size; i += 16) {
        const long left = size - i;
        (Floats::load(x + i, left) * scale * Floats::load(norm.weight + i, left)).store(result + i, left);
    }
}

// x += scale * norm(y), the end of a sublayer that norms or scales what it adds.
VECTORS inline void add(Norm norm, float scale, const bfloat16 *y, long size, bfloat16 *x) {
    const float length = norm.weight ? inverse_length(y, size, norm.eps) : 1.0f;
    for (long i = 0; i < size; i += 16) {
        const long left = size - i;
        Floats part = Floats::load(y + i, left) * Floats::of(length);
        if (norm.weight) part = part * Floats::load(norm.weight + i, left);
        multiply_add(part, Floats::of(scale), Floats::load(x + i, left)).store(x + i, left);
    }
}

// Cosines and signed sines [size] of one row: the sines of the first half are negative.
struct Turn {
    const float *cos, *sin;
    long size;
};

// A head of a query or key: times `length` and the weights of its norm where it has one, its first numbers turned.
VECTORS inline void turn_head(const bfloat16 *x, const float *weight, float length, Turn turn, long dim,
                              bfloat16 *result) {
    const auto normed = [=](long i, long left) VECTORS {
        const Floats part = Floats::load(x + i, left);
        return weight ? part * Floats::of(length) * Floats::load(weight + i, left) : part;
    };
    const long half = turn.size / 2;
    for (long i = 0; i < half; i += 16) {
        const long left = half - i;
        const Floats a = normed(i, left), b = normed(half + i, left);
        const Floats first = multiply_add(b, Floats::load(turn.sin + i, left), a * Floats::load(turn.cos + i, left));
        const Floats second =
            multiply_add(a, Floats::load(turn.sin + half + i, left), b * Floats::load(turn.cos + half + i, left));
        first.store(result + i, left);
        second.store(result + half + i, left);
    }
    for (long i = turn.size; i < dim; i += 16) normed(i, dim - i).store(result + i, dim - i);
}

enum Activation : long { SILU = 0, GELU_TANH = 1 };

// 1 / (1 + e^-x), by the exponential of a number that is not positive.
VECTORS inline Floats sigmoid(Floats x) {
    const Floats e = {exponential(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(x.all)))};
    const Floats small = e / (Floats::of(1) + e), large = Floats::of(1) / (Floats::of(1) + e);
    return {_mm512_mask_mov_ps(large.all, _mm512_cmp_ps_mask(x.all, _mm512_setzero_ps(), _CMP_LT_OQ), small.all)};
}

// activation(gate) * up.  The tanh form of gelu is x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)).
VECTORS inline void gate(Activation activation, const bfloat16 *gates, const bfloat16 *ups, long size, bfloat16 *result) {
    for (long i = 0; i < size; i += 16) {
        const long left = size - i;
        const Floats x = Floats::load(gates + i, left);
        Floats inner = x;
        if (activation == GELU_TANH)
            inner = Floats::of(1.59576912f) * multiply_add(Floats::of(0.044715f) * x * x, x, x);
        (x * sigmoid(inner) * Floats::load(ups + i, left)).store(result + i, left);
    }
}
