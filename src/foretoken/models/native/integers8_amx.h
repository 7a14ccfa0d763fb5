// Products with activations of 8 bits for many rows, in tiles of AMX.
//
// The sums of integers of a group of inputs come from tiles; all else is done in the order of integers8.h, so that a row
// has the same bits whichever of the two multiplies it.  Tiles of up to 32 rows take turns at a block of weights.
#pragma once

#include "amx.h"
#include "integers8.h"

#if defined(__AMX_INT8__)

namespace lanes {
namespace integers8 {

constexpr long FEWEST_ROWS = 10;              // rows that tiles multiply sooner than vectors do
constexpr long ROWS_AT_ONCE = 2 * amx::ROWS;  // rows that share weights
constexpr long GROUPS_AT_ONCE = 4;            // groups of inputs whose integers become numbers together
constexpr long AMX_TILES_AT_ONCE = 2;         // that share a block of weights: more rows' bytes leave the nearer cache

// Sums of a block of WIDTH outputs: the integers of a few groups, and the numbers.
struct Sums {
    alignas(64) std::int32_t whole[GROUPS_AT_ONCE][ROWS_AT_ONCE][WIDTH];
    alignas(64) float numbers[ROWS_AT_ONCE][WIDTH];
    alignas(64) std::uint8_t unpacked[GROUPS_AT_ONCE][BLOCK / 4][amx::LINE];  // weights in 4 bits as bytes
};

// Weights of one group of SIZE inputs in 4 bits as bytes.
template <long SIZE>
void unpack(const std::uint8_t *w, std::uint8_t (*lines)[amx::LINE]) {
    UNROLL for (long line = 0; line < SIZE / 8; line++) UNROLL for (long at = 0; at < amx::LINE; at += 4 * LANES) {
        const Words stored = load_words(w + amx::LINE * line + at);
        store_words(lines[2 * line] + at, low_halves(stored));
        store_words(lines[2 * line + 1] + at, high_halves(stored));
    }
}

// The integers of up to 16 rows of one group, by the weights that LEFT and RIGHT hold.
template <int ON_LEFT, int ON_RIGHT, int INPUTS>
void add_rows(const std::int8_t *place, long stride, std::int32_t (*sums)[WIDTH]) {
    amx::clear<ON_LEFT>();
    amx::clear<ON_RIGHT>();
    amx::load<INPUTS>(place, stride);
    amx::add_fours<ON_LEFT, INPUTS, amx::LEFT>();
    amx::add_fours<ON_RIGHT, INPUTS, amx::RIGHT>();
    amx::store<ON_LEFT>(sums[0], 4 * WIDTH);
    amx::store<ON_RIGHT>(sums[0] + 16, 4 * WIDTH);
}

// The integers of `count` groups of SIZE inputs from `place` on.
template <int BITS, long SIZE, bool TWO>
void add_groups(const std::int8_t *place, long stride, const std::uint8_t *w, long count, Sums &sums) {
    constexpr long BYTES = SIZE * WIDTH * BITS / 8;
    for (long k = 0; k < count; k++) {
        fetch_ahead((const char *)w + k * BYTES, BYTES, amx::TILE_BYTES_AHEAD);
        if (BITS == 4) unpack<SIZE>(w + k * BYTES, sums.unpacked[k]);
    }
    for (long k = 0; k < count; k++, place += SIZE) {
        const void *weights = BITS == 4 ? sums.unpacked[k][0] : w + k * BYTES;
        amx::load<amx::LEFT>(weights, amx::LINE);
        amx::load<amx::RIGHT>((const char *)weights + 64, amx::LINE);
        if (TWO || k % 2 == 0)
            add_rows<amx::FIRST_LEFT, amx::FIRST_RIGHT, amx::FIRST>(place, stride, sums.whole[k]);
        if (TWO)
            add_rows<amx::SECOND_LEFT, amx::SECOND_RIGHT, amx::SECOND>(place + amx::ROWS * stride, stride,
                                                                      sums.whole[k] + amx::ROWS);
        else if (k % 2)
            add_rows<amx::SECOND_LEFT, amx::SECOND_RIGHT, amx::SECOND>(place, stride, sums.whole[k]);
    }
}

// Numbers of `count` groups from `g` on, of weights with scales for each group.
template <int PARTS>
void add_scaled(const Activations &x, long row, long rows, const Scales (&scales)[2], long shared, long g, long count,
                Sums &sums) {
    Floats scale[GROUPS_AT_ONCE][2], zero[GROUPS_AT_ONCE][2];
    for (long k = 0; k < count; k++) UNROLL for (int v = 0; v < 2; v++)
        scales[v].read((g + k) / shared, 0, scale[k][v], zero[k][v]);
    for (long r = 0; r < rows; r++) {
        Floats numbers[2] = {load_floats(sums.numbers[r]), load_floats(sums.numbers[r] + LANES)};
        for (long k = 0; k < count; k++) {
            const long at = (row + r) * x.blocks + (g + k) / PARTS;
            const Floats inputs = spread(PARTS == 1 ? x.sums[at] : x.halves[2 * at + (g + k) % PARTS]);
            UNROLL for (int v = 0; v < 2; v++) {
                const Floats sum = times(as_floats(load_words(sums.whole[k][r] + LANES * v)), spread(x.scale[at]));
                numbers[v] = times_plus(sum, scale[k][v], times_plus(inputs, zero[k][v], numbers[v]));
            }
        }
        UNROLL for (int v = 0; v < 2; v++) store_floats(sums.numbers[r] + LANES * v, numbers[v]);
    }
}

// The same for weights with a scale for each output, which comes last.
inline void add_plain(const Activations &x, long row, long rows, long g, long count, Sums &sums) {
    for (long r = 0; r < rows; r++) UNROLL for (int v = 0; v < 2; v++) {
        Floats numbers = load_floats(sums.numbers[r] + LANES * v);
        for (long k = 0; k < count; k++) {
            const Floats sum = as_floats(load_words(sums.whole[k][r] + LANES * v));
            numbers = times_plus(sum, spread(x.scale[(row + r) * x.blocks + g + k]), numbers);
        }
        store_floats(sums.numbers[r] + LANES * v, numbers);
    }
}

inline void end_plain(const Activations &x, long row, long rows, const bfloat16 *scales, Sums &sums) {
    for (long r = 0; r < rows; r++) UNROLL for (int v = 0; v < 2; v++) {
        const Floats numbers = load_floats(sums.numbers[r] + LANES * v);
        const Floats sum = minus_times(spread(x.totals[row + r]), spread(MIDDLE8), numbers);
        store_floats(sums.numbers[r] + LANES * v, times(sum, load_bfloat16(scales + LANES * v)));
    }
}

// Rows `row` to `row + rows` of one block of outputs.
template <int BITS, int PARTS, bool TWO>
void tile_amx(const Activations &x, long row, long rows, const Weight &weight, long block, Sums &sums) {
    constexpr long SIZE = BLOCK / PARTS;
    const bool plain = weight.form == PER_ROW;
    const long groups = x.blocks * PARTS, shared = PARTS == 1 ? weight.group / BLOCK : 1;
    const Scales scales[2] = {Scales(weight, block, 0), Scales(weight, block, LANES)};
    const std::uint8_t *w = weight.block(block);
    std::memset(sums.numbers, 0, rows * sizeof sums.numbers[0]);
    for (long g = 0; g < groups; g += GROUPS_AT_ONCE) {
        const long count = groups - g < GROUPS_AT_ONCE ? groups - g : GROUPS_AT_ONCE;
        add_groups<BITS, SIZE, TWO>(x.bytes + row * x.stride + g * SIZE, x.stride, w, count, sums);
        w += count * SIZE * WIDTH * BITS / 8;
        if (plain)
            add_plain(x, row, rows, g, count, sums);
        else
            add_scaled<PARTS>(x, row, rows, scales, shared, g, count, sums);
    }
    if (plain) end_plain(x, row, rows, weight.row_scales(block), sums);
}

typedef void (*AmxTile)(const Activations &, long, long, const Weight &, long, Sums &);

template <bool TWO>
AmxTile amx_tile_of(const Weight &weight) {
    const bool halves = weight.form != PER_ROW && weight.group < BLOCK;
    if (weight.bits == 8) return halves ? tile_amx<8, 2, TWO> : tile_amx<8, 1, TWO>;
    return halves ? tile_amx<4, 2, TWO> : tile_amx<4, 1, TWO>;
}

// Whether these products are made here.
inline bool takes_amx(long rows, const Weight &weight) { return rows >= FEWEST_ROWS && weight.in % BLOCK == 0; }

// Outputs `from` to `to` of x weight^T, in blocks of WIDTH.
inline void multiply_amx(const Activations &x, long rows, const Weight &weight, const float *bias, const Outputs &y,
                         long from, long to) {
    const long tiles = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    const long depth = (weight.form != PER_ROW && weight.group < BLOCK ? 16 : 32) / 4;
    const AmxTile one = amx_tile_of<false>(weight), two = amx_tile_of<true>(weight);
    amx::Configured shapes(depth);
    Sums sums;
    for (long chunk = 0; chunk < tiles; chunk += AMX_TILES_AT_ONCE)
        for (long block = from; block < to; block++) {
            const long column = block * WIDTH, width = weight.out - column < WIDTH ? weight.out - column : WIDTH;
            for (long t = chunk; t < tiles && t < chunk + AMX_TILES_AT_ONCE; t++) {
                const amx::Share own(rows, t, tiles);
                shapes.take(own.count);
                (own.count > amx::ROWS ? two : one)(x, own.first, own.count, weight, block, sums);
                for (long r = 0; r < own.count; r++) finish(sums.numbers[r], bias, y, own.first + r, column, width);
            }
        }
}

}  // namespace integers8
}  // namespace lanes

#endif
