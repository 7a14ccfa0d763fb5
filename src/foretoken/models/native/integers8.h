// Products of a few rows by weights in 8 or 4 bits, with activations of 8 bits.
//
// Every 32 inputs of a row become signed bytes with a scale of their own, as in GGUF's Q8_0: x = scale * byte.  Weights
// lie as integers.cpp has them, their scales in one of the forms below, which are ours and those of GGUF's types.  Sums of
// integers are exact and blocks are added in one order, so a row has the same bits whatever stands beside it.  One row
// takes as long as memory gives the weights; eight are bound by the additions of bytes, a multiplication by a scale of
// activations, one by a scale of weights, and one by their zeros for each group of inputs.

#pragma once

#include "lanes.h"
#include "linear.h"
#include "memory.h"

namespace lanes {
namespace integers8 {

constexpr long BLOCK = 32;    // inputs that share a scale of activations
constexpr long HALF = 16;     // inputs of which sums are kept, too: some weights have a scale for as many
constexpr long SUPER = 256;   // weights that share the float16 numbers of Form::STEPS
constexpr long TILES_AT_ONCE = 8;  // tiles of rows that share a block of weights before the next one is read
constexpr long NEAR = 1 << 17;  // bytes of a block of weights of which two stay in the second cache
constexpr int MIDDLE8 = 128;  // what is added to a weight in 8 bits to make it unsigned
constexpr float MOST_BYTE = 127;
constexpr std::int32_t TINY = 0x08000000;  // the bits of 2^-111: inputs below it count as zero

// Rows of a tile, and registers for its sums of integers.
#if defined(__AVX512F__)
constexpr long TILE_ROWS = 8, REGISTERS = 16;
#else
constexpr long TILE_ROWS = 4, REGISTERS = 8;
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
    float *halves;            // [rows, blocks, 2]: the same of its halves
    float *totals;            // [rows]: of all inputs

    static long row_bytes(long in) { return ((in + 63) / 64 | 1) * 64; }

    static long num_bytes(long rows, long in) {
        const long blocks = (in + BLOCK - 1) / BLOCK;
        return (rows * (row_bytes(in) + (4 * blocks + 1) * long(sizeof(float))) + 63) / 64 * 64;
    }

    // `work` has num_bytes.
    Activations(char *work, long rows, long in)
        : in(in), blocks((in + BLOCK - 1) / BLOCK), stride(row_bytes(in)), bytes((std::int8_t *)work),
          scale((float *)(bytes + rows * stride)), sums(scale + rows * blocks), halves(sums + rows * blocks),
          totals(halves + 2 * rows * blocks) {}

    void fill_block(const bfloat16 *x, std::int8_t *to, long at) const {
        Words top = no_words();
        // The largest magnitude by its bits, so that what is not a number counts as larger than all others.
        UNROLL for (long i = 0; i < BLOCK; i += LANES)
            top = larger(top, magnitude_bits(load_bfloat16(x + i)));
        const std::int32_t bits = largest(top);
        float size;
        std::memcpy(&size, &bits, sizeof size);
        size = bits < TINY ? 1.0f : size / MOST_BYTE;
        const Floats inverse = spread(1.0f / size);
        std::int32_t all[2];
        UNROLL for (long half = 0; half < 2; half++) {
            Words sum = no_words();
            UNROLL for (long i = half * HALF; i < (half + 1) * HALF; i += LANES) {
                const Words whole = rounded(times(load_bfloat16(x + i), inverse));
                store_bytes(to + i, whole);
                sum = plus(sum, whole);
            }
            all[half] = total(sum);
            halves[2 * at + half] = size * float(all[half]);
        }
        scale[at] = size;
        sums[at] = size * float(all[0] + all[1]);
    }

    // One row of `x`.
    void fill(const bfloat16 *x, long row) const {
        float sum = 0;
        for (long block = 0; block < blocks; block++) {
            const long from = block * BLOCK, left = in - from, at = row * blocks + block;
            bfloat16 filled[BLOCK] = {};
            if (left < BLOCK) std::memcpy(filled, x + from, left * sizeof *x);
            fill_block(left < BLOCK ? filled : x + from, bytes + row * stride + from, at);
            sum += sums[at];
        }
        totals[row] = sum;
    }
};

// The rows of a tile, whose numbers of one place lie side by side: all are found from one address.
struct Rows {
    long row, count, in, blocks;
    const four *words;    // [in / 4, rows]
    const float *scale;   // [blocks, rows]
    const float *sums;    // [blocks parts, rows], of blocks or of their halves
    const float *totals;  // [rows]

    static long row_bytes(const Activations &x, long parts) { return x.blocks * (BLOCK + 4 + 4 * parts); }

