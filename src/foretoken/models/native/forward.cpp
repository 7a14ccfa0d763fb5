// A whole forward of a stack of decoder layers in one parallel region: all threads go from stage to stage together.
//
// A stage takes every row through one step; its rows, heads or outputs are shared between the threads, and a barrier
// ends it.  Whatever is done to a row is done by one thread in an order that depends on nothing else, so a row's bits
// are the same in any company.  The families of models differ in what is null, in scales and in epsilons.

#include <initializer_list>

#include "attention.h"
#include "best.h"
#include "convolution.h"
#include "stages.h"
#include "worker.h"

namespace {

struct Layer {
    Norm before_attention, after_attention, before_mlp, after_mlp;  // without weights where there is none
    Norm query, key;            // of a head, or of all heads together
    Product qkv, out, gate_up, down;   // without `out` the layer only keeps keys and values
    double scaling;             // of scores
    double added;               // scale of what a sublayer adds
    long mask, turn;            // which of the call's
    long norms_all;             // whether query and key norms are over all heads
    long activation;
    Convolution around_attention, around_mlp;
};

// How a drafter's head begins that reads an embedding beside every state: both are normed and stand side by side, as
// what `entry` makes the first layer's states of (JOINED), or as what the first layer's attention reads (WIDE).
enum Entry : long { ALONE = 0, JOINED = 1, WIDE = 2 };

struct Model {
    const Layer *layers;
    long count, width, heads, kv_heads, dim;
    Norm last;
    Product head;               // no parts: the caller has the logits made
    long begins;                // an `Entry`
    Norm of_beside, of_state;
    Product entry;
};

// Rows of a call that share a cache: `widths[i]` rows of a sequence i, written from slot `starts[i]` on.
struct Group {
    bfloat16 *const *keys, *const *values;       // of each layer, [sequences of the cache, kv_heads, slots, dim]
    long slots, used, first, sequences, width;   // rows of the cache from `first` on; columns of the masks
    const long *starts, *widths;
    const bfloat16 *const *masks;                // of each kind [sequences, width, used]; null: everything is seen,
    long upto;                                   // or, if this is set, the slots up to a row's own
};

struct Call {
    long rows, groups;
    const Group *group;
    const bfloat16 *x;                           // [rows, width]
    long start, stop;                            // layers
    const char *skip_attention, *skip_mlp;       // [layers]
    long kinds;                                  // of masks
    long turned;                                 // numbers of a head that are turned
    const float *const *cos, *const *sin;        // of each kind of rotary embedding [rows, turned]
    bfloat16 *const *taps;                       // [layers + 1] where the states in front of a layer go, or null
    bfloat16 *last;                              // where those behind the last norm go, or null
    long wanted;
    const long *want;                            // rows whose logits are asked for
    bfloat16 *normed, *logits;                   // [wanted, width] and [wanted, vocabulary]
    const bfloat16 *beside;                      // embeddings [rows, width] of a head
    Best best;                                   // of the logits, where some are asked for
    const char *updated;                         // [rows] those that products' updates change; null: none
};

struct Row {
    const Group *group;
    long sequence, slot;                         // in the cache
    long column;                                 // of the masks: sequence * width + column
    long before;                                 // rows of its sequence in front of it in the call
};

// Rows that attend together, `count` from `row` on.
struct Together {
    long row, count;
};

struct ForwardBuffers {
    Row *row;
    Together *together;
    long tiles;                  // of `together`
    std::int32_t *seen;          // [kinds, rows, room]
    long *count;                 // [kinds, rows]
    long room;
    long working;                // numbers of a thread's part of `weights`
    float *weights;              // [threads, working]
    bfloat16 *x;                 // [rows, width], the residual stream
    bfloat16 *queries;           // [rows, heads, dim], turned
    Inputs inputs;               // of the next product
    Inputs inner;                // of the second product of an update
    long side;                   // numbers of a row of `output`
    bfloat16 *output;            // of a product that is not added at once
    long moving;                 // numbers of a row of `kernels`
    bfloat16 *kernels;           // of the convolutions around a sublayer
    char *end;

