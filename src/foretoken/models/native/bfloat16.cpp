// Products of a few rows by bfloat16 weights.
//
// A weight [out, in] is stored as [out / WIDTH][in / 2][WIDTH][2]: for WIDTH outputs, one pair of inputs after the
// other, so that it is read from memory in one stream.  CPUs that do not multiply bfloat16 numbers (AVX512-BF16) widen
// them in registers.  A tile keeps the sums of up to MOST rows in registers.  Every sum runs over the inputs in the same
// order, so a row has the same bits whatever stands beside it.

#include "amx.h"
#include "linear.h"

namespace {

constexpr long ONE_THREAD = 1 << 15;  // weights that one thread multiplies before a second has woken up
constexpr long CHUNK = 8;        // tiles that share a block of weights before the next one is read

#if defined(__AMX_BF16__)

constexpr long STEP = 32;  // inputs that a tile multiplies

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
        fetch_ahead(weight, 2 * STEP * WIDTH, amx::AHEAD);
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

constexpr long EACH = WIDTH / LANES;  // vectors of outputs
// Rows of a tile: 28 registers of sums, 2 of weights, 1 of activations, or 12, 2 and 2.
#if defined(__AVX512F__)
constexpr long MOST = 14, FEWER = 8;
#else
constexpr long MOST = 3, FEWER = 3;
#endif
// FEWER where that many long rows would not stay in the nearest cache.
constexpr long LONG = 2048;      // inputs of a long row

// [ROWS, in] x [WIDTH, in]^T, plus bias [WIDTH] and residual [ROWS, WIDTH] where they are not null; `width` outputs are
// real, the others fill the last block up.  x is `stride` pairs from row to row, y in its own stride.
template <int ROWS>
void tile(const pair *x, long stride, long pairs, const bfloat16 *weight, const float *bias, const Outputs &y, int width) {
    Floats sums[EACH][ROWS];
    UNROLL for (int v = 0; v < EACH; v++) UNROLL for (int row = 0; row < ROWS; row++) sums[v][row] = no_floats();
    for (long k = 0; k < pairs; k++, weight += 2 * WIDTH) {
        Words w[EACH];
        fetch_ahead(weight, 4 * WIDTH);
        UNROLL for (int v = 0; v < EACH; v++) w[v] = load_words(weight + 2 * LANES * v);
        UNROLL for (int row = 0; row < ROWS; row++) {
            const Words both = spread_word(x[row * stride + k]);
            UNROLL for (int v = 0; v < EACH; v++) sums[v][row] = plus_pairs(sums[v][row], w[v], both);
        }
    }
    UNROLL for (int v = 0; v < EACH; v++) {
        const long column = LANES * v, left = width - column;
        if (left <= 0) break;
        const Floats offset = bias ? load(bias + column, left) : no_floats();
        UNROLL for (int row = 0; row < ROWS; row++) {
            const long place = row * y.stride + column;
            Floats sum = sums[v][row] + offset;
            if (y.residual) sum = sum + load(y.residual + place, left);
            store(y.result + place, sum, left);
        }
    }
}

typedef void (*Tile)(const pair *, long, long, const bfloat16 *, const float *, const Outputs &, int);
const Tile TILES[] = {nullptr, tile<1>, tile<2>, tile<3>,
#if defined(__AVX512F__)
                      tile<4>, tile<5>, tile<6>, tile<7>, tile<8>, tile<9>, tile<10>, tile<11>, tile<12>, tile<13>, tile<14>
#endif
};

#endif

}  // namespace

#if defined(__AMX_BF16__)

void multiply_bfloat16(const Linear &linear, const Inputs &x, const Outputs &y, long from, long to) {
    constexpr long MOST = 2 * amx::ROWS;
    alignas(64) float sums[MOST][WIDTH];
    const auto run = [&](long row, long rows, long block) {
        const long column = block * WIDTH, at = row * y.stride + column;
        const int width = linear.out - column < WIDTH ? int(linear.out - column) : int(WIDTH);
        const bfloat16 *weight = (const bfloat16 *)linear.weight + column * linear.in;
        (rows > amx::ROWS ? tile<true> : tile<false>)(x.rows + row * x.stride, x.stride, rows, linear.in, weight, sums);
        finish(sums, rows, linear.bias ? linear.bias + column : nullptr,
               {y.result + at, y.residual ? y.residual + at : nullptr, y.stride}, width);
    };
    // Tiles of a chunk take turns at a block of weights, which is read from memory once.
    const long tiles = (x.count + MOST - 1) / MOST;
    amx::Configured shapes(16);
    for (long chunk = 0; chunk < tiles; chunk += CHUNK)
        for (long block = from; block < to; block++)
            for (long t = chunk; t < tiles && t < chunk + CHUNK; t++) {
                const amx::Share rows(x.count, t, tiles);
                shapes.take(rows.count);
                run(rows.first, rows.count, block);
            }
}

#else

void multiply_bfloat16(const Linear &linear, const Inputs &x, const Outputs &y, long from, long to) {
    const long in = linear.in, most = in < LONG ? MOST : FEWER, tiles = (x.count + most - 1) / most;
    for (long chunk = 0; chunk < tiles; chunk += CHUNK)
        for (long block = from; block < to; block++) {
            const long column = block * WIDTH;
            const int width = linear.out - column < WIDTH ? int(linear.out - column) : int(WIDTH);
            for (long t = chunk; t < tiles && t < chunk + CHUNK; t++) {
                const long row = x.count * t / tiles, at = row * y.stride + column;
                TILES[x.count * (t + 1) / tiles - row](
                    (const pair *)(x.rows + row * x.stride), x.stride / 2, in / 2,
                    (const bfloat16 *)linear.weight + column * in, linear.bias ? linear.bias + column : nullptr,
                    {y.result + at, y.residual ? y.residual + at : nullptr, y.stride}, width);
            }
        }
}

#endif

// result [rows, out] = x [rows, in] weight^T (+ bias [out]) (+ residual [rows, out]).  `in` and `stride`, the numbers
// from one row of x to the next, are even.
extern "C" void product(bfloat16 *x, long rows, long in, long stride, const bfloat16 *weight, long out,
                        const float *bias, const bfloat16 *residual, bfloat16 *result) {
    const Linear linear = {BFLOAT16, in, out, 0, weight, nullptr, bias};
    const Product alone = {&linear, 1};
#pragma omp parallel if (in * out > ONE_THREAD)
    alone.run({x, stride, rows, nullptr, 0}, {result, residual, out}, omp_get_thread_num(), omp_get_num_threads());
}
