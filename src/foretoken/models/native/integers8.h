// Products of a few rows by weights in 8 or 4 bits, with activations of 8 bits.
//
// Every 32 inputs of a row become signed bytes with a scale of their own, as in GGUF's Q8_0: x = scale * byte.  Weights
// lie as integers.cpp has them.  Sums of integers are exact and blocks are added in one order, so a row has the same bits
// whatever stands beside it.  One row takes as long as memory gives the weights; eight are bound by the additions of
// bytes, a multiplication by a scale of activations, one by a scale of weights, and one by their zeros for each 32 inputs.

#pragma once

#include "lanes.h"

namespace lanes {
namespace integers8 {

constexpr long WIDTH = 32;    // outputs that are stored together
constexpr long BLOCK = 32;    // inputs that share a scale of activations
constexpr long CHUNK = 8;     // tiles of rows that share a block of weights before the next one is read
constexpr long AHEAD = 3072;  // bytes: a tile of several rows leaves the CPU no room to look for weights so far ahead
constexpr int MIDDLE8 = 128;  // what is added to a weight in 8 bits to make it unsigned
constexpr float MIDDLE4 = 8;
constexpr float MOST_BYTE = 127;
constexpr std::int32_t TINY = 0x08000000;  // the bits of 2^-111: inputs below it count as zero

// Rows of a tile, and registers for its sums of integers.
#if defined(__AVX512F__)
constexpr long MOST = 8, REGISTERS = 16;
#else
constexpr long MOST = 4, REGISTERS = 8;
#endif

// Vectors of outputs of a tile of so many rows, where a row has so many sums of a vector.
constexpr int vectors(int rows, int sums) {
    const long fitting = REGISTERS / (rows * sums), all = WIDTH / LANES;
    return fitting >= all ? all : fitting >= 2 ? 2 : 1;
}

// Rows of activations as integers.
struct Activations {
    long in, blocks, stride;  // a row has `stride` bytes, an odd number of cache lines, so that rows share no places there
    std::int8_t *bytes;       // [rows, stride]
    float *scale, *sums;      // [rows, blocks]: of each block its scale, and the sum of its inputs
    float *totals;            // [rows]: of all inputs

    static long row_bytes(long in) { return ((in + 63) / 64 | 1) * 64; }

    static long num_bytes(long rows, long in) {
        const long blocks = (in + BLOCK - 1) / BLOCK;
        return (rows * (row_bytes(in) + (2 * blocks + 1) * long(sizeof(float))) + 63) / 64 * 64;
    }

    // `work` has num_bytes.
    Activations(char *work, long rows, long in)
        : in(in), blocks((in + BLOCK - 1) / BLOCK), stride(row_bytes(in)), bytes((std::int8_t *)work),
          scale((float *)(bytes + rows * stride)), sums(scale + rows * blocks), totals(sums + rows * blocks) {}

    void fill_block(const bfloat16 *x, std::int8_t *to, float &scale, float &sum) const {
        Words top = no_words(), all = no_words();
        // The largest magnitude by its bits, so that what is not a number counts as larger than all others.
        UNROLL for (long i = 0; i < BLOCK; i += LANES)
            top = larger(top, magnitude_bits(load_bfloat16(x + i)));
        const std::int32_t bits = largest(top);
        float size;
        std::memcpy(&size, &bits, sizeof size);
        size = bits < TINY ? 1.0f : size / MOST_BYTE;
        const Floats inverse = spread(1.0f / size);
        UNROLL for (long i = 0; i < BLOCK; i += LANES) {
            const Words whole = rounded(times(load_bfloat16(x + i), inverse));
            store_bytes(to + i, whole);
            all = plus(all, whole);
        }
        scale = size;
        sum = size * float(total(all));
    }

    // One row of `x`.
    void fill(const bfloat16 *x, long row) const {
        float sum = 0;
        for (long block = 0; block < blocks; block++) {
            const long from = block * BLOCK, left = in - from, at = row * blocks + block;
            bfloat16 filled[BLOCK] = {};
            if (left < BLOCK) std::memcpy(filled, x + from, left * sizeof *x);
            fill_block(left < BLOCK ? filled : x + from, bytes + row * stride + from, scale[at], sums[at]);
            sum += sums[at];
        }
        totals[row] = sum;
    }
};

// A weight [out, in] in `bits` 8 or 4, and its scales.
struct Weight {
    const std::uint8_t *packed;
    const bfloat16 *scales;  // [out / WIDTH][WIDTH], or scales and zeros [out / WIDTH][in / group][2][WIDTH]
    long bits, group, out, in;

