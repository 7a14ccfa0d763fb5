// Attention of a few rows over cached bfloat16 keys and values, for CPUs with AVX512-BF16.
//
// A row first lists the slots that it sees, then works in the order of that list, in float32: what it does not see
// takes no part, wherever it lies.  So a token inside a tree gets the bits that it gets in plain decoding.

#include "attention.h"

namespace {

constexpr long KEYS = 16;              // scores that are made together
constexpr long ONE_THREAD = 1 << 14;   // products of numbers that one thread makes before a second has woken up

// The sums of sixteen vectors, each over its numbers, side by side.
VECTORS inline __m512 sums_of(__m512 (&x)[KEYS]) {
    UNROLL for (int i = 0; i < 8; i++)
        x[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
    UNROLL for (int i = 0; i < 4; i++) {
        const __m512d a = _mm512_castps_pd(x[2 * i]), b = _mm512_castps_pd(x[2 * i + 1]);
        x[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    UNROLL for (int i = 0; i < 2; i++)
        x[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(x[0], x[1], 0x88), _mm512_shuffle_f32x4(x[0], x[1], 0xdd));
}

// Weights [count], filled up to whole vectors with zeros, before they are divided by the sum that is returned.
template <int PARTS>
VECTORS float weigh(const bfloat16 *query, Slots keys, const std::int32_t *seen, long count, float scale, float *weights) {
    __m512bh q[PARTS];
    UNROLL for (int part = 0; part < PARTS; part++) q[part] = (__m512bh)_mm512_loadu_si512(query + 32 * part);
    __m512 top = _mm512_set1_ps(-__builtin_inff());
    for (long from = 0; from < count; from += KEYS) {
        __m512 sums[KEYS];
        UNROLL for (long i = 0; i < KEYS; i++) {
            const bfloat16 *key = keys[seen[from + i < count ? from + i : from]];
            sums[i] = _mm512_setzero_ps();
            UNROLL for (int part = 0; part < PARTS; part++)
                sums[i] = _mm512_dpbf16_ps(sums[i], q[part], (__m512bh)_mm512_loadu_si512(key + 32 * part));
        }
        const __m512 scores = _mm512_mul_ps(sums_of(sums), _mm512_set1_ps(scale));
        const __mmask16 real = count - from >= KEYS ? 0xffff : (1u << (count - from)) - 1;
        top = _mm512_mask_max_ps(top, real, top, scores);
        _mm512_storeu_ps(weights + from, scores);
    }
    const __m512 most = _mm512_set1_ps(_mm512_reduce_max_ps(top));
    __m512 total = _mm512_setzero_ps();
    for (long from = 0; from < count; from += KEYS) {
        const __mmask16 real = count - from >= KEYS ? 0xffff : (1u << (count - from)) - 1;
        const __m512 weight = _mm512_maskz_mov_ps(real, exponential(_mm512_sub_ps(_mm512_loadu_ps(weights + from), most)));
        _mm512_storeu_ps(weights + from, weight);
        total = _mm512_add_ps(total, weight);
    }
    return _mm512_reduce_add_ps(total);
}

// result [HEADS, 32 PARTS] = sums of weights [HEADS, room] times values, over the sums of the weights.  A value is
// widened once for all heads.
template <int PARTS, int HEADS>
VECTORS void mix(const float *weights, long room, const float *totals, Slots values, const std::int32_t *seen,
                 long count, bfloat16 *result) {
    __m512 sums[HEADS][2 * PARTS];
    UNROLL for (int head = 0; head < HEADS; head++)
        UNROLL for (int part = 0; part < 2 * PARTS; part++) sums[head][part] = _mm512_setzero_ps();
    for (long i = 0; i < count; i++) {
        const bfloat16 *value = values[seen[i]];
        UNROLL for (int part = 0; part < 2 * PARTS; part++) {
            const __m512 wide = Floats::load(value + 16 * part, 16).all;
            UNROLL for (int head = 0; head < HEADS; head++)
                sums[head][part] = _mm512_fmadd_ps(_mm512_set1_ps(weights[head * room + i]), wide, sums[head][part]);
        }
    }
    UNROLL for (int head = 0; head < HEADS; head++) {
        const Floats share = Floats::of(1.0f / totals[head]);
        UNROLL for (int part = 0; part < 2 * PARTS; part++)
            (Floats{sums[head][part]} * share).store(result + 32 * PARTS * head + 16 * part, 16);
    }
}

typedef float (*Weigh)(const bfloat16 *, Slots, const std::int32_t *, long, float, float *);
typedef void (*Mix)(const float *, long, const float *, Slots, const std::int32_t *, long, bfloat16 *);
const Weigh WEIGH[9] = {nullptr, weigh<1>, weigh<2>, weigh<3>, weigh<4>, nullptr, nullptr, nullptr, weigh<8>};
#define HEADS_OF(parts) {nullptr, mix<parts, 1>, mix<parts, 2>, mix<parts, 3>}
const Mix MIX[9][4] = {{}, HEADS_OF(1), HEADS_OF(2), HEADS_OF(3), HEADS_OF(4), {}, {}, {}, HEADS_OF(8)};
static_assert(HEADS_AT_ONCE == 3, "as many as the table has");

}  // namespace

VECTORS long listed(const bfloat16 *mask, long slots, std::int32_t *seen) {
    long count = 0;
    __m512i numbers = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (long slot = 0; slot < slots; slot += 16) {
        const __mmask16 real = slots - slot >= 16 ? 0xffff : (1u << (slots - slot)) - 1;
        __mmask16 open = real;
        if (mask)  // without the sign: -0 is zero, too
            open = _mm256_mask_testn_epi16_mask(real, _mm256_maskz_loadu_epi16(real, mask + slot), _mm256_set1_epi16(0x7fff));
        _mm512_storeu_si512(seen + count, _mm512_maskz_compress_epi32(open, numbers));
        numbers = _mm512_add_epi32(numbers, _mm512_set1_epi32(16));
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
    MIX[size / 32][heads](weights, room, totals, values, seen, count, result);
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