    ForwardBuffers(const Model &model, const Call &call, long threads, char *base) {
        Pieces pieces = {base};
        InputRoom inputs_room(call.rows, model.width), inner_room(call.rows, 0);
        long used = 0;
        side = model.width;
        moving = 0;
        const auto fit = [&](const Product &product) {
            inputs_room.fit(product);
            if (product.update && call.updated) {
                inputs_room.fit(product.update->first);
                inner_room.fit(product.update->second);
            }
            if (product.out() > side && &product != &model.head) side = product.out();
        };
        for (long i = call.start; i < call.stop; i++) {
            const Layer &layer = model.layers[i];
            for (const Product *product : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down}) fit(*product);
            for (const Convolution *around : {&layer.around_attention, &layer.around_mlp}) {
                if (!around->kernels.count) continue;
                fit(around->kernels);
                if (around->kernels.out() > moving) moving = around->kernels.out();
            }
        }
        fit(model.head);
        fit(model.entry);
        for (long g = 0; g < call.groups; g++)
            if (call.group[g].used > used) used = call.group[g].used;
        room = used + SPARE;
        working = (attention_work(used) + 15) / 16 * 16;
        row = pieces.take<Row>(call.rows);
        together = pieces.take<Together>(call.rows);
        seen = pieces.take<std::int32_t>(call.kinds * call.rows * room);
        count = pieces.take<long>(call.kinds * call.rows);
        weights = pieces.take<float>(threads * working);
        x = pieces.take<bfloat16>(call.rows * model.width);
        queries = pieces.take<bfloat16>(call.rows * model.heads * model.dim);
        inputs = inputs_room.take(pieces);
        inner = inner_room.take(pieces);
        side = apart(side);
        output = pieces.take<bfloat16>(call.rows * side);
        moving = apart(moving);
        kernels = pieces.take<bfloat16>(call.rows * moving);
        end = pieces.at;
    }
};

// One thread's part of a forward.
struct ForwardWorker : Worker {
    const Model &model;
    const Call &call;
    ForwardBuffers &buffers;

    void begin() const;
    void attention(const Layer &layer, long index) const;
    void mlp(const Layer &layer) const;
    void end() const;
    void tap(bfloat16 *place) const;

    void run(const Product &product, const Inputs &inputs, const Outputs &outputs) const;
    void change(const Update &update, const Inputs &inputs, const Outputs &outputs) const;
    void paired(const Product &product, const Inputs &inputs) const;
    void heads(const Layer &layer, long index) const;
    void mix(const Layer &layer, long index, const Inputs &inputs) const;
    void finish(const Product &product, const Inputs &inputs, Norm after, double scale, const Convolution &around) const;
    void entered(const Product &product, const Inputs &inputs, Norm norm, const Convolution &around) const;
    Floats convolved(const Convolution &around, long side, long row, long from, const bfloat16 *x, long stride) const {
        const bfloat16 *kernels = buffers.kernels + row * buffers.moving;
        return around.at(side, kernels, buffers.row[row].before, model.width, from, x + row * stride, stride);
    }
    Inputs inputs_of(const Product &product, long rows) const {
        Inputs inputs = buffers.inputs;
        inputs.stride = apart(product.in());
        inputs.count = rows;
        return inputs;
    }
    // Rows of the residual stream, normalised, as a product reads them.
    void normed(const Product &product, const Inputs &inputs, Norm norm) const {
        for (long row = from(inputs.count); row < to(inputs.count); row++) {
            normalise(norm, buffers.x + row * model.width, model.width, inputs.rows + row * inputs.stride);
            product.prepare_row(inputs, row);
        }
        wait();
    }
};

