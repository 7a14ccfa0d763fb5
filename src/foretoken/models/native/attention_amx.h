// Attention of up to 16 queries at once, their scores in tiles of AMX.
//
// Each lane of a vector is one query's.  A lane adds up its slots in ascending order, and a slot that it does not see
// adds nothing, so a query's bits depend on what it sees alone, as attention.h promises.
#pragma once

#include "amx.h"
#include "attention.h"

#if defined(__AMX_BF16__)

namespace {

constexpr long SLOTS = 32;         // that are weighed and mixed together, in the nearest cache
constexpr long FEW_QUERIES = 3;    // queries that are weighed one by one, over values as they are stored
constexpr long QUERIES_IN_REGISTERS = 6, NUMBERS_IN_REGISTERS = 64;
static_assert(QUERIES_AT_ONCE == LANES && SLOTS == 2 * amx::ROWS, "a lane for each query, two tiles of keys");

// Which of the queries see a slot, in bits, for slots [start, stop).
struct Visible {
    std::uint16_t *queries;
    long start, stop;

    Words bits(long slot) const { return load_words(queries + slot); }
    bool nobody(long slot) const { return !_mm512_test_epi16_mask(bits(slot), bits(slot)); }
    bool everybody(long slot, std::uint16_t all) const {
        return !_mm512_cmpneq_epi16_mask(bits(slot), _mm512_set1_epi16(all));
    }
};

inline long whole(long slots) { return (slots + SLOTS - 1) / SLOTS * SLOTS; }

// The bits of rows with `heads` queries each, from their lists, by runs of neighbouring slots.
inline Visible visible_of(const Seen &seen, long rows, long heads, std::uint16_t *queries) {
    long start = 0, stop = 0;
    for (long row = 0; row < rows; row++) {
        const long count = seen.counts[row];
        if (!count) continue;
        const std::int32_t *slots = seen.slots + row * seen.room;
        start = stop && start < slots[0] ? start : slots[0];
        stop = stop > slots[count - 1] + 1 ? stop : slots[count - 1] + 1;
    }
    start = start / SLOTS * SLOTS;
    stop = whole(stop);
    std::memset(queries + start, 0, (stop - start) * sizeof *queries);
    for (long row = 0; row < rows; row++) {
        const std::int32_t *slots = seen.slots + row * seen.room;
        const std::uint16_t bits = ((1 << heads) - 1) << row * heads;
        for (long from = 0, count = seen.counts[row]; from < count;) {
            long low = from + 1, high = count;  // the end of the run lies in [low, high]
            while (low < high) {
                const long middle = (low + high) / 2;
                if (slots[middle] - slots[from] == middle - from)
                    low = middle + 1;
                else
                    high = middle;
            }
            for (long slot = slots[from]; slot < slots[from] + (low - from); slot++) queries[slot] |= bits;
            from = low;
        }
    }
    return {queries, start, stop};
}

// Asks for the block of slots that comes next: the CPU does not look so far ahead by itself.
template <int SIZE>
void fetch_slots(Slots from, long slot) {
    for (long i = 0; i < SLOTS; i++)
        UNROLL for (long at = 0; at < SIZE; at += 32) __builtin_prefetch(from[slot + i] + at);
}

// Products [slots, queries] of queries and keys.  (In a loop of its own: what waits for tiles waits long.)
template <int SIZE>
void multiply(const std::int32_t (*queries)[16][LANES], Slots keys, const Visible &visible, float *products) {
    alignas(64) bfloat16 last[SLOTS][SIZE];
    for (long slot = visible.start; slot < visible.stop; slot += SLOTS, products += SLOTS * LANES) {
        if (visible.nobody(slot)) continue;
        const bfloat16 *key = keys[slot];
        long stride = keys.stride;
        if (slot + SLOTS > keys.count) {  // tiles are whole: what lies behind the last slot may be nobody's memory
            for (long i = 0; i < keys.count - slot; i++) std::memcpy(last[i], keys[slot + i], sizeof last[i]);
            key = last[0];
            stride = SIZE;
        }
        fetch_slots<SIZE>(keys, slot + SLOTS);
        amx::clear<amx::FIRST_LEFT>();
        amx::clear<amx::SECOND_LEFT>();
        for (long part = 0; part < SIZE / 32; part++) {
            amx::load<amx::LEFT>(queries[part], 64);
            amx::load<amx::FIRST>(key + 32 * part, 2 * stride);
            amx::load<amx::SECOND>(key + 32 * part + amx::ROWS * stride, 2 * stride);
            amx::add_pairs<amx::FIRST_LEFT, amx::FIRST, amx::LEFT>();
            amx::add_pairs<amx::SECOND_LEFT, amx::SECOND, amx::LEFT>();
        }
        amx::store<amx::FIRST_LEFT>(products, 64);
        amx::store<amx::SECOND_LEFT>(products + amx::ROWS * LANES, 64);
    }
}

// Each query's largest score over the slots that it sees.
inline Floats largest_of(const float *products, const Visible &visible, Floats scale) {
    Floats top[4];
    for (Floats &part : top) part = spread(-__builtin_inff());
    for (long slot = visible.start; slot < visible.stop; slot += SLOTS, products += SLOTS * LANES) {
        if (visible.nobody(slot)) continue;
        UNROLL for (long i = 0; i < SLOTS; i++) {
            const Floats score = load_floats(products + i * LANES) * scale;
            top[i % 4] = _mm512_mask_max_ps(top[i % 4], visible.queries[slot + i], top[i % 4], score);
        }
    }
    return larger(larger(top[0], top[1]), larger(top[2], top[3]));
}

// Weights of SLOTS slots, and how far apart those of a slot's queries and of a query's slots are.
struct Weights {
    alignas(64) float numbers[SLOTS * LANES];
    long query, slot;

