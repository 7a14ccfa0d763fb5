// Vectors of AVX-512, or of AVX2 with FMA, see lanes.h.
#pragma once

#include <immintrin.h>

#include "numbers.h"

namespace lanes {

// Eight numbers of 16 bits in another order.
inline void store_ordered(std::int16_t *to, const std::int16_t *from, const int (&order)[8]) {
    const auto place = [&](int i) { return short(order[i] * 0x0202 + 0x0100); };  // of both bytes
    const __m128i places = _mm_setr_epi16(place(0), place(1), place(2), place(3), place(4), place(5), place(6), place(7));
    _mm_storeu_si128((__m128i *)to, _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)from), places));
}

#if defined(__AVX512F__)

constexpr long LANES = 16;  // numbers of 32 bits in a vector
typedef __m512i Words;
typedef __m512 Floats;

inline __mmask16 first_lanes(long count) { return count >= LANES ? 0xffff : (1u << count) - 1; }

inline Words no_words() { return _mm512_setzero_si512(); }
inline Words load_words(const void *from) { return _mm512_loadu_si512(from); }
inline void store_words(void *to, Words x) { _mm512_storeu_si512(to, x); }
inline Words spread_word(std::int32_t x) { return _mm512_set1_epi32(x); }
inline Words count_up() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
inline Words bits_and(Words a, Words b) { return _mm512_and_si512(a, b); }
inline Words low_halves(Words x) { return bits_and(x, _mm512_set1_epi8(15)); }
inline Words high_halves(Words x) { return low_halves(_mm512_srli_epi16(x, 4)); }
template <int BITS>
inline Words shifted_pairs(Words x) { return _mm512_srli_epi16(x, BITS); }
inline Words plus(Words a, Words b) { return _mm512_add_epi32(a, b); }
inline Words times16(Words x) { return _mm512_slli_epi32(x, 4); }
inline Words pair_sums(Words a, Words b) { return _mm512_madd_epi16(a, b); }  // of products of 16 bits
inline Words plus_byte_sums(Words sums, Words a, Words b) {  // of 16 bits, of products of bytes; a's have no sign
    return _mm512_add_epi16(sums, _mm512_maddubs_epi16(a, b));
}
inline Words bits_of(Floats x) { return _mm512_castps_si512(x); }
inline Words larger(Words a, Words b) { return _mm512_max_epi32(a, b); }
inline Words magnitude_bits(Floats x) { return bits_and(bits_of(x), _mm512_set1_epi32(0x7fffffff)); }
inline std::int32_t largest(Words x) { return _mm512_reduce_max_epi32(x); }
inline std::int32_t total(Words x) { return _mm512_reduce_add_epi32(x); }