// Where every row is, which slots it sees, and the states that it starts from.
void ForwardWorker::begin() const {
    if (thread == 0) {
        const long most = rows_at_once(model.heads / model.kv_heads);
        long place = 0;
        buffers.tiles = 0;
        for (long g = 0; g < call.groups; g++) {
            const Group &group = call.group[g];
            for (long i = 0; i < group.sequences; i++)
                for (long column = 0; column < group.widths[i]; column++) {
                    if (column % most == 0) buffers.together[buffers.tiles++] = {place, 0};
                    buffers.together[buffers.tiles - 1].count++;
                    buffers.row[place++] = {&group, group.first + i, group.starts[i] + column,
                                            i * group.width + column, column};
                }
        }
    }
    wait();
    for (long row = from(call.rows); row < to(call.rows); row++) {
        const Row &at = buffers.row[row];
        for (long kind = 0; kind < call.kinds; kind++) {
            const bfloat16 *mask = at.group->masks[kind];
            const long place = kind * call.rows + row, used = at.group->used;
            std::int32_t *seen = buffers.seen + place * buffers.room;
            const long all = at.group->upto && !mask ? at.slot + 1 : used;
            buffers.count[place] = listed(mask ? mask + at.column * used : nullptr, all, seen);
        }
        if (model.begins != JOINED)
            std::memcpy(buffers.x + row * model.width, call.x + row * model.width, 2 * model.width);
    }
    if (model.begins == JOINED) {
        const Inputs inputs = inputs_of(model.entry, call.rows);
        paired(model.entry, inputs);
        model.entry.run(inputs, {buffers.x, nullptr, model.width}, thread, threads);
    }
    wait();
}

// A product, with its update in the rows that have one.
void ForwardWorker::run(const Product &product, const Inputs &inputs, const Outputs &outputs) const {
    product.run(inputs, outputs, thread, threads);
    wait();
    if (product.update && call.updated) change(*product.update, inputs, outputs);
}

// The other rows add zeros, which is simpler than to gather those that change, and few rows are others.
void ForwardWorker::change(const Update &update, const Inputs &inputs, const Outputs &outputs) const {
    for (long row = from(call.rows); row < to(call.rows); row++) update.first.prepare_row(inputs, row);
    wait();
    Inputs inner = buffers.inner;
    const long width = update.second.in();
    inner.stride = apart(width);
    update.first.run(inputs, {inner.rows, nullptr, inner.stride}, thread, threads);
    wait();
    for (long row = from(call.rows); row < to(call.rows); row++) {
        if (!call.updated[row]) std::memset(inner.rows + row * inner.stride, 0, 2 * width);
        update.second.prepare_row(inner, row);
    }
    wait();
    update.second.run(inner, {outputs.result, outputs.result, outputs.stride}, thread, threads);
    wait();
}

// Embeddings and states, normed, side by side.
void ForwardWorker::paired(const Product &product, const Inputs &inputs) const {
    const long width = model.width;
    for (long row = from(call.rows); row < to(call.rows); row++) {
        bfloat16 *place = inputs.rows + row * inputs.stride;
        normalise(model.of_beside, call.beside + row * width, width, place);
        normalise(model.of_state, call.x + row * width, width, place + width);
        product.prepare_row(inputs, row);
    }
    wait();
}

// Queries and keys are normalised and turned on their way to their buffer and to the cache, to which values go as they
// are.  (Not in place: a norm of all heads reads those that another thread has turned.)
void ForwardWorker::heads(const Layer &layer, long index) const {
    const long heads = model.heads, groups = model.kv_heads, dim = model.dim, all = heads + 2 * groups;
    for (long task = from(call.rows * all); task < to(call.rows * all); task++) {
        const long row = task / all, head = task % all;
        const Row &at = buffers.row[row];
        const bfloat16 *qkv = buffers.output + row * buffers.side, *x = qkv + head * dim;
        const long group = (head - heads) % groups;
        const long place = ((at.sequence * groups + group) * at.group->slots + at.slot) * dim;
        if (head >= heads + groups) {
            std::memcpy(at.group->values[index] + place, x, 2 * dim);
            continue;
        }
        const bool is_key = head >= heads;
        const Norm norm = is_key ? layer.key : layer.query;
        const long number = is_key ? head - heads : head;
        const bool all_heads = norm.weight && layer.norms_all;
        const bfloat16 *first = all_heads ? x - number * dim : x;
        const long size = all_heads ? (is_key ? groups : heads) * dim : dim;
        const float length = norm.weight ? inverse_length(first, size, norm.eps) : 1.0f;
        const float *weight = all_heads ? norm.weight + number * dim : norm.weight;
        const Turn turn = {call.cos[layer.turn] + row * call.turned, call.sin[layer.turn] + row * call.turned, call.turned};
        bfloat16 *query = buffers.queries + (row * heads + head) * dim;
        turn_head(x, weight, length, turn, dim, is_key ? at.group->keys[index] + place : query);
    }
    wait();
}