    Rows() = default;
    // `work` has `count` row_bytes.
    Rows(const Activations &x, long row, long count, long parts, char *work)
        : row(row), count(count), in(x.in), blocks(x.blocks), totals(x.totals + row) {
        const float *from = (parts == 1 ? x.sums : x.halves) + row * blocks * parts;
        const four *bytes = (const four *)(x.bytes + row * x.stride);
        scale = x.scale + row * blocks, sums = from, words = bytes;
        if (count == 1) return;
        words = beside(bytes, x.stride / 4, blocks * BLOCK / 4, count, (four *)work);
        scale = beside(scale, blocks, blocks, count, (float *)(words + blocks * BLOCK / 4 * count));
        sums = beside(from, blocks * parts, blocks * parts, count, (float *)(scale + blocks * count));
    }

    // [count, size], a row `stride` behind the one before it, to [size, count].
    template <class T>
    static const T *beside(const T *rows, long stride, long size, long count, T *to) {
        for (long i = 0; i < size; i++)
            for (long row = 0; row < count; row++) to[i * count + row] = rows[row * stride + i];
        return to;
    }
};

// A weight [out, in] in 8 or 4 bits; a number is (value - middle) * scale + zero.
struct Weight {
    const std::uint8_t *packed;
    const void *scales;
    const std::int8_t *steps;  // of Form::STEPS
    Form form;
    long bits, group, out, in;
    float middle;
    bool zeros;                // whether there are any (Form::PER_ROW has none)

    explicit Weight(const Linear &linear)
        : packed((const std::uint8_t *)linear.weight), scales(linear.scales), steps((const std::int8_t *)linear.steps),
          form(Form(linear.form)), bits(linear.bits), group(linear.group), out(linear.out), in(linear.in),
          middle(float(linear.middle)), zeros(linear.zeros) {}

    long num_blocks() const { return (out + WIDTH - 1) / WIDTH; }
    const std::uint8_t *block(long i) const { return packed + i * WIDTH * in * bits / 8; }
    const bfloat16 *row_scales(long i) const { return (const bfloat16 *)scales + i * WIDTH; }
};

// Scales and zeros of a block of outputs, from a column on.
struct Scales {
    const Weight &weight;
    const char *numbers;  // of two bytes
    const std::int8_t *steps;
    long kinds;           // 2 with zeros, else 1

    Scales(const Weight &weight, long block, long column) : weight(weight), kinds(weight.zeros ? 2 : 1) {
        const long each = weight.form == STEPS ? SUPER : weight.group;
        numbers = (const char *)weight.scales + 2 * (block * kinds * WIDTH * ((weight.in + each - 1) / each) + column);
        steps = weight.steps + block * kinds * WIDTH * (weight.in / weight.group) + column;
    }