    float at(long query_, long slot_) const { return numbers[query_ * query + slot_ * slot]; }

    // From products [SLOTS, queries], and their sums by query.
    void make(const float *products, Floats scale, Floats top, const std::uint16_t *visible, Floats &sums) {
        query = 1, slot = LANES;
        UNROLL for (long i = 0; i < SLOTS; i++) {
            const Floats weight = weight_of(load_floats(products + i * LANES) * scale, top, visible[i]);
            store_floats(numbers + i * LANES, weight);
            sums = sums + weight;
        }
    }
    // The same of a few queries: a vector has the slots of one.
    void make_few(const float *products, Floats scale, const float *tops, const std::uint16_t *visible, long count,
                  float *sums) {
        query = SLOTS, slot = 1;
        const Words steps = _mm512_mullo_epi32(count_up(), spread_word(LANES));
        for (long q = 0; q < count; q++)
            UNROLL for (long half = 0; half < SLOTS; half += LANES) {
                const __m256i bits = _mm256_loadu_si256((const __m256i *)(visible + half));
                const Floats score = _mm512_i32gather_ps(steps, products + half * LANES + q, 4) * scale;
                const __mmask16 sees = _mm256_test_epi16_mask(bits, _mm256_set1_epi16(1 << q));
                store_floats(numbers + q * SLOTS + half, weight_of(score, spread(tops[q]), sees));
            }
        for (long i = 0; i < SLOTS; i++)
            for (long q = 0; q < count; q++) sums[q] += numbers[q * SLOTS + i];
    }

