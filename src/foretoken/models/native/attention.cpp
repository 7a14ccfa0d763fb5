// Attention of a few rows over cached bfloat16 keys and values.
//
// A row first lists the slots that it sees, then works in the order of that list, in float32: what it does not see
// takes no part, wherever it lies.  So a token inside a tree gets the bits that it gets in plain decoding.

#include "attention.h"

namespace {

constexpr long ONE_THREAD = 1 << 14;   // products of numbers that one thread makes before a second has woken up
constexpr float LEAST = -80;           // logarithm of a weight over the largest one, which is 1: float32 adds no e^-80 to it

// Weights [count], filled up to whole vectors with zeros, before they are divided by the sum that is returned.
template <int SIZE>
float weigh(const bfloat16 *query, Slots keys, const std::int32_t *seen, long count, float scale, float *weights) {
    constexpr int PARTS = SIZE / (2 * LANES);
    Words q[PARTS];
    UNROLL for (int part = 0; part < PARTS; part++) q[part] = load_words(query + 2 * LANES * part);
    const Floats least = spread(-__builtin_inff());
    Floats top = least;
    for (long from = 0; from < count; from += LANES) {
        Floats sums[LANES];
        UNROLL for (long i = 0; i < LANES; i++) {
            const bfloat16 *key = keys[seen[from + i < count ? from + i : from]];
            sums[i] = no_floats();
            UNROLL for (int part = 0; part < PARTS; part++)
                sums[i] = plus_pairs(sums[i], q[part], load_words(key + 2 * LANES * part));
        }
        const Floats scores = totals(sums) * spread(scale);
        top = larger(top, first_of(scores, count - from, least));
        store_floats(weights + from, scores);
    }
    // Smaller weights, and their products with values, would be denormal numbers, which take the CPU a hundred times as
    // long; trained models are full of them.
    const Floats most = spread(largest(top)), low = spread(LEAST);
    Floats sum = no_floats();
    for (long from = 0; from < count; from += LANES) {
        const Floats score = larger(low, load_floats(weights + from) - most);
        const Floats weight = first_of(exponential(score), count - from, no_floats());
        store_floats(weights + from, weight);
        sum = sum + weight;
    }
    return total(sum);
}

// `NUMBERS` of each head of result [HEADS, size], which is sums of weights [HEADS, room] times values over the sums of
// the weights.  A value is widened once for all heads.
template <int NUMBERS, int HEADS>
void mix(const float *weights, long room, const float *totals, Slots values, const std::int32_t *seen, long count,
         bfloat16 *result, long size) {
    constexpr int PARTS = NUMBERS / LANES;
    Floats sums[HEADS][PARTS];
    UNROLL for (int head = 0; head < HEADS; head++)
        UNROLL for (int part = 0; part < PARTS; part++) sums[head][part] = no_floats();
    for (long i = 0; i < count; i++) {
        const bfloat16 *value = values[seen[i]];
        Floats shares[HEADS];
        UNROLL for (int head = 0; head < HEADS; head++) shares[head] = spread(weights[head * room + i]);
        UNROLL for (int part = 0; part < PARTS; part++) {
            const Floats wide = load_bfloat16(value + LANES * part);
            UNROLL for (int head = 0; head < HEADS; head++)
                sums[head][part] = times_plus(shares[head], wide, sums[head][part]);
        }
    }
    UNROLL for (int head = 0; head < HEADS; head++) {
        const Floats share = spread(1.0f / totals[head]);
        UNROLL for (int part = 0; part < PARTS; part++)
            store_bfloat16(result + size * head + LANES * part, sums[head][part] * share);
    }
}

typedef float (*Weigh)(const bfloat16 *, Slots, const std::int32_t *, long, float, float *);
typedef void (*Mix)(const float *, long, const float *, Slots, const std::int32_t *, long, bfloat16 *, long);
const Weigh WEIGH[9] = {nullptr, weigh<32>, weigh<64>, weigh<96>, weigh<128>, nullptr, nullptr, nullptr, weigh<256>};
#define HEADS_OF(numbers) {nullptr, mix<numbers, 1>, mix<numbers, 2>, mix<numbers, 3>}
static_assert(HEADS_AT_ONCE == 3, "as many as the table has");
// Numbers whose sums registers hold for all heads, by 32 numbers of a head.
#if defined(__AVX512F__)
constexpr long MOST_NUMBERS = 128;
const Mix MIX[5][4] = {{}, HEADS_OF(32), HEADS_OF(64), HEADS_OF(96), HEADS_OF(128)};
#else
constexpr long MOST_NUMBERS = 32;
const Mix MIX[2][4] = {{}, HEADS_OF(32)};
#endif

}  // namespace

