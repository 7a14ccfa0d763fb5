// Products of a few rows by weights in 8 or 4 bits, with activations of 15 bits and a sign.
//
// Activations become integers, row by row: x = scale * whole, a signed number of 16 bits.  Weights are unsigned bytes or
// halves of bytes, which are widened to 16 bits in registers, where CPUs multiply pairs of such numbers and add them up.
// Sums of integers are exact and sums of groups run in one order, so a row has the same bits whatever stands beside it.
//
// Weights lie, for 32 outputs, four inputs (8 bits) or eight (4 bits) after the other: [out / 32][in / 4][32][4] bytes,
// or [out / 32][in / 8][32][4] whose low halves are the first four inputs.  Of the four bytes of an output the even ones
// are a pair of numbers of 16 bits, and the odd ones another: in this order lie activations, too.

#include "linear.h"

namespace {

constexpr long TILES_AT_ONCE = 16;     // tiles that share a block of weights before the next one is read
constexpr float LARGEST = 32767;
constexpr int MIDDLE8 = 128;           // what is added to a weight in 8 bits to make it unsigned
constexpr float MIDDLE4 = 8;
constexpr long EXACT8 = 256, EXACT4 = 4096;  // so many products fit into a sum of 32 bits

constexpr long EACH = WIDTH / LANES;  // vectors of outputs
// Rows of a tile.
#if defined(__AVX512F__)
constexpr long TILE_ROWS8 = 8, TILE_ROWS4 = 6;
#else
constexpr long TILE_ROWS8 = 3, TILE_ROWS4 = 3;
#endif

// Which of eight inputs lies where, so that pairs are those of the weights: of four 0 2, 1 3; of eight 0 2, 4 6, 1 3, 5 7.
constexpr int ORDER8[8] = {0, 2, 1, 3, 4, 6, 5, 7}, ORDER4[8] = {0, 2, 4, 6, 1, 3, 5, 7};

// Rows of activations as integers, a scale for each row, and sums for each group of inputs.
struct Activations {
    std::int16_t *numbers;  // [rows, in], each eight in the order of the weights' pairs
    float *scale, *sums;    // [rows], [rows, in / group]

    Activations(char *work, long rows, long in)
        : numbers((std::int16_t *)work), scale((float *)(numbers + rows * in)), sums(scale + rows) {}

    // `group` is a multiple of 8.
    void fill(const bfloat16 *x, long row, long in, long group, Kind kind) const {
        // The largest magnitude by its bits, so that what is not a number counts as larger than all others.
        Words top = no_words();
        for (long i = 0; i < in; i += LANES) top = larger(top, magnitude_bits(load(x + i, in - i)));
        const std::int32_t bits = largest(top);
        float size;
        std::memcpy(&size, &bits, sizeof size);
        size = bits ? size / LARGEST : 1.0f;
        const Floats inverse = spread(1.0f / size);
        scale[row] = size;
        for (long from = 0; from < in; from += group) {
            Words all = no_words();
            for (long i = from; i < from + group; i += LANES) {
                const Words whole = rounded(load(x + i, from + group - i) * inverse);
                std::int16_t stored[LANES];
                store_halves(stored, whole);
                for (long j = 0; j < LANES && i + j < from + group; j += 8)
                    store_ordered(numbers + row * in + i + j, stored + j, kind == FOUR ? ORDER4 : ORDER8);
                all = plus(all, whole);
            }
            sums[row * (in / group) + from / group] = float(total(all));
        }
    }
};

// Sums of products of integers, EACH vectors of ROWS.  They are exact in any order, so that one or two rows, which do not
// fill the CPU, have two sums each: an addition waits for the one before.
template <int ROWS>
struct Whole {
    static constexpr int CHAINS = ROWS < 3 ? 2 : 1;
    Words sums[CHAINS][EACH][ROWS];

