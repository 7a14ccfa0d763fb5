// A linear layer as the forward multiplies by it, whatever its weights are stored in.
//
// All functions are called by every thread of a parallel region and do their share.  A new kind of weights is one more
// case in `prepared_bytes`, `prepare` and `multiply`.
#pragma once

#include "lanes.h"

constexpr long WIDTH = 32;          // outputs that are stored together: two registers of sums
constexpr long BYTES_AHEAD = 3072;  // not every CPU looks for weights so far ahead, and none behind a tile of several rows

// Asks for `bytes` of weights ahead of their turn.
inline void fetch_ahead(const void *weight, long bytes, long ahead = BYTES_AHEAD) {
    UNROLL for (long line = 0; line < bytes; line += 64) __builtin_prefetch((const char *)weight + ahead + line);
}

// Weights that several passes over others ask for, `bytes` with every step, so that none of them waits for memory.
struct Ahead {
    const char *at;
    long bytes;

    void fetch() {
        __builtin_prefetch(at, 0, 2);
        at += bytes;
    }
};

// Weights in 8 and 4 bits multiply activations of 15 bits, those of the last kind activations of 8.
enum Kind : long { BFLOAT16 = 0, EIGHT = 1, FOUR = 2, BYTES = 3 };

// How scales lie, for WIDTH outputs side by side.
enum Form : long {
    PER_ROW = 0, // bfloat16 [WIDTH]: one for each output
    PAIRS = 1,   // bfloat16 [in / group][2][WIDTH], scales and zeros
    HALVES = 2,  // float16 [in / group][1 or 2][WIDTH]
    STEPS = 3,   // float16 [in / 256][1 or 2][WIDTH], each times a step, signed bytes [in / group][1 or 2][WIDTH]
};

struct Linear {
    long kind;
    long in, out;
    long group;          // inputs that share a scale
    const void *weight;  // as native/bfloat16.py and native/integers.py lay it out
    const void *scales;  // null for bfloat16
    const float *bias;   // [out] or null
    // Of BYTES alone:
    const void *steps;
    long bits, form, zeros;  // zeros: whether there are some
    double middle;           // what is subtracted from a value

    long blocks() const { return (out + WIDTH - 1) / WIDTH; }
    bool reads_like(const Linear &other) const {
        return kind == other.kind && (kind == BYTES || group == other.group);
    }
};

// Rows of activations [count, in], and what `prepare` makes of them: `slab` bytes for each way in which they are read.
struct Inputs {
    bfloat16 *rows;
    long stride, count;
    char *prepared;
    long slab;
};

// Where results go, [count, out]: rows are `stride` numbers apart, those of the residual too.
struct Outputs {
    bfloat16 *result;
    const bfloat16 *residual;  // added, or null; may be the result itself
    long stride;
};

// Outputs `from` to `to`, in blocks of WIDTH.
void multiply_bfloat16(const Linear &linear, const Inputs &x, const Outputs &y, long from, long to);
void multiply_integers(const Linear &linear, const Inputs &x, const Outputs &y, long from, long to);
void multiply_integers8(const Linear &linear, const Inputs &x, const Outputs &y, long from, long to);
void prepare_bfloat16(const Linear &linear, const Inputs &x, long row);
void prepare_integers(const Linear &linear, const Inputs &x, long row);
void prepare_integers8(const Linear &linear, const Inputs &x, long row);
long prepared_bytes_bfloat16(long rows, long in);
long prepared_bytes8(long rows, long in);

inline long prepared_bytes(const Linear &linear, long rows) {
    if (linear.kind == BFLOAT16) return prepared_bytes_bfloat16(rows, linear.in);
    if (linear.kind == BYTES) return prepared_bytes8(rows, linear.in);
    return 2 * rows * linear.in + 4 * rows * (1 + linear.in / linear.group);
}

// Bring one row into the form in which products by this weight read it.
inline void prepare(const Linear &linear, const Inputs &x, long row) {
    if (linear.kind == BYTES)
        prepare_integers8(linear, x, row);
    else if (linear.kind == BFLOAT16)
        prepare_bfloat16(linear, x, row);
    else
        prepare_integers(linear, x, row);
}

inline void multiply(const Linear &linear, const Inputs &x, const Outputs &y, long from, long to) {
    if (linear.kind == BFLOAT16)
        multiply_bfloat16(linear, x, y, from, to);
    else if (linear.kind == BYTES)
        multiply_integers8(linear, x, y, from, to);
    else
        multiply_integers(linear, x, y, from, to);
}

struct Update;

// Linear layers of one input, whose outputs lie side by side.
struct Product {
    const Linear *parts;
    long count;
    const Update *update;  // null: none

    long in() const { return parts[0].in; }
    long out() const {
        long sum = 0;
        for (long i = 0; i < count; i++) sum += parts[i].out;
        return sum;
    }
    // Which slab a part reads: that of the first part that reads alike.
    Inputs read(const Inputs &x, long part) const {
        long first = 0;
        while (!parts[first].reads_like(parts[part])) first++;
        Inputs own = x;
        own.prepared += first * x.slab;
        return own;
    }
    void prepare_row(const Inputs &x, long row) const {
        for (long i = 0; i < count; i++) {
            const Inputs own = read(x, i);
            if (own.prepared == x.prepared + i * x.slab) prepare(parts[i], own, row);
        }
    }
    // This thread's share of the outputs, as all rows need it.
    void run(const Inputs &x, const Outputs &y, long thread, long threads) const {
        long all = 0, first = 0, column = 0;
        for (long i = 0; i < count; i++) all += parts[i].blocks();
        const long from = all * thread / threads, to = all * (thread + 1) / threads;
        for (long i = 0; i < count; i++) {
            const long low = from > first ? from - first : 0, blocks = parts[i].blocks();
            const long high = to - first < blocks ? to - first : blocks;
            const bfloat16 *residual = y.residual ? y.residual + column : nullptr;
            if (low < high) multiply(parts[i], read(x, i), {y.result + column, residual, y.stride}, low, high);
            first += blocks;
            column += parts[i].out;
        }
    }
};

// What some rows of a call add to a product: second (first x).
struct Update {
    Product first, second;
};