// Attention of all rows.  A thread takes heads that share keys and values one behind the other: neighbouring rows then
// find those in its cache.
void ForwardWorker::mix(const Layer &layer, long index, const Inputs &inputs) const {
    const Attending attending;
    const long dim = model.dim, each = model.heads / model.kv_heads, wholes = buffers.tiles * model.kv_heads;
    long chunks = (each + QUERIES_AT_ONCE - 1) / QUERIES_AT_ONCE;
    while (chunks < each && wholes * chunks < threads) chunks++;
    float *weights = buffers.weights + thread * buffers.working;
    for (long task = from(wholes * chunks); task < to(wholes * chunks); task++) {
        const long group = task / (buffers.tiles * chunks), chunk = task % chunks;
        const Together rows = buffers.together[task / chunks % buffers.tiles];
        const long first = each * chunk / chunks, head = group * each + first;
        const Row &at = buffers.row[rows.row];
        const long place = layer.mask * call.rows + rows.row;
        const long start = (at.sequence * model.kv_heads + group) * at.group->slots * dim;
        const Slots keys = {at.group->keys[index] + start, dim, at.group->used};
        const Slots values = {at.group->values[index] + start, dim, at.group->used};
        const Queries queries = {buffers.queries + (rows.row * model.heads + head) * dim, model.heads * dim, dim, rows.count,
                                 each * (chunk + 1) / chunks - first};
        attend(queries, keys, values, {buffers.seen + place * buffers.room, buffers.room, buffers.count + place}, dim,
               float(layer.scaling), weights, inputs.rows + rows.row * inputs.stride + head * dim, inputs.stride);
    }
    wait();
}

// The input of a sublayer: rows of the residual stream, normalised, and convolved where there is a convolution.
void ForwardWorker::entered(const Product &product, const Inputs &inputs, Norm norm, const Convolution &around) const {
    if (!around.kernels.count) {
        normed(product, inputs, norm);
        return;
    }
    normed(around.kernels, inputs, norm);
    around.kernels.run(inputs, {buffers.kernels, nullptr, buffers.moving}, thread, threads);
    wait();
    // In place, the last row first: a thread has the same channels of all rows.
    const long steps = (model.width + LANES - 1) / LANES;
    for (long row = call.rows - 1; row >= 0; row--)
        for (long step = from(steps); step < to(steps); step++) {
            const long channel = step * LANES;
            const Floats sum = convolved(around, 0, row, channel, inputs.rows, inputs.stride);
            store(inputs.rows + row * inputs.stride + channel, sum, model.width - channel);
        }
    wait();
    for (long row = from(call.rows); row < to(call.rows); row++) product.prepare_row(inputs, row);
    wait();
}

// The last product of a sublayer, added to the residual stream.
void ForwardWorker::finish(const Product &product, const Inputs &inputs, Norm after, double scale,
                           const Convolution &around) const {
    const long width = model.width;
    const bool plain = !after.weight && scale == 1 && !around.kernels.count;
    if (plain)
        run(product, inputs, {buffers.x, buffers.x, width});
    else
        run(product, inputs, {buffers.output, nullptr, buffers.side});
    if (plain) return;
    for (long row = from(call.rows); row < to(call.rows); row++) {
        if (around.kernels.count) {
            bfloat16 *x = buffers.x + row * width;
            for (long i = 0; i < width; i += LANES)
                store(x + i, convolved(around, 1, row, i, buffers.output, buffers.side) + load(x + i, width - i), width - i);
            continue;
        }
        add(after, float(scale), buffers.output + row * buffers.side, width, buffers.x + row * width);
    }
    wait();
}