    long num_blocks() const { return (out + WIDTH - 1) / WIDTH; }
    const std::uint8_t *block(long i) const { return packed + i * WIDTH * in * bits / 8; }
    const bfloat16 *block_scales(long i) const { return scales + i * (bits == 8 ? WIDTH : 2 * WIDTH * (in / group)); }
};

inline void prefetch(const void *from) { _mm_prefetch((const char *)from + AHEAD, _MM_HINT_T0); }

// Tiles write [ROWS, WIDTH] float sums to `sums`.
template <int ROWS>
void tile8(const Activations &x, long row, const Weight &weight, long block, float (*sums)[WIDTH]) {
    constexpr int VECTORS = vectors(ROWS, ADDS_BYTES ? 1 : 2);  // by halves of bytes where bytes are not added
    constexpr long OUTPUTS = VECTORS * LANES;
    for (long part = 0; part < WIDTH; part += OUTPUTS) {
        const std::uint8_t *w = weight.block(block) + 4 * part;
        Floats results[VECTORS][ROWS];
        UNROLL for (int v = 0; v < VECTORS; v++) UNROLL for (int r = 0; r < ROWS; r++) results[v][r] = no_floats();
        for (long b = 0; b < x.blocks; b++) {
            const long from = b * BLOCK, to = from + BLOCK < x.in ? from + BLOCK : x.in;
            ByteSums low[VECTORS][ROWS], high[VECTORS][ROWS];
            for (long i = from; i < to; i += 4, w += 4 * WIDTH) {
                if (ROWS > 1) UNROLL for (long line = 0; line < 4 * OUTPUTS; line += 64) prefetch(w + line);
                UNROLL for (int v = 0; v < VECTORS; v++) {
                    const Words stored = load_words(w + 4 * LANES * v);
                    UNROLL for (int r = 0; r < ROWS; r++) {
                        const Words inputs = spread_word(*(const four *)(x.bytes + (row + r) * x.stride + i));
                        low[v][r].add(ADDS_BYTES ? stored : low_halves(stored), inputs);
                        if (!ADDS_BYTES) high[v][r].add(high_halves(stored), inputs);
                    }
                }
            }
            UNROLL for (int v = 0; v < VECTORS; v++) UNROLL for (int r = 0; r < ROWS; r++) {
                const Words both = ADDS_BYTES ? low[v][r].whole() : plus(low[v][r].whole(), times16(high[v][r].whole()));
                const Floats scale = spread(x.scale[(row + r) * x.blocks + b]);
                results[v][r] = times_plus(as_floats(both), scale, results[v][r]);
            }
        }
        UNROLL for (int v = 0; v < VECTORS; v++) {
            const Floats scale = load_bfloat16(weight.block_scales(block) + part + LANES * v);
            UNROLL for (int r = 0; r < ROWS; r++) {
                const Floats sum = minus_times(spread(x.totals[row + r]), spread(MIDDLE8), results[v][r]);
                store_floats(sums[r] + part + LANES * v, times(sum, scale));
            }
        }
    }
}

template <int ROWS>
void tile4(const Activations &x, long row, const Weight &weight, long block, float (*sums)[WIDTH]) {
    constexpr int VECTORS = vectors(ROWS, 1);
    constexpr long OUTPUTS = VECTORS * LANES;
    const long shared = weight.group / BLOCK;  // blocks of activations that share scales of weights
    for (long part = 0; part < WIDTH; part += OUTPUTS) {
        const std::uint8_t *w = weight.block(block) + 4 * part;
        const bfloat16 *scales = weight.block_scales(block) + part;
        Floats results[VECTORS][ROWS];
        UNROLL for (int v = 0; v < VECTORS; v++) UNROLL for (int r = 0; r < ROWS; r++) results[v][r] = no_floats();
        for (long b = 0; b < x.blocks; b++) {
            ByteSums integers[VECTORS][ROWS];
            for (long i = b * BLOCK; i < (b + 1) * BLOCK; i += 8, w += 4 * WIDTH) {
                if (ROWS > 1) UNROLL for (long line = 0; line < 4 * OUTPUTS; line += 64) prefetch(w + line);
                Words halves[2][VECTORS];
                UNROLL for (int v = 0; v < VECTORS; v++) {
                    const Words stored = load_words(w + 4 * LANES * v);
                    halves[0][v] = low_halves(stored), halves[1][v] = high_halves(stored);
                }
                UNROLL for (int half = 0; half < 2; half++) UNROLL for (int r = 0; r < ROWS; r++) {
                    const Words inputs = spread_word(*(const four *)(x.bytes + (row + r) * x.stride + i + 4 * half));
                    UNROLL for (int v = 0; v < VECTORS; v++) integers[v][r].add(halves[half][v], inputs);
                }
            }
            UNROLL for (int v = 0; v < VECTORS; v++) {
                const bfloat16 *own = scales + 2 * WIDTH * (b / shared) + LANES * v;
                if (ROWS > 1) prefetch(own);
                const Floats scale = load_bfloat16(own);
                const Floats zero = minus_times(scale, spread(MIDDLE4), load_bfloat16(own + WIDTH));
                UNROLL for (int r = 0; r < ROWS; r++) {
                    const long at = (row + r) * x.blocks + b;
                    const Floats sum = times(as_floats(integers[v][r].whole()), spread(x.scale[at]));
                    const Floats before = times_plus(spread(x.sums[at]), zero, results[v][r]);
                    results[v][r] = times_plus(sum, scale, before);
                }
            }
        }
        UNROLL for (int v = 0; v < VECTORS; v++) UNROLL for (int r = 0; r < ROWS; r++)
            store_floats(sums[r] + part + LANES * v, results[v][r]);
    }
}

typedef void (*Tile)(const Activations &, long, const Weight &, long, float (*)[WIDTH]);
constexpr Tile TILES8[] = {nullptr,  tile8<1>, tile8<2>, tile8<3>, tile8<4>,
#if defined(__AVX512F__)
                           tile8<5>, tile8<6>, tile8<7>, tile8<8>
#endif
};
constexpr Tile TILES4[] = {nullptr,  tile4<1>, tile4<2>, tile4<3>, tile4<4>,
#if defined(__AVX512F__)
                           tile4<5>, tile4<6>, tile4<7>, tile4<8>
#endif
};

// Where results go, [rows, out]: rows are `stride` numbers apart, those of the residual too.
struct Outputs {
    bfloat16 *result;
    long stride;
    const float *bias = nullptr;         // [out], or null
    const bfloat16 *residual = nullptr;  // added, or null; may be the result itself
};

// One row of WIDTH sums, of which `width` are real, to where it belongs.
inline void finish(float *sums, const Outputs &y, long row, long column, long width) {
    alignas(64) bfloat16 narrow[WIDTH];
    const long at = row * y.stride + column;
    for (long i = 0; y.bias && i < width; i++) sums[i] += y.bias[column + i];
    for (long i = 0; y.residual && i < width; i++) sums[i] += widened(y.residual[at + i]);
    UNROLL for (long i = 0; i < WIDTH; i += LANES) store_bfloat16(narrow + i, load_floats(sums + i));
    std::memcpy(y.result + at, narrow, width * sizeof *narrow);
}

// The rows of `x` [rows, in], `stride` numbers apart, that are one thread's.
inline void fill(const bfloat16 *x, long rows, long stride, const Activations &to, long thread, long threads) {
    for (long row = thread; row < rows; row += threads) to.fill(x + row * stride, row);
}

// Outputs `from` to `to` of x weight^T, in blocks of WIDTH.
inline void multiply(const Activations &x, long rows, const Weight &weight, const Outputs &y, long from, long to) {
    const long tiles = (rows + MOST - 1) / MOST;
    const Tile *tile = weight.bits == 8 ? TILES8 : TILES4;
    alignas(64) float sums[MOST][WIDTH];
    for (long chunk = 0; chunk < tiles; chunk += CHUNK)
        for (long block = from; block < to; block++) {
            const long column = block * WIDTH, width = weight.out - column < WIDTH ? weight.out - column : WIDTH;
            for (long t = chunk; t < tiles && t < chunk + CHUNK; t++) {
                const long row = t * MOST, count = rows - row < MOST ? rows - row : MOST;
                tile[count](x, row, weight, block, sums);
                for (long r = 0; r < count; r++) finish(sums[r], y, row + r, column, width);
            }
        }
}

}  // namespace integers8
}  // namespace lanes
