// Products of a few rows by bfloat16 weights.
//
// A weight [out, in] is stored as [out / WIDTH][in / 2][WIDTH][2]: for WIDTH outputs, one pair of inputs after the
// other, so that it is read from memory in one stream.  CPUs that do not multiply bfloat16 numbers (AVX512-BF16) widen
// them in registers.  A tile keeps the sums of up to TILE_ROWS rows in registers.  Every sum runs over the inputs
// in the same order, so a row has the same bits whatever stands beside it.

#include <utility>

#include "amx.h"
#include "linear.h"

namespace {

constexpr long TILES_AT_ONCE = 8;  // tiles that share a block of weights before the next one is read
constexpr long FEW_ROWS = 3;       // rows that wait for memory, whatever they are multiplied with
// Whether activations are widened first, once for all outputs; else pairs of them are multiplied.
#if defined(__AVX512BF16__)
constexpr bool widens(long) { return false; }
#else
constexpr bool widens(long rows) { return rows > FEW_ROWS; }
#endif
long distance(long in) { return in + 16; }  // from one widened row to the next

// Rows of sums [WIDTH] to where they belong.
void finish(const float (*sums)[WIDTH], long rows, const float *bias, const Outputs &y, int width) {
    for (long row = 0; row < rows; row++)
        for (long column = 0; column < width; column += LANES) {
            const long left = width - column, place = row * y.stride + column;
            Floats sum = load_floats(sums[row] + column);
            if (bias) sum = sum + load(bias + column, left);
            if (y.residual) sum = sum + load(y.residual + place, left);
            store(y.result + place, sum, left);
        }
}

#if defined(__AMX_BF16__)

constexpr long STEP = 32;  // inputs that a tile multiplies

// One step of a tile: sums += x [rows, STEP] weight [STEP, WIDTH].
template <bool TWO>
void step(const bfloat16 *first, const bfloat16 *second, long stride, const void *weight, long line) {
    amx::load<amx::LEFT>(weight, line);
    amx::load<amx::RIGHT>((const char *)weight + 64, line);
    amx::load<amx::FIRST>(first, stride);
    amx::add_pairs<amx::FIRST_LEFT, amx::FIRST, amx::LEFT>();
    amx::add_pairs<amx::FIRST_RIGHT, amx::FIRST, amx::RIGHT>();
    if (!TWO) return;
    amx::load<amx::SECOND>(second, stride);
    amx::add_pairs<amx::SECOND_LEFT, amx::SECOND, amx::LEFT>();
    amx::add_pairs<amx::SECOND_RIGHT, amx::SECOND, amx::RIGHT>();
}

// [first + second, in] x [WIDTH, in]^T to `sums`.  Inputs behind the last whole step are filled up with zeros.
template <bool TWO>
void tile(const bfloat16 *x, long stride, long rows, long in, const bfloat16 *weight, float (*sums)[WIDTH]) {
    const bfloat16 *second = x + amx::ROWS * stride;
    amx::clear<amx::FIRST_LEFT>();
    amx::clear<amx::FIRST_RIGHT>();
    if (TWO) amx::clear<amx::SECOND_LEFT>();
    if (TWO) amx::clear<amx::SECOND_RIGHT>();
    long k = 0;
    for (; k + STEP <= in; k += STEP, weight += STEP * WIDTH) {
        fetch_ahead(weight, 2 * STEP * WIDTH, amx::TILE_BYTES_AHEAD);
        step<TWO>(x + k, second + k, 2 * stride, weight, amx::LINE);
    }
    if (k < in) {
        alignas(64) bfloat16 inputs[2 * amx::ROWS][STEP] = {}, weights[STEP * WIDTH] = {};
        for (long row = 0; row < rows; row++) std::memcpy(inputs[row], x + row * stride + k, 2 * (in - k));
        std::memcpy(weights, weight, 2 * (in - k) * WIDTH);
        step<TWO>(inputs[0], inputs[amx::ROWS], 2 * STEP, weights, amx::LINE);
    }
    amx::store<amx::FIRST_LEFT>(sums, 4 * WIDTH);
    amx::store<amx::FIRST_RIGHT>(sums[0] + 16, 4 * WIDTH);
    if (TWO) amx::store<amx::SECOND_LEFT>(sums + amx::ROWS, 4 * WIDTH);
    if (TWO) amx::store<amx::SECOND_RIGHT>(sums[amx::ROWS] + 16, 4 * WIDTH);
}

#else

constexpr int EACH = WIDTH / LANES;  // vectors of outputs
// Rows of a tile, and vectors of outputs of which it has the sums in registers: 28, 2 of weights and 1 of activations, or
// 10, 2 and 1.  LONG_TILE_ROWS of long rows, of which more would not stay in the nearest cache.
#if defined(__AVX512F__)
constexpr long TILE_ROWS = 14, LONG_TILE_ROWS = 8;
constexpr int VECTORS = EACH;
#else
constexpr long TILE_ROWS = 5, LONG_TILE_ROWS = 5;
constexpr int VECTORS = 2;
#endif
constexpr long LONG = 2048;  // inputs of a long row
constexpr long DEPTH = 256;  // pairs of inputs that all tiles multiply before the next ones: they stay in the nearest cache

// sums [COUNT][ROWS] += products of the k-th pair of inputs.
template <int ROWS, int COUNT>
void add_pair(Floats (&sums)[COUNT][ROWS], const pair *x, long stride, long k, const bfloat16 *weight) {
    Words w[COUNT];
    UNROLL for (int v = 0; v < COUNT; v++) w[v] = load_words(weight + 2 * LANES * v);
    UNROLL for (int row = 0; row < ROWS; row++) {
        const Words both = spread_word(x[row * stride + k]);
        UNROLL for (int v = 0; v < COUNT; v++) sums[v][row] = plus_pairs(sums[v][row], w[v], both);
    }
}

template <int ROWS, int COUNT>
void add_pair(Floats (&sums)[COUNT][ROWS], const float *x, long stride, long k, const bfloat16 *weight) {
    UNROLL for (int odd = 0; odd < 2; odd++) {  // both kinds of weights at once would not fit the registers
        Floats w[COUNT];
        UNROLL for (int v = 0; v < COUNT; v++) {
            const Words both = load_words(weight + 2 * LANES * v);
            w[v] = odd ? odds(both) : evens(both);
        }
        UNROLL for (int row = 0; row < ROWS; row++) {
            const Floats one = spread(x[row * stride + 2 * k + odd]);
            UNROLL for (int v = 0; v < COUNT; v++) sums[v][row] = times_plus(w[v], one, sums[v][row]);
        }
    }
}

// sums [ROWS, WIDTH] += x [ROWS, in] by the weights of the pairs `from` to `to`.  x is `stride` inputs from row to row.
template <class Input, int ROWS, int COUNT>
void tile(const void *inputs, long stride, long from, long to, const bfloat16 *weight, float (*all)[WIDTH], Ahead &ahead) {
    const Input *x = (const Input *)inputs;
    for (int first = 0; first < EACH; first += COUNT) {
        Floats sums[COUNT][ROWS];
        UNROLL for (int v = 0; v < COUNT; v++)
            UNROLL for (int row = 0; row < ROWS; row++) sums[v][row] = load_floats(all[row] + LANES * (first + v));
        for (long k = from; k < to; k++) {
            const bfloat16 *own = weight + 2 * WIDTH * k + 2 * LANES * first;
            if (COUNT == EACH) {
                fetch_ahead(own, 4 * WIDTH);
            } else {
                ahead.fetch();
            }
            add_pair(sums, x, stride, k, own);
        }
        UNROLL for (int v = 0; v < COUNT; v++)
            UNROLL for (int row = 0; row < ROWS; row++)
                std::memcpy(all[row] + LANES * (first + v), &sums[v][row], sizeof(Floats));
    }
}

typedef void (*Tile)(const void *, long, long, long, const bfloat16 *, float (*)[WIDTH], Ahead &);
template <class Input, int COUNT, int... ROWS>
const Tile *tiles_of(std::integer_sequence<int, ROWS...>) {
    static constexpr Tile all[] = {tile<Input, ROWS + 1, COUNT>...};
    return all;
}

// The tile of so many rows at the place before theirs.
const Tile *tiles_for(bool wide) {
#if defined(__AVX512BF16__)
    return tiles_of<pair, EACH>(std::make_integer_sequence<int, TILE_ROWS>());
#else
    return wide ? tiles_of<float, VECTORS>(std::make_integer_sequence<int, TILE_ROWS>())
                : tiles_of<pair, EACH>(std::make_integer_sequence<int, FEW_ROWS>());
#endif
}

#endif

}  // namespace