    // Of a group and LANES outputs.  Zeros take the middle in.
    void read(long group, long column, Floats &scale, Floats &zero) const {
        if (weight.form == PAIRS) {
            const bfloat16 *own = (const bfloat16 *)numbers + 2 * WIDTH * group + column;
            scale = load_bfloat16(own);
            zero = load_bfloat16(own + WIDTH);
        } else {
            const long place = weight.form == STEPS ? group * weight.group / SUPER : group;
            const std::uint16_t *own = (const std::uint16_t *)numbers + kinds * WIDTH * place + column;
            scale = load_float16(own);
            zero = weight.zeros ? load_float16(own + WIDTH) : no_floats();
            if (weight.form == STEPS) {
                const std::int8_t *step = steps + kinds * WIDTH * group + column;
                scale = times(scale, load_int8(step));
                if (weight.zeros) zero = times(zero, load_int8(step + WIDTH));
            }
        }
        zero = minus_times(scale, spread(weight.middle), zero);
    }
};

// Weights of later steps: a block in one pass reads on, one in several shares what `ahead` has.
template <int COUNT>
void fetch(const std::uint8_t *weight, Ahead &ahead) {
    if (COUNT * LANES == WIDTH || !ahead.bytes)
        fetch_ahead(weight, 4 * COUNT * LANES);
    else
        ahead.fetch();
}

// Tiles write [ROWS, WIDTH] float sums to `sums`.
template <int ROWS>
void tile8(const Rows &x, const Weight &weight, long block, float (*sums)[WIDTH], Ahead &ahead) {
    constexpr int COUNT = vectors(ROWS, ADDS_BYTES ? 1 : 2);  // by halves of bytes where bytes are not added
    constexpr long OUTPUTS = COUNT * LANES;
    for (long part = 0; part < WIDTH; part += OUTPUTS) {
        const std::uint8_t *w = weight.block(block) + 4 * part;
        const four *words = x.words;
        Floats results[COUNT][ROWS];
        UNROLL for (int v = 0; v < COUNT; v++) UNROLL for (int r = 0; r < ROWS; r++) results[v][r] = no_floats();
        for (long b = 0; b < x.blocks; b++) {
            const long from = b * BLOCK, to = from + BLOCK < x.in ? from + BLOCK : x.in;
            ByteSums low[COUNT][ROWS], high[COUNT][ROWS];
            for (long i = from; i < to; i += 4, w += 4 * WIDTH, words += ROWS) {
                fetch<COUNT>(w, ahead);
                UNROLL for (int v = 0; v < COUNT; v++) {
                    const Words stored = load_words(w + 4 * LANES * v);
                    UNROLL for (int r = 0; r < ROWS; r++) {
                        const Words inputs = spread_word(words[r]);
                        low[v][r].add(ADDS_BYTES ? stored : low_halves(stored), inputs);
                        if (!ADDS_BYTES) high[v][r].add(high_halves(stored), inputs);
                    }
                }
            }
            UNROLL for (int v = 0; v < COUNT; v++) UNROLL for (int r = 0; r < ROWS; r++) {
                const Words both = ADDS_BYTES ? low[v][r].whole() : plus(low[v][r].whole(), times16(high[v][r].whole()));
                const Floats scale = spread(x.scale[b * ROWS + r]);
                results[v][r] = times_plus(as_floats(both), scale, results[v][r]);
            }
        }
        UNROLL for (int v = 0; v < COUNT; v++) {
            const Floats scale = load_bfloat16(weight.row_scales(block) + part + LANES * v);
            UNROLL for (int r = 0; r < ROWS; r++) {
                const Floats sum = minus_times(spread(x.totals[r]), spread(MIDDLE8), results[v][r]);
                store_floats(sums[r] + part + LANES * v, times(sum, scale));
            }
        }
    }
}

// Weights with scales for each group of inputs; PARTS groups share a block of activations.
template <int ROWS, int BITS, int PARTS>
void tile_groups(const Rows &x, const Weight &weight, long block, float (*sums)[WIDTH], Ahead &ahead) {
    constexpr bool SPLIT = BITS == 8 && !ADDS_BYTES;  // by halves of bytes where bytes are not added
    constexpr int COUNT = vectors(ROWS, SPLIT ? 2 : 1);
    constexpr long OUTPUTS = COUNT * LANES, EACH = 32 / BITS, SIZE = BLOCK / PARTS;
    const long shared = PARTS == 1 ? weight.group / BLOCK : 1;  // blocks of activations that share scales of weights
    for (long part = 0; part < WIDTH; part += OUTPUTS) {
        const std::uint8_t *w = weight.block(block) + 4 * part;
        const four *words = x.words;
        const Scales scales(weight, block, part);
        Floats results[COUNT][ROWS];
        UNROLL for (int v = 0; v < COUNT; v++) UNROLL for (int r = 0; r < ROWS; r++) results[v][r] = no_floats();
        for (long g = 0; g < x.blocks * PARTS; g++) {
            ByteSums low[COUNT][ROWS], high[COUNT][ROWS];
            for (long i = 0; i < SIZE; i += EACH, w += 4 * WIDTH, words += ROWS * EACH / 4) {
                fetch<COUNT>(w, ahead);
                Words first[COUNT], second[COUNT];
                UNROLL for (int v = 0; v < COUNT; v++) {
                    const Words stored = load_words(w + 4 * LANES * v);
                    first[v] = BITS == 8 && ADDS_BYTES ? stored : low_halves(stored);
                    if (BITS == 4 || SPLIT) second[v] = high_halves(stored);
                }
                UNROLL for (int r = 0; r < ROWS; r++) {
                    const Words inputs = spread_word(words[r]);
                    UNROLL for (int v = 0; v < COUNT; v++) low[v][r].add(first[v], inputs);
                    if (SPLIT) UNROLL for (int v = 0; v < COUNT; v++) high[v][r].add(second[v], inputs);
                    if (BITS == 8) continue;
                    const Words next = spread_word(words[ROWS + r]);
                    UNROLL for (int v = 0; v < COUNT; v++) low[v][r].add(second[v], next);
                }
            }
            UNROLL for (int v = 0; v < COUNT; v++) {
                Floats scale, zero;
                scales.read(g / shared, LANES * v, scale, zero);
                UNROLL for (int r = 0; r < ROWS; r++) {
                    const Words both = SPLIT ? plus(low[v][r].whole(), times16(high[v][r].whole())) : low[v][r].whole();
                    const Floats sum = times(as_floats(both), spread(x.scale[g / PARTS * ROWS + r]));
                    results[v][r] = times_plus(sum, scale, times_plus(spread(x.sums[g * ROWS + r]), zero, results[v][r]));
                }
            }
        }
        UNROLL for (int v = 0; v < COUNT; v++) UNROLL for (int r = 0; r < ROWS; r++)
            store_floats(sums[r] + part + LANES * v, results[v][r]);
    }
}

typedef void (*Tile)(const Rows &, const Weight &, long, float (*)[WIDTH], Ahead &);

template <template <int> class T>
struct Tiles {
    static constexpr Tile OF[] = {nullptr, T<1>::run, T<2>::run, T<3>::run, T<4>::run,
#if defined(__AVX512F__)
                                  T<5>::run, T<6>::run, T<7>::run, T<8>::run
#endif
    };
};

template <int ROWS>
struct ByRows {
    static constexpr Tile run = tile8<ROWS>;
};
template <int BITS, int PARTS>
struct ByGroups {
    template <int ROWS>
    struct Of {
        static constexpr Tile run = tile_groups<ROWS, BITS, PARTS>;
    };
};

// Tiles of a weight, by their number of rows.
inline const Tile *tiles_of(const Weight &weight) {
    if (weight.form == PER_ROW) return Tiles<ByRows>::OF;
    const bool halves = weight.group < BLOCK;
    if (weight.bits == 8) return halves ? Tiles<ByGroups<8, 2>::Of>::OF : Tiles<ByGroups<8, 1>::Of>::OF;
    return halves ? Tiles<ByGroups<4, 2>::Of>::OF : Tiles<ByGroups<4, 1>::Of>::OF;
}

// One row of WIDTH sums, of which `width` are real, to where it belongs.
inline void finish(float *sums, const float *bias, const Outputs &y, long row, long column, long width) {
    alignas(64) bfloat16 narrow[WIDTH];
    const long at = row * y.stride + column;
    for (long i = 0; bias && i < width; i++) sums[i] += bias[column + i];
    for (long i = 0; y.residual && i < width; i++) sums[i] += widened(y.residual[at + i]);
    UNROLL for (long i = 0; i < WIDTH; i += LANES) store_bfloat16(narrow + i, load_floats(sums + i));
    std::memcpy(y.result + at, narrow, width * sizeof *narrow);
}

// Outputs `from` to `to` of x weight^T, in blocks of WIDTH.
inline void multiply(const Activations &x, long rows, const Weight &weight, const float *bias, const Outputs &y, long from,
                     long to) {
    const long most = rows < TILES_AT_ONCE * TILE_ROWS ? rows : TILES_AT_ONCE * TILE_ROWS;
    const long parts = weight.form != PER_ROW && weight.group < BLOCK ? 2 : 1, size = Rows::row_bytes(x, parts);
    const bool halved = !ADDS_BYTES && (weight.form == PER_ROW || weight.bits == 8);
    const Tile *tile = tiles_of(weight);
    static thread_local Kept kept;
    char *work = kept.of(most * size);
    // Without memory, tiles of one row: they need none, and have the same bits.
    const long tiles = work ? (rows + TILE_ROWS - 1) / TILE_ROWS : rows;
    alignas(64) float sums[TILE_ROWS][WIDTH];
    for (long chunk = 0; chunk < tiles; chunk += TILES_AT_ONCE) {
        const long end = chunk + TILES_AT_ONCE < tiles ? chunk + TILES_AT_ONCE : tiles, low = rows * chunk / tiles;
        Rows all[TILES_AT_ONCE];
        long passes = 0;
        for (long t = chunk; t < end; t++) {
            const long row = rows * t / tiles, count = rows * (t + 1) / tiles - row;
            all[t - chunk] = Rows(x, row, count, parts, work + (row - low) * size);
            passes += WIDTH / LANES / vectors(count, halved ? 2 : 1);
        }
        for (long block = from; block < to; block++) {
            const long column = block * WIDTH, width = weight.out - column < WIDTH ? weight.out - column : WIDTH;
            Ahead ahead = {(const char *)weight.block(block + 1), 0};
            if (block + 1 < to && ahead.at - (const char *)weight.block(block) <= NEAR) ahead.bytes = 4 * WIDTH / passes;
            for (long t = 0; t < end - chunk; t++) {
                tile[all[t].count](all[t], weight, block, sums, ahead);
                for (long r = 0; r < all[t].count; r++) finish(sums[r], bias, y, all[t].row + r, column, width);
            }
        }
    }
}

}  // namespace integers8
}  // namespace lanes