long listed(const bfloat16 *mask, long slots, std::int32_t *seen) {
    long count = 0;
    Words numbers = count_up();
    for (long slot = 0; slot < slots; slot += LANES) {
        const long left = slots - slot;
        const unsigned all = left < LANES ? (1u << left) - 1 : (1u << LANES) - 1;
        const unsigned open = mask ? zeros(mask + slot, left) : all;
        if (open == all)
            store_words(seen + count, numbers);
        else
            store_chosen(seen + count, numbers, open);
        numbers = plus(numbers, spread_word(LANES));
        count += __builtin_popcount(open);
    }
    return count;
}

void attend(const bfloat16 *query, long stride, long heads, Slots keys, Slots values, const std::int32_t *seen,
            long count, long size, float scale, float *weights, bfloat16 *result) {
    const long room = count + 16;
    float totals[HEADS_AT_ONCE];
    for (long head = 0; head < heads; head++)
        totals[head] = WEIGH[size / 32](query + head * stride, keys, seen, count, scale, weights + head * room);
    const long numbers = size < MOST_NUMBERS ? size : MOST_NUMBERS;
    for (long from = 0; from < size; from += numbers)
        MIX[numbers / 32][heads](weights, room, totals, {values.start + from, values.stride}, seen, count, result + from, size);
}

// result [batch, rows, heads, size] of queries, keys, values [batch, heads or groups, rows or slots, size], which are
// `strides` apart in their first three dimensions (query, keys, values), and mask [batch, rows, slots] or null, whose
// rows are `mask_strides` apart.  `work` holds 2 (slots + 16) numbers of 4 bytes for each thread.
extern "C" void attention(const bfloat16 *query, const bfloat16 *keys, const bfloat16 *values, const long *strides,
                          const bfloat16 *mask, long mask_batch, long mask_row, long batch, long heads, long groups,
                          long rows, long slots, long size, double scale, bfloat16 *result, float *work) {
    const long tasks = batch * rows * groups, each = heads / groups, room = slots + 16;
#pragma omp parallel if (tasks * each * slots * size > ONE_THREAD)
    {
        const long thread = omp_get_thread_num(), threads = omp_get_num_threads();
        float *weights = work + 2 * room * thread;
        std::int32_t *seen = (std::int32_t *)(weights + room);
        // A thread has neighbouring rows of one head, whose keys and values then are in its cache.
        for (long task = tasks * thread / threads; task < tasks * (thread + 1) / threads; task++) {
            const long text = task / (rows * groups), group = task / rows % groups, row = task % rows;
            const long count = listed(mask ? mask + text * mask_batch + row * mask_row : nullptr, slots, seen);
            const Slots k = {keys + text * strides[3] + group * strides[4], strides[5]};
            const Slots v = {values + text * strides[6] + group * strides[7], strides[8]};
            for (long head = group * each; head < (group + 1) * each; head++) {
                const bfloat16 *q = query + text * strides[0] + head * strides[1] + row * strides[2];
                bfloat16 *place = result + ((text * rows + row) * heads + head) * size;
                attend(q, 0, 1, k, v, seen, count, size, float(scale), weights, place);
            }
        }
    }
}