#if defined(__AMX_BF16__)

void multiply_bfloat16(const Linear &linear, const Inputs &x, const Outputs &y, long from, long to) {
    constexpr long TILE_ROWS = 2 * amx::ROWS;
    alignas(64) float sums[TILE_ROWS][WIDTH];
    const auto run = [&](long row, long rows, long block) {
        const long column = block * WIDTH, at = row * y.stride + column;
        const int width = linear.out - column < WIDTH ? int(linear.out - column) : int(WIDTH);
        const bfloat16 *weight = (const bfloat16 *)linear.weight + column * linear.in;
        (rows > amx::ROWS ? tile<true> : tile<false>)(x.rows + row * x.stride, x.stride, rows, linear.in, weight, sums);
        finish(sums, rows, linear.bias ? linear.bias + column : nullptr,
               {y.result + at, y.residual ? y.residual + at : nullptr, y.stride}, width);
    };
    // Tiles of a chunk take turns at a block of weights, which is read from memory once.
    const long tiles = (x.count + TILE_ROWS - 1) / TILE_ROWS;
    amx::Configured shapes(16);
    for (long chunk = 0; chunk < tiles; chunk += TILES_AT_ONCE)
        for (long block = from; block < to; block++)
            for (long t = chunk; t < tiles && t < chunk + TILES_AT_ONCE; t++) {
                const amx::Share rows(x.count, t, tiles);
                shapes.take(rows.count);
                run(rows.first, rows.count, block);
            }
}