    Whole() {
        UNROLL for (int chain = 0; chain < CHAINS; chain++)
            UNROLL for (int v = 0; v < EACH; v++) UNROLL for (int r = 0; r < ROWS; r++) sums[chain][v][r] = no_words();
    }
    // Pairs of weights, the `number`th of those that are stored together, times those of a row.
    void add(int number, const Words (&pairs)[EACH], int row, std::int32_t inputs) {
        const Words both = spread_word(inputs);
        UNROLL for (int v = 0; v < EACH; v++) add_pairs(sums[number % CHAINS][v][row], pairs[v], both);
    }
    Floats sum(int v, int row) const {
        return as_floats(CHAINS == 2 ? plus(sums[0][v][row], sums[CHAINS - 1][v][row]) : sums[0][v][row]);
    }
};

// Sums times the rows' scales, plus bias [WIDTH] and the residual where they are not null, to `width` results a row.
template <int ROWS>
inline void finish(const Floats (&sums)[EACH][ROWS], const float *scale, const float *bias, const Outputs &y, int width) {
    UNROLL for (int v = 0; v < EACH; v++) {
        const long column = LANES * v, left = width - column;
        if (left <= 0) break;
        UNROLL for (int row = 0; row < ROWS; row++) {
            const long place = row * y.stride + column;
            Floats sum = sums[v][row] * spread(scale[row]);
            if (bias) sum = sum + load(bias + column, left);
            if (y.residual) sum = sum + load(y.residual + place, left);
            store(y.result + place, sum, left);
        }
    }
}

// Weights in 8 bits with a scale [WIDTH] for each output.
template <int ROWS>
void tile8(const Activations &x, long row, const Linear &linear, long block, const Outputs &y, int width) {
    const long in = linear.in;
    const std::uint8_t *weight = (const std::uint8_t *)linear.weight + block * WIDTH * in;
    const bfloat16 *scales = (const bfloat16 *)linear.scales + block * WIDTH;
    const pair *inputs = (const pair *)(x.numbers + row * in);
    Floats sums[EACH][ROWS];
    UNROLL for (int v = 0; v < EACH; v++) UNROLL for (int r = 0; r < ROWS; r++) sums[v][r] = no_floats();
    for (long from = 0; from < in; from += EXACT8) {
        Whole<ROWS> whole;
        const long to = from + EXACT8 < in ? from + EXACT8 : in;
        for (long i = from; i < to; i += 4, weight += 4 * WIDTH) {
            fetch_ahead(weight, 4 * WIDTH);
            Words pairs[2][EACH];
            UNROLL for (int v = 0; v < EACH; v++) {
                const Words stored = load_words(weight + 4 * LANES * v);
                pairs[0][v] = bits_and(stored, spread_word(0x00ff00ff)), pairs[1][v] = shifted_pairs<8>(stored);
            }
            UNROLL for (int half = 0; half < 2; half++) UNROLL for (int r = 0; r < ROWS; r++)
                whole.add(half, pairs[half], r, inputs[(r * in + i) / 2 + half]);
        }
        UNROLL for (int v = 0; v < EACH; v++) UNROLL for (int r = 0; r < ROWS; r++)
            sums[v][r] = sums[v][r] + whole.sum(v, r);
    }
    UNROLL for (int v = 0; v < EACH; v++) {
        const Floats scale = load_bfloat16(scales + LANES * v);
        UNROLL for (int r = 0; r < ROWS; r++)
            sums[v][r] = (sums[v][r] - spread(MIDDLE8 * x.sums[row + r])) * scale;
    }
    finish<ROWS>(sums, x.scale + row, linear.bias ? linear.bias + block * WIDTH : nullptr, y, width);
}

// Weights in 4 bits; scales and zeros [in / group][2][WIDTH].
template <int ROWS>
void tile4(const Activations &x, long row, const Linear &linear, long block, const Outputs &y, int width) {
    const long in = linear.in, group = linear.group;
    const std::uint8_t *weight = (const std::uint8_t *)linear.weight + block * WIDTH * in / 2;
    const bfloat16 *scales = (const bfloat16 *)linear.scales + block * 2 * WIDTH * (in / group);
    const pair *inputs = (const pair *)(x.numbers + row * in);
    Floats sums[EACH][ROWS];
    UNROLL for (int v = 0; v < EACH; v++) UNROLL for (int r = 0; r < ROWS; r++) sums[v][r] = no_floats();
    for (long g = 0; g < in / group; g++, scales += 2 * WIDTH) {
        const long end = (g + 1) * group;
        for (long from = g * group; from < end; from += EXACT4) {
            Whole<ROWS> whole;
            const long to = from + EXACT4 < end ? from + EXACT4 : end;
            for (long i = from; i < to; i += 8, weight += 4 * WIDTH) {
                fetch_ahead(weight, 4 * WIDTH);
                Words pairs[4][EACH];
                UNROLL for (int v = 0; v < EACH; v++) {
                    const Words stored = load_words(weight + 4 * LANES * v), mask = spread_word(0x000f000f);
                    pairs[0][v] = bits_and(stored, mask), pairs[1][v] = bits_and(shifted_pairs<4>(stored), mask);
                    pairs[2][v] = bits_and(shifted_pairs<8>(stored), mask), pairs[3][v] = shifted_pairs<12>(stored);
                }
                UNROLL for (int quarter = 0; quarter < 4; quarter++) UNROLL for (int r = 0; r < ROWS; r++)
                    whole.add(quarter, pairs[quarter], r, inputs[(r * in + i) / 2 + quarter]);
            }
            UNROLL for (int v = 0; v < EACH; v++) {
                const Floats scale = load_bfloat16(scales + LANES * v);
                UNROLL for (int r = 0; r < ROWS; r++) sums[v][r] = times_plus(whole.sum(v, r), scale, sums[v][r]);
            }
        }
        UNROLL for (int v = 0; v < EACH; v++) {
            const Floats scale = load_bfloat16(scales + LANES * v);
            const Floats zero = minus_times(scale, spread(MIDDLE4), load_bfloat16(scales + WIDTH + LANES * v));
            UNROLL for (int r = 0; r < ROWS; r++)
                sums[v][r] = times_plus(spread(x.sums[(row + r) * (in / group) + g]), zero, sums[v][r]);
        }
    }
    finish<ROWS>(sums, x.scale + row, linear.bias ? linear.bias + block * WIDTH : nullptr, y, width);
}

typedef void (*Tile)(const Activations &, long, const Linear &, long, const Outputs &, int);
const Tile TILES8[] = {nullptr, tile8<1>, tile8<2>, tile8<3>,
#if defined(__AVX512F__)
                       tile8<4>, tile8<5>, tile8<6>, tile8<7>, tile8<8>
#endif
};
const Tile TILES4[] = {nullptr, tile4<1>, tile4<2>, tile4<3>,
#if defined(__AVX512F__)
                       tile4<4>, tile4<5>, tile4<6>
#endif
};

}  // namespace

void prepare_integers(const Linear &linear, const Inputs &x, long row) {
    Activations(x.prepared, x.count, linear.in).fill(x.rows + row * x.stride, row, linear.in, linear.group,
                                                       Kind(linear.kind));
}

void multiply_integers(const Linear &linear, const Inputs &x, const Outputs &y, long from, long to) {
    const long most = linear.kind == EIGHT ? TILE_ROWS8 : TILE_ROWS4, tiles = (x.count + most - 1) / most;
    const Tile *tile = linear.kind == EIGHT ? TILES8 : TILES4;
    const Activations activations(x.prepared, x.count, linear.in);
    for (long chunk = 0; chunk < tiles; chunk += TILES_AT_ONCE)
        for (long block = from; block < to; block++) {
            const long column = block * WIDTH;
            const int width = linear.out - column < WIDTH ? int(linear.out - column) : int(WIDTH);
            for (long t = chunk; t < tiles && t < chunk + TILES_AT_ONCE; t++) {
                const long row = x.count * t / tiles, at = row * y.stride + column;
                tile[x.count * (t + 1) / tiles - row](
                    activations, row, linear, block,
                    {y.result + at, y.residual ? y.residual + at : nullptr, y.stride}, width);
            }
        }
}