inline Floats no_floats() { return _mm512_setzero_ps(); }
inline Floats load_floats(const float *from) { return _mm512_loadu_ps(from); }
inline void store_floats(float *to, Floats x) { _mm512_storeu_ps(to, x); }
inline Floats spread(float x) { return _mm512_set1_ps(x); }
inline Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats plus(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats times_plus(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }    // a b + c
inline Floats minus_times(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b
inline Floats as_floats(Words x) { return _mm512_cvtepi32_ps(x); }
inline Floats of_bits(Words x) { return _mm512_castsi512_ps(x); }
inline Words rounded(Floats x) { return _mm512_cvtps_epi32(x); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }  // b where one is not a number
inline float largest(Floats x) { return _mm512_reduce_max_ps(x); }
inline float total(Floats x) { return _mm512_reduce_add_ps(x); }

// The first `count` numbers, `rest` behind them.
inline Floats first_of(Floats x, long count, Floats rest) { return _mm512_mask_mov_ps(rest, first_lanes(count), x); }
inline Floats where_negative(Floats x, Floats yes, Floats no) {
    return _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask(x, no_floats(), _CMP_LT_OQ), yes);
}

// x 2^n for whole n from -150 to 0, rounded once.
inline Floats scaled(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }

// The numbers with an even place of pairs of bfloat16 numbers, and the others.
inline Floats evens(Words pairs) { return of_bits(_mm512_slli_epi32(pairs, 16)); }
inline Floats odds(Words pairs) { return of_bits(bits_and(pairs, _mm512_set1_epi32(0xffff0000))); }

inline Floats of_bfloat16(__m256i x) { return of_bits(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline Floats load_bfloat16(const bfloat16 *from) { return of_bfloat16(_mm256_loadu_si256((const __m256i *)from)); }

inline Floats load_float16(const void *from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from)); }
inline Floats load_int8(const void *from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
}

inline __m256i to_bfloat16(Floats x) {
#if defined(__AVX512BF16__)
    return (__m256i)_mm512_cvtneps_pbh(x);
#else
    const __m512i bits = bits_of(x), odd = bits_and(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i near = _mm512_srli_epi32(plus(bits, plus(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __mmask16 none = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);  // not a number: rounding could make it infinite
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(near, none, _mm512_set1_epi32(0x7fc0)));
#endif
}
inline void store_bfloat16(bfloat16 *to, Floats x) { _mm256_storeu_si256((__m256i *)to, to_bfloat16(x)); }

// The first `left` numbers, zeros behind them.
inline Floats load(const float *from, long left) { return _mm512_maskz_loadu_ps(first_lanes(left), from); }
inline Floats load(const bfloat16 *from, long left) {
    return of_bfloat16(_mm256_maskz_loadu_epi16(first_lanes(left), from));
}
inline void store(bfloat16 *to, Floats x, long left) {
    _mm256_mask_storeu_epi16(to, first_lanes(left), to_bfloat16(x));
}

// The lowest bytes, or halves, of each number.
inline void store_bytes(std::int8_t *to, Words x) { _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8(x)); }
inline void store_halves(std::int16_t *to, Words x) { _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(x)); }

// A bit for each of the first `left` numbers that is zero, -0 as well.
inline unsigned zeros(const bfloat16 *from, long left) {
    const __m256i x = _mm256_maskz_loadu_epi16(first_lanes(left), from);
    return _mm256_mask_testn_epi16_mask(first_lanes(left), x, _mm256_set1_epi16(0x7fff));
}
// The numbers whose bit is set, one behind the other, and as many after them as fill a vector.
inline void store_chosen(std::int32_t *to, Words x, unsigned chosen) {
    store_words(to, _mm512_maskz_compress_epi32(chosen, x));
}

// The sums of LANES vectors, each over its numbers, side by side.
inline Floats totals(Floats (&x)[LANES]) {
    UNROLL for (int i = 0; i < 8; i++)
        x[i] = _mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]) + _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]);
    UNROLL for (int i = 0; i < 4; i++) {
        const __m512d a = _mm512_castps_pd(x[2 * i]), b = _mm512_castps_pd(x[2 * i + 1]);
        x[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)) + _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
    const auto halves = [](Floats a, Floats b) {
        return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
    };
    return halves(halves(x[0], x[1]), halves(x[2], x[3]));
}

#else

constexpr long LANES = 8;
typedef __m256i Words;
typedef __m256 Floats;

inline Words no_words() { return _mm256_setzero_si256(); }
inline Words load_words(const void *from) { return _mm256_loadu_si256((const __m256i *)from); }
inline void store_words(void *to, Words x) { _mm256_storeu_si256((__m256i *)to, x); }
inline Words spread_word(std::int32_t x) { return _mm256_set1_epi32(x); }
inline Words count_up() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
inline Words bits_and(Words a, Words b) { return _mm256_and_si256(a, b); }
inline Words low_halves(Words x) { return bits_and(x, _mm256_set1_epi8(15)); }
inline Words high_halves(Words x) { return low_halves(_mm256_srli_epi16(x, 4)); }
template <int BITS>
inline Words shifted_pairs(Words x) { return _mm256_srli_epi16(x, BITS); }
inline Words plus(Words a, Words b) { return _mm256_add_epi32(a, b); }
inline Words times16(Words x) { return _mm256_slli_epi32(x, 4); }
inline Words pair_sums(Words a, Words b) { return _mm256_madd_epi16(a, b); }
inline Words plus_byte_sums(Words sums, Words a, Words b) { return _mm256_add_epi16(sums, _mm256_maddubs_epi16(a, b)); }
inline Words bits_of(Floats x) { return _mm256_castps_si256(x); }
inline Words magnitude_bits(Floats x) { return bits_and(bits_of(x), _mm256_set1_epi32(0x7fffffff)); }
inline Words larger(Words a, Words b) { return _mm256_max_epi32(a, b); }

inline std::int32_t largest(Words x) {
    __m128i half = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
}

inline std::int32_t total(Words x) {
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
}

