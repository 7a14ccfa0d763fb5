// Attention of a few rows over cached bfloat16 keys and values.
//
// A row first lists the slots that it sees, then works in the order of that list, in float32: what it does not see
// takes no part, wherever it lies.  So a token inside a tree gets the bits that it gets in plain decoding.

#include "attention.h"

#include "attention_amx.h"
#include "memory.h"

namespace {

constexpr long ONE_THREAD = 1 << 14;   // products of numbers that one thread makes before a second has woken up

#if !defined(__AMX_BF16__)

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
static_assert(QUERIES_AT_ONCE == 3, "as many as the table has");
// Numbers whose sums registers hold for all heads, by 32 numbers of a head.
#if defined(__AVX512F__)
constexpr long MOST_NUMBERS = 128;
const Mix MIX[5][4] = {{}, HEADS_OF(32), HEADS_OF(64), HEADS_OF(96), HEADS_OF(128)};
#else
constexpr long MOST_NUMBERS = 32;
const Mix MIX[2][4] = {{}, HEADS_OF(32)};
#endif

#endif

thread_local Kept kept;

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

#if defined(__AMX_BF16__)

long attention_work(long slots) { return whole(slots) / 2 + whole(slots) * LANES; }

void attend(const Queries &queries, Slots keys, Slots values, const Seen &seen, long size, float scale, float *work,
            bfloat16 *result, long stride) {
    typedef void (*Tile)(const Queries &, Slots, Slots, const Seen &, float, float *, bfloat16 *, long);
    static const Tile TILE[9] = {nullptr, attend_tile<32>, attend_tile<64>, attend_tile<96>, attend_tile<128>,
                                 nullptr, nullptr, nullptr, attend_tile<256>};
    TILE[size / 32](queries, keys, values, seen, scale, work, result, stride);
}

#else

long attention_work(long slots) { return QUERIES_AT_ONCE * (slots + SPARE); }

void attend(const Queries &queries, Slots keys, Slots values, const Seen &seen, long size, float scale, float *work,
            bfloat16 *result, long) {
    const long count = *seen.counts, room = count + SPARE;
    float totals[QUERIES_AT_ONCE];
    for (long head = 0; head < queries.heads; head++)
        totals[head] = WEIGH[size / 32](queries[head], keys, seen.slots, count, scale, work + head * room);
    const long numbers = size < MOST_NUMBERS ? size : MOST_NUMBERS;
    for (long from = 0; from < size; from += numbers)
        MIX[numbers / 32][queries.heads](work, room, totals, {values.start + from, values.stride, values.count}, seen.slots,
                                         count, result + from, size);
}

#endif

// result [batch, rows, heads, size] of queries, keys, values [batch, heads or groups, rows or slots, size], which are
// `strides` apart in their first three dimensions (query, keys, values), and mask [batch, rows, slots] or null, whose
// rows are `mask_strides` apart.  `failed` becomes 1 where there is not enough memory.
extern "C" void attention(const bfloat16 *query, const bfloat16 *keys, const bfloat16 *values, const long *strides,
                          const bfloat16 *mask, long mask_batch, long mask_row, long batch, long heads, long groups,
                          long rows, long slots, long size, double scale, bfloat16 *result, long threads, long *failed) {
    const long each = heads / groups, together = rows_at_once(each), tiles = (rows + together - 1) / together;
    const long chunks = (each + QUERIES_AT_ONCE - 1) / QUERIES_AT_ONCE, tasks = batch * groups * tiles, room = slots + SPARE;
    const long numbers = attention_work(slots) + together * room, apart = (4 * numbers + 127) / 64 * 64;
    char *const work = kept.of(threads * apart);
    *failed = !work;
    if (!work) return;
#pragma omp parallel num_threads(threads) if (batch * rows * heads * slots * size > ONE_THREAD)
    {
        const Attending attending;
        const long thread = omp_get_thread_num(), all = omp_get_num_threads();
        float *weights = (float *)(work + thread * apart);
        std::int32_t *seen = (std::int32_t *)(weights + attention_work(slots));
        // A thread has neighbouring rows of one head, whose keys and values then are in its cache.
        for (long task = tasks * thread / all; task < tasks * (thread + 1) / all; task++) {
            const long sequence = task / (tiles * groups), group = task / tiles % groups, row = task % tiles * together;
            const long count = rows - row < together ? rows - row : together;
            const bfloat16 *masks = mask ? mask + sequence * mask_batch + row * mask_row : nullptr;
            long counts[QUERIES_AT_ONCE];
            for (long i = 0; i < count; i++)
                counts[i] = listed(masks ? masks + i * mask_row : nullptr, slots, seen + i * room);
            const Slots k = {keys + sequence * strides[3] + group * strides[4], strides[5], slots};
            const Slots v = {values + sequence * strides[6] + group * strides[7], strides[8], slots};
            for (long chunk = 0; chunk < chunks; chunk++) {
                const long first = each * chunk / chunks, head = group * each + first;
                const Queries queries = {query + sequence * strides[0] + head * strides[1] + row * strides[2], strides[2],
                                         strides[1], count, each * (chunk + 1) / chunks - first};
                attend(queries, k, v, {seen, room, counts}, size, float(scale), weights,
                       result + ((sequence * rows + row) * heads + head) * size, heads * size);
            }
        }
    }
}
