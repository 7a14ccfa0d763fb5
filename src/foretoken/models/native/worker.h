// What threads that run a network's layers in one parallel region have in common.
#pragma once

#include "linear.h"
#include "memory.h"

// Room for the inputs of any of several products, of at most `rows` rows.
struct InputRoom {
    const long rows;
    long widest;               // numbers of a row with what lies behind it
    long slab = 0, slabs = 1;

    InputRoom(long rows, long width) : rows(rows), widest(apart(width)) {}

    void fit(const Product &product) {
        if (!product.count) return;
        if (apart(product.in()) > widest) widest = apart(product.in());
        if (product.count > slabs) slabs = product.count;
        for (long i = 0; i < product.count; i++) {
            const long bytes = prepared_bytes(product.parts[i], rows);
            if (bytes > slab) slab = bytes;
        }
    }
    Inputs take(Pieces &pieces) const {
        const long size = (slab + 63) / 64 * 64;
        Inputs inputs = {nullptr, 0, rows, nullptr, size};
        inputs.rows = pieces.take<bfloat16>(rows * widest);
        inputs.prepared = pieces.take<char>(slabs * size);
        return inputs;
    }
};

// One thread's part of the work; to be made inside the region.
struct Worker {
    const long thread = omp_get_thread_num(), threads = omp_get_num_threads();

    static void wait() {
#pragma omp barrier
    }
    // This thread's share of `count` things, one behind the other.
    long from(long count) const { return count * thread / threads; }
    long to(long count) const { return count * (thread + 1) / threads; }
};