#else

void multiply_bfloat16(const Linear &linear, const Inputs &x, const Outputs &y, long from, long to) {
    const long in = linear.in, most = in < LONG ? TILE_ROWS : LONG_TILE_ROWS, tiles = (x.count + most - 1) / most;
    const bool wide = widens(x.count);
    const char *rows = wide ? x.prepared : (const char *)x.rows;
    const long stride = wide ? distance(in) : x.stride / 2, depth = x.count > FEW_ROWS ? DEPTH : in;
    const Tile *by_rows = tiles_for(wide);
    alignas(64) float sums[TILES_AT_ONCE * TILE_ROWS][WIDTH];
    for (long chunk = 0; chunk < tiles; chunk += TILES_AT_ONCE)
        for (long block = from; block < to; block++) {
            const long column = block * WIDTH, end = tiles - chunk < TILES_AT_ONCE ? tiles : chunk + TILES_AT_ONCE;
            const long low = x.count * chunk / tiles, count = x.count * end / tiles - low, at = low * y.stride + column;
            std::memset(sums, 0, count * sizeof sums[0]);
            const bfloat16 *weight = (const bfloat16 *)linear.weight + column * in;
            for (long k = 0, stop; k < in / 2; k = stop) {
                stop = in / 2 - k < depth ? in / 2 : k + depth;
                // What comes next in memory, shared by the passes of all tiles.
                Ahead ahead = {(const char *)(weight + 2 * WIDTH * stop), 4 * WIDTH / ((end - chunk) * EACH / VECTORS)};
                for (long t = chunk; t < end; t++) {
                    const long row = x.count * t / tiles, size = x.count * (t + 1) / tiles - row;
                    by_rows[size - 1](rows + 4 * row * stride, stride, k, stop, weight, sums + row - low, ahead);
                }
            }
            finish(sums, count, linear.bias ? linear.bias + column : nullptr,
                   {y.result + at, y.residual ? y.residual + at : nullptr, y.stride},
                   linear.out - column < WIDTH ? int(linear.out - column) : int(WIDTH));
        }
}

#endif

long prepared_bytes_bfloat16(long rows, long in) { return widens(rows) ? 4 * rows * distance(in) : 0; }

void prepare_bfloat16(const Linear &linear, const Inputs &x, long row) {
    if (!widens(x.count)) return;
    float *wide = (float *)x.prepared + row * distance(linear.in);
    for (long i = 0; i < linear.in; i++) wide[i] = widened(x.rows[row * x.stride + i]);
}