  private:
    static Floats weight_of(Floats score, Floats top, __mmask16 sees) {
        return _mm512_maskz_mov_ps(sees, exponential(larger(spread(LEAST), score - top)));
    }
};

inline Floats load_numbers(const float *from) { return load_floats(from); }
inline Floats load_numbers(const bfloat16 *from) { return load_bfloat16(from); }

// Sums [queries, SIZE] += weights [SLOTS, queries] times values [SLOTS, SIZE], for QUERIES from `first` on.
template <int SIZE, int QUERIES, class Number>
void mix_slots(const Weights &weights, const Number *values, long stride, long first, float (*sums)[SIZE]) {
    constexpr int NUMBERS = SIZE % NUMBERS_IN_REGISTERS ? 32 : NUMBERS_IN_REGISTERS, PARTS = NUMBERS / LANES;
    for (long from = 0; from < SIZE; from += NUMBERS) {
        Floats parts[QUERIES][PARTS];
        UNROLL for (int query = 0; query < QUERIES; query++) UNROLL for (int part = 0; part < PARTS; part++)
            parts[query][part] = load_floats(sums[first + query] + from + LANES * part);
        for (long slot = 0; slot < SLOTS; slot++) {
            Floats value[PARTS];
            UNROLL for (int part = 0; part < PARTS; part++)
                value[part] = load_numbers(values + slot * stride + from + LANES * part);
            UNROLL for (int query = 0; query < QUERIES; query++) {
                const Floats weight = spread(weights.at(first + query, slot));
                UNROLL for (int part = 0; part < PARTS; part++)
                    parts[query][part] = times_plus(weight, value[part], parts[query][part]);
            }
        }
        UNROLL for (int query = 0; query < QUERIES; query++) UNROLL for (int part = 0; part < PARTS; part++)
            store_floats(sums[first + query] + from + LANES * part, parts[query][part]);
    }
}

// The same for one query, without the slots that it does not see: their values may be anything.
template <int SIZE, class Number>
void mix_visible(const Weights &weights, const Number *values, long stride, const std::uint16_t *visible, long query,
                 float *sums) {
    constexpr int PARTS = SIZE / LANES;
    Floats parts[PARTS];
    UNROLL for (int part = 0; part < PARTS; part++) parts[part] = load_floats(sums + LANES * part);
    for (long slot = 0; slot < SLOTS; slot++) {
        if (!(visible[slot] >> query & 1)) continue;
        const Floats weight = spread(weights.at(query, slot));
        UNROLL for (int part = 0; part < PARTS; part++)
            parts[part] = times_plus(weight, load_numbers(values + slot * stride + LANES * part), parts[part]);
    }
    UNROLL for (int part = 0; part < PARTS; part++) store_floats(sums + LANES * part, parts[part]);
}

// The same for `count` queries, where `all` says whether all of them see all slots.
template <int SIZE, class Number>
void mix(const Weights &weights, const Number *values, long stride, const std::uint16_t *visible, bool all, long count,
         float (*sums)[SIZE]) {
    typedef void (*Mix)(const Weights &, const Number *, long, long, float (*)[SIZE]);
    static const Mix MIX[QUERIES_IN_REGISTERS + 1] = {
        nullptr,
        mix_slots<SIZE, 1, Number>,
        mix_slots<SIZE, 2, Number>,
        mix_slots<SIZE, 3, Number>,
        mix_slots<SIZE, 4, Number>,
        mix_slots<SIZE, 5, Number>,
        mix_slots<SIZE, 6, Number>};
    const long steps = (count + QUERIES_IN_REGISTERS - 1) / QUERIES_IN_REGISTERS;
    if (!all)
        for (long query = 0; query < count; query++)
            mix_visible<SIZE>(weights, values, stride, visible, query, sums[query]);
    else
        for (long step = 0; step < steps; step++) {
            const long first = count * step / steps;
            MIX[count * (step + 1) / steps - first](weights, values, stride, first, sums);
        }
}

template <int SIZE>
void attend_tile(const Queries &queries, Slots keys, Slots values, const Seen &seen, float scale, float *work,
                 bfloat16 *result, long stride) {
    const long count = queries.rows * queries.heads;
    alignas(64) std::int32_t pairs[SIZE / 32][16][LANES];  // nobody looks at the scores of other lanes
    for (long query = 0; query < count; query++)
        for (long at = 0; at < SIZE / 2; at++) pairs[at / 16][at % 16][query] = ((const pair *)queries[query])[at];
    const Visible visible = visible_of(seen, queries.rows, queries.heads, (std::uint16_t *)work);
    const std::uint16_t all = (1 << count) - 1;
    float *const products = work + whole(keys.count) / 2;
    multiply<SIZE>(pairs, keys, visible, products);
    const Floats scales = spread(scale), top = largest_of(products, visible, scales);
    alignas(64) float sums[LANES][SIZE], wide[SLOTS][SIZE], tops[LANES], totals[LANES] = {};
    std::memset(sums, 0, count * sizeof *sums);
    store_floats(tops, top);
    Floats total = no_floats();
    Weights weights;
    for (long slot = visible.start; slot < visible.stop; slot += SLOTS) {
        if (visible.nobody(slot)) continue;
        const float *place = products + (slot - visible.start) * LANES;
        if (count <= FEW_QUERIES)
            weights.make_few(place, scales, tops, visible.queries + slot, count, totals);
        else
            weights.make(place, scales, top, visible.queries + slot, total);
        fetch_slots<SIZE>(values, slot + SLOTS);
        const bool everything = visible.everybody(slot, all);
        if (count <= FEW_QUERIES) {
            mix<SIZE>(weights, values[slot], values.stride, visible.queries + slot, everything, count, sums);
            continue;
        }
        const long stored = values.count - slot < SLOTS ? values.count - slot : SLOTS;
        for (long i = 0; i < stored; i++) UNROLL for (int part = 0; part < SIZE / LANES; part++)
            store_floats(wide[i] + LANES * part, load_bfloat16(values[slot + i] + LANES * part));
        mix<SIZE>(weights, wide[0], SIZE, visible.queries + slot, everything, count, sums);
    }
    if (count > FEW_QUERIES) store_floats(totals, total);
    for (long query = 0; query < count; query++) {
        bfloat16 *place = result + query / queries.heads * stride + query % queries.heads * SIZE;
        const Floats share = spread(1.0f / totals[query]);
        UNROLL for (int part = 0; part < SIZE / LANES; part++)
            store_bfloat16(place + LANES * part, load_floats(sums[query] + LANES * part) * share);
    }
}

}  // namespace

#endif
