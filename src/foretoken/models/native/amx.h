// Tiles of AMX: the CPU multiplies up to 16 rows of 64 bytes of activations by 16 outputs' weights in one instruction.
//
// A row of a product depends on that row of activations alone, so rows have the same bits in any company.  Weights lie as
// the other kernels have them: of a block of WIDTH outputs every line [WIDTH] of four bytes is a row of two tiles.
#pragma once

#if defined(__AMX_TILE__)

#include "linear.h"

namespace amx {

constexpr long ROWS = 16;         // of a tile
constexpr long BYTES_A_ROW = 64;
constexpr long LINE = 4 * WIDTH;  // bytes from one row of a tile of weights to the next
constexpr long TILE_BYTES_AHEAD = 8192;  // of weights that are asked for ahead of their turn

// What the tiles hold.  Sums are [rows, 16] numbers of four bytes, inputs [rows, 64] bytes, weights [16, 16] of four.
enum Tile { FIRST_LEFT = 0, FIRST_RIGHT = 1, SECOND_LEFT = 2, SECOND_RIGHT = 3, FIRST = 4, SECOND = 5, LEFT = 6, RIGHT = 7 };

struct alignas(64) Shapes {
    std::uint8_t palette = 1, start = 0, unused[14] = {};
    std::uint16_t bytes[16] = {};
    std::uint8_t rows[16] = {};

    // Of `first` and `second` rows of `depth` lines of inputs.
    Shapes(long first, long second, long depth) {
        for (int tile = 0; tile < 8; tile++) {
            bytes[tile] = tile == FIRST || tile == SECOND ? 4 * depth : BYTES_A_ROW;
            rows[tile] = tile >= LEFT ? depth : tile == FIRST || tile <= FIRST_RIGHT ? first : second;
        }
    }
};

// Rows in tiles, the larger ones first: a change of shape takes time.
struct Share {
    long first, count;

    Share(long rows, long tile, long tiles) {
        const long least = rows / tiles, more = rows % tiles;
        first = tile * least + (tile < more ? tile : more);
        count = least + (tile < more);
    }
};

// Tiles have shapes as long as this lives, each thread's its own; then they have again the shape that they had before:
// other libraries (llama.cpp's) give them one once in each thread, and threads are shared.
class Configured {
  public:
    // Of `depth` lines of inputs.
    explicit Configured(long depth) : depth(depth) { _tile_storeconfig(before); }
    ~Configured() { _tile_loadconfig(before); }

    // From here on tiles are for so many rows, at most 2 ROWS; up to ROWS both kinds of rows are of all of them.
    void take(long count) {
        if (count == rows) return;
        rows = count;
        const Shapes shapes(count < ROWS ? count : ROWS, count > ROWS ? count - ROWS : count, depth);
        _tile_loadconfig(&shapes);
    }

  private:
    alignas(64) std::uint8_t before[64];
    long depth, rows = 0;
};

// The instructions.  (The compiler's own take the numbers of tiles as text.)
template <int TILE>
inline void clear() {
    asm volatile("tilezero %%tmm%c0" : : "i"(TILE));
}
template <int TILE>
inline void load(const void *from, long line) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(line), "i"(TILE) : "memory");
}
template <int TILE>
inline void store(void *to, long line) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(line), "i"(TILE) : "memory");
}
// sums += a b of bfloat16 numbers; of signed bytes by bytes without a sign.
template <int SUMS, int A, int B>
inline void add_pairs() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(A), "i"(B));
}
template <int SUMS, int A, int B>
inline void add_fours() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(A), "i"(B));
}

}  // namespace amx

#endif
