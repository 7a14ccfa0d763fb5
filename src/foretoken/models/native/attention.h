// Attention of a row over the slots that it sees.
#pragma once

#include "amx.h"
#include "lanes.h"

// Keys or values of one head: `count` slots, `stride` numbers apart.
struct Slots {
    const bfloat16 *start;
    long stride, count;

    const bfloat16 *operator[](long slot) const { return start + slot * stride; }
};

// Queries [rows, heads, size] of neighbouring rows of a sequence that share keys and values.
struct Queries {
    const bfloat16 *start;
    long row, head;  // numbers from one to the next
    long rows, heads;

    const bfloat16 *operator[](long query) const { return start + query / heads * row + query % heads * head; }
};

// The slots that each of these rows sees, in ascending order: `counts[row]` numbers, `room` from one row to the next.
struct Seen {
    const std::int32_t *slots;
    long room;
    const long *counts;
};

constexpr float LEAST = -80;  // logarithm of a weight over the largest one, which is 1: float32 adds no e^-80 to it
constexpr long SPARE = 16;     // slots that a list and a row of weights have room for behind the last

// Slots that a row sees, and how many: those where its mask is zero, all without a mask.  `seen` holds SPARE more.
long listed(const bfloat16 *mask, long slots, std::int32_t *seen);

#if defined(__AMX_BF16__)
constexpr long QUERIES_AT_ONCE = 16;  // a lane for each
#else
constexpr long QUERIES_AT_ONCE = 3;   // of one row: as many sums as registers hold, of heads of 128 numbers
#endif

// Rows that attend together where so many heads share keys and values: none do in a stack that only stores these.
inline long rows_at_once(long heads) {
    const bool several = QUERIES_AT_ONCE == LANES && heads > 0 && heads < LANES;
    return several ? LANES / heads : 1;
}

// Numbers of 4 bytes that a thread works with.
long attention_work(long slots);

// What a thread needs as long as it attends.
#if defined(__AMX_BF16__)
struct Attending {
    amx::Configured tiles{16};

    Attending() { tiles.take(2 * amx::ROWS); }
};
#else
struct Attending {};
#endif

// result [rows, heads, size], rows `stride` apart, of at most QUERIES_AT_ONCE queries of rows_at_once rows; size is 32, 64,
// 96, 128 or 256.  The same bits whichever queries are taken together.
void attend(const Queries &queries, Slots keys, Slots values, const Seen &seen, long size, float scale, float *work,
            bfloat16 *result, long stride);
