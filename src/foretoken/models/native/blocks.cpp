// Residual blocks on states, as Medusa's and Hydra's heads are made of, with their projections and the best tokens, in
// one parallel region.

#include <initializer_list>

#include "best.h"
#include "stages.h"
#include "worker.h"

namespace {

// K heads.  The first block of a head reads the inputs: x + silu(first x), or where widths differ residual x +
// silu(first x), of which both products are then `first`, side by side.  All others map `width` numbers to as many.
struct Blocks {
    long heads, width, residual;   // whether `first` has a residual path before the block, of one head alone
    Product first;                 // [heads, width] outputs
    const Product *rest;           // [depth, heads]
    long depth;
    const Product *projections;    // of each head, or one for all; null for none
    long shared;

    const Product &projection(long head) const { return projections[shared ? 0 : head]; }
};

struct BlocksCall {
    long rows;
    const bfloat16 *x;             // [rows, in]
    bfloat16 *states;              // [heads, rows, width]
    bfloat16 *logits;              // [heads, rows, vocabulary]
    Best best;
};

struct BlocksBuffers {
    long side;                     // numbers of a row of `output`
    bfloat16 *output;
    Inputs inputs;
    char *end;

    BlocksBuffers(const Blocks &blocks, const BlocksCall &call, char *base) {
        Pieces pieces = {base};
        InputRoom room(blocks.heads * call.rows, blocks.width);
        room.fit(blocks.first);
        for (long i = 0; i < blocks.depth * blocks.heads; i++) room.fit(blocks.rest[i]);
        for (long i = 0; blocks.projections && i < (blocks.shared ? 1 : blocks.heads); i++)
            room.fit(blocks.projections[i]);
        side = apart(blocks.first.out());
        output = pieces.take<bfloat16>(call.rows * side);
        inputs = room.take(pieces);
        end = pieces.at;
    }
};

struct BlocksWorker : Worker {
    const Blocks &blocks;
    const BlocksCall &call;
    const BlocksBuffers &buffers;

    // The inputs of a product, `count` rows that lie one behind the other.
    Inputs read(const Product &product, const bfloat16 *x, long count) const {
        Inputs inputs = buffers.inputs;
        const long in = product.in();
        inputs.stride = apart(in);
        inputs.count = count;
        for (long row = from(count); row < to(count); row++) {
            std::memcpy(inputs.rows + row * inputs.stride, x + row * in, 2 * in);
            product.prepare_row(inputs, row);
        }
        wait();
        return inputs;
    }
    // states = before + silu(added) of one row.
    void joined(const bfloat16 *before, const bfloat16 *added, bfloat16 *states) const {
        for (long i = 0; i < blocks.width; i += LANES) {
            const long left = blocks.width - i;
            const Floats x = load(added + i, left);
            store(states + i, times_plus(x, sigmoid(x), load(before + i, left)), left);
        }
    }
    bfloat16 *states(long head, long row) const { return call.states + (head * call.rows + row) * blocks.width; }

    void first() const {
        const Inputs inputs = read(blocks.first, call.x, call.rows);
        blocks.first.run(inputs, {buffers.output, nullptr, buffers.side}, thread, threads);
        wait();
        const long all = blocks.heads * call.rows, width = blocks.width;
        for (long task = from(all); task < to(all); task++) {
            const long head = task / call.rows, row = task % call.rows;
            const bfloat16 *found = buffers.output + row * buffers.side, *x = call.x + row * width;
            joined(blocks.residual ? found : x, found + (blocks.residual + head) * width, states(head, row));
        }
        wait();
    }
    void next(const Product &product, long head) const {
        const Inputs inputs = read(product, states(head, 0), call.rows);
        product.run(inputs, {buffers.output, nullptr, buffers.side}, thread, threads);
        wait();
        for (long row = from(call.rows); row < to(call.rows); row++)
            joined(states(head, row), buffers.output + row * buffers.side, states(head, row));
        wait();
    }
    void project() const {
        const long heads = blocks.shared ? 1 : blocks.heads, count = blocks.heads * call.rows / heads;
        const long size = blocks.projection(0).out();
        for (long head = 0; head < heads; head++) {
            const Product &product = blocks.projection(head);
            const Inputs inputs = read(product, states(head, 0), count);
            product.run(inputs, {call.logits + head * count * size, nullptr, size}, thread, threads);
            wait();
        }
        const long all = call.best.count ? blocks.heads * call.rows : 0;
        for (long row = from(all); row < to(all); row++) choose(call.best, call.logits + row * size, size, row);
    }
};

thread_local Kept kept;

}  // namespace

// States of K heads, and their logits and best tokens where there are projections.  `failed` becomes 1 where there is
// not enough memory.
extern "C" void blocks(const Blocks *blocks, const BlocksCall *call, long threads, long *failed) {
    const long size = BlocksBuffers(*blocks, *call, nullptr).end - (char *)nullptr;
    char *const memory = kept.of(size);
    *failed = !memory;
    if (!memory) return;
    const BlocksBuffers buffers(*blocks, *call, memory);
#pragma omp parallel num_threads(threads)
    {
        const BlocksWorker worker = {{}, *blocks, *call, buffers};
        worker.first();
        for (long depth = 0; depth < blocks->depth; depth++)
            for (long head = 0; head < blocks->heads; head++) worker.next(blocks->rest[depth * blocks->heads + head], head);
        if (blocks->projections) worker.project();
    }
}