void ForwardWorker::attention(const Layer &layer, long index) const {
    const Inputs inputs = inputs_of(layer.qkv, call.rows);
    if (model.begins == WIDE && index == 0)
        paired(layer.qkv, inputs);
    else
        entered(layer.qkv, inputs, layer.before_attention, layer.around_attention);
    run(layer.qkv, inputs, {buffers.output, nullptr, buffers.side});
    heads(layer, index);
    if (!layer.out.count) return;
    const Inputs mixed = inputs_of(layer.out, call.rows);
    mix(layer, index, mixed);
    for (long row = from(call.rows); row < to(call.rows); row++) layer.out.prepare_row(mixed, row);
    wait();
    finish(layer.out, mixed, layer.after_attention, layer.added, layer.around_attention);
}

void ForwardWorker::mlp(const Layer &layer) const {
    const Inputs inputs = inputs_of(layer.gate_up, call.rows), gated = inputs_of(layer.down, call.rows);
    entered(layer.gate_up, inputs, layer.before_mlp, layer.around_mlp);
    run(layer.gate_up, inputs, {buffers.output, nullptr, buffers.side});
    const long inner = layer.down.in();
    for (long row = from(call.rows); row < to(call.rows); row++) {
        const bfloat16 *gates = buffers.output + row * buffers.side;
        gate(Activation(layer.activation), gates, gates + inner, inner, gated.rows + row * gated.stride);
        layer.down.prepare_row(gated, row);
    }
    wait();
    finish(layer.down, gated, layer.after_mlp, layer.added, layer.around_mlp);
}

void ForwardWorker::tap(bfloat16 *place) const {
    if (!place) return;
    const long width = model.width;
    for (long row = from(call.rows); row < to(call.rows); row++)
        std::memcpy(place + row * width, buffers.x + row * width, 2 * width);
}

// The last norm, and the logits that are asked for.
void ForwardWorker::end() const {
    const long width = model.width, all = call.last ? call.rows : 0;
    for (long row = from(all); row < to(all); row++)
        normalise(model.last, buffers.x + row * width, width, call.last + row * width);
    if (!call.wanted) return;
    const bool whole = model.head.count;
    const Inputs inputs = whole ? inputs_of(model.head, call.wanted) : Inputs{call.normed, width, call.wanted, nullptr, 0};
    for (long i = from(call.wanted); i < to(call.wanted); i++) {
        normalise(model.last, buffers.x + call.want[i] * width, width, inputs.rows + i * inputs.stride);
        if (whole) model.head.prepare_row(inputs, i);
    }
    wait();
    if (!whole) return;
    const long size = model.head.out();
    model.head.run(inputs, {call.logits, nullptr, size}, thread, threads);
    if (!call.best.count) return;
    wait();
    for (long row = from(call.wanted); row < to(call.wanted); row++)
        choose(call.best, call.logits + row * size, size, row);
}

thread_local Kept kept;

}  // namespace

// Runs layers `start` to `stop`, the last norm and the head.  `failed` becomes 1 where there is not enough memory.
extern "C" void forward(const Model *model, const Call *call, long threads, long *failed) {
    const long size = ForwardBuffers(*model, *call, threads, nullptr).end - (char *)nullptr;
    char *const work = kept.of(size);
    *failed = !work;
    if (!work) return;
    ForwardBuffers buffers(*model, *call, threads, work);
#pragma omp parallel num_threads(threads)
    {
        const ForwardWorker worker = {{}, *model, *call, buffers};
        worker.begin();
        for (long i = call->start; i < call->stop; i++) {
            worker.tap(call->taps[i]);
            if (!call->skip_attention[i]) worker.attention(model->layers[i], i);
            if (!call->skip_mlp[i]) worker.mlp(model->layers[i]);
        }
        worker.tap(call->taps[call->stop]);
        worker.end();
    }
}