inline Floats no_floats() { return _mm256_setzero_ps(); }
inline Floats load_floats(const float *from) { return _mm256_loadu_ps(from); }
inline void store_floats(float *to, Floats x) { _mm256_storeu_ps(to, x); }
inline Floats spread(float x) { return _mm256_set1_ps(x); }
inline Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats plus(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats times_plus(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats minus_times(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
inline Floats as_floats(Words x) { return _mm256_cvtepi32_ps(x); }
inline Floats of_bits(Words x) { return _mm256_castsi256_ps(x); }
inline Words rounded(Floats x) { return _mm256_cvtps_epi32(x); }
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }

inline float largest(Floats x) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

inline float total(Floats x) {
    __m128 half = _mm256_castps256_ps128(x) + _mm256_extractf128_ps(x, 1);
    half = half + _mm_movehl_ps(half, half);
    return _mm_cvtss_f32(half) + _mm_cvtss_f32(_mm_movehdup_ps(half));
}

inline Floats first_of(Floats x, long count, Floats rest) {
    const Words real = _mm256_cmpgt_epi32(spread_word(count < LANES ? count : LANES), count_up());
    return _mm256_blendv_ps(rest, x, of_bits(real));
}
inline Floats where_negative(Floats x, Floats yes, Floats no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(x, no_floats(), _CMP_LT_OQ));
}

// In two steps, of which the first is exact: the bits of 2^n are those of no usual number for n < -126.
inline Floats scaled(Floats x, Floats n) {
    const auto power = [](Words n) { return of_bits(_mm256_slli_epi32(plus(n, spread_word(127)), 23)); };
    const Words all = rounded(n), half = _mm256_srai_epi32(all, 1);
    return x * power(half) * power(_mm256_sub_epi32(all, half));
}

inline Floats evens(Words pairs) { return of_bits(_mm256_slli_epi32(pairs, 16)); }
inline Floats odds(Words pairs) { return of_bits(bits_and(pairs, _mm256_set1_epi32(0xffff0000))); }

inline Floats load_bfloat16(const bfloat16 *from) {
    return of_bits(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16));
}

inline Floats load_float16(const void *from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)); }
inline Floats load_int8(const void *from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
}

inline void store_halves(std::int16_t *to, Words x) {
    const Words low = bits_and(x, spread_word(0xffff));
    const __m128i first = _mm256_castsi256_si128(low), second = _mm256_extracti128_si256(low, 1);
    _mm_storeu_si128((__m128i *)to, _mm_packus_epi32(first, second));
}

inline void store_bytes(std::int8_t *to, Words x) {
    const __m128i lowest = _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m128i first = _mm_shuffle_epi8(_mm256_castsi256_si128(x), lowest);
    const __m128i second = _mm_shuffle_epi8(_mm256_extracti128_si256(x, 1), lowest);
    _mm_storel_epi64((__m128i *)to, _mm_unpacklo_epi32(first, second));
}

inline void store_bfloat16(bfloat16 *to, Floats x) {
    const Words bits = bits_of(x), odd = bits_and(_mm256_srli_epi32(bits, 16), spread_word(1));
    const Words near = _mm256_srli_epi32(plus(bits, plus(odd, spread_word(0x7fff))), 16);
    const Words none = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    store_halves((std::int16_t *)to, _mm256_blendv_epi8(near, spread_word(0x7fc0), none));
}

inline Floats load(const float *from, long left) {
    if (left >= LANES) return load_floats(from);
    float filled[LANES] = {};
    std::memcpy(filled, from, left * sizeof *from);
    return load_floats(filled);
}
inline Floats load(const bfloat16 *from, long left) {
    if (left >= LANES) return load_bfloat16(from);
    bfloat16 filled[LANES] = {};
    std::memcpy(filled, from, left * sizeof *from);
    return load_bfloat16(filled);
}
inline void store(bfloat16 *to, Floats x, long left) {
    if (left >= LANES) return store_bfloat16(to, x);
    bfloat16 all[LANES];
    store_bfloat16(all, x);
    std::memcpy(to, all, left * sizeof *to);
}

inline unsigned zeros(const bfloat16 *from, long left) {
    const Floats none = _mm256_cmp_ps(load(from, left), no_floats(), _CMP_EQ_OQ);
    return _mm256_movemask_ps(none) & (left < LANES ? (1u << left) - 1 : 0xff);
}
inline void store_chosen(std::int32_t *to, Words x, unsigned chosen) {
    std::int32_t all[LANES];
    store_words(all, x);
    store_words(to, no_words());
    for (; chosen; chosen &= chosen - 1) *to++ = all[__builtin_ctz(chosen)];
}

inline Floats totals(Floats (&x)[LANES]) {
    const auto fours = [](Floats *x) {
        return _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    };
    const Floats a = fours(x), b = fours(x + 4);
    return _mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31);
}

#endif

}  // namespace lanes
