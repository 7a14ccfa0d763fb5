// One type of vector for each instruction set that x86-64 CPUs have, so that a kernel is written once.
//
// The compiler's flags say which one it is (`LEVELS` in library.py): AVX-512 or AVX2 with FMA, each with or without
// instructions that add up products of bytes (VNNI).

#pragma once

#include <cstdint>
#include <cstring>
#include <immintrin.h>

#undef UNROLL
#define UNROLL _Pragma("GCC unroll 16")

namespace lanes {

typedef std::uint16_t bfloat16;
typedef std::int32_t __attribute__((may_alias)) four;  // bytes of four inputs

inline float widened(bfloat16 x) {
    const std::uint32_t bits = std::uint32_t(x) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

#if defined(__AVX512F__)

constexpr long LANES = 16;  // numbers of 32 bits in a vector
typedef __m512i Words;
typedef __m512 Floats;

inline Words no_words() { return _mm512_setzero_si512(); }
inline Words load_words(const void *from) { return _mm512_loadu_si512(from); }
inline Words spread_word(std::int32_t x) { return _mm512_set1_epi32(x); }
inline Words low_halves(Words x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Words high_halves(Words x) { return low_halves(_mm512_srli_epi16(x, 4)); }
inline Words plus(Words a, Words b) { return _mm512_add_epi32(a, b); }
inline Words times16(Words x) { return _mm512_slli_epi32(x, 4); }
inline Words bits_of(Floats x) { return _mm512_castps_si512(x); }
inline Words larger(Words a, Words b) { return _mm512_max_epi32(a, b); }
inline Words magnitude_bits(Floats x) { return _mm512_and_si512(bits_of(x), _mm512_set1_epi32(0x7fffffff)); }
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
inline Words rounded(Floats x) { return _mm512_cvtps_epi32(x); }

inline Floats load_bfloat16(const bfloat16 *from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16));
}

// The lowest bytes of each number.
inline void store_bytes(std::int8_t *to, Words x) { _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8(x)); }

inline void store_bfloat16(bfloat16 *to, Floats x) {
#if defined(__AVX512BF16__)
    const __m256i narrow = (__m256i)_mm512_cvtneps_pbh(x);
#else
    const __m512i bits = bits_of(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i near = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __mmask16 none = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);  // not a number: rounding could make it infinite
    const __m256i narrow = _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(near, none, _mm512_set1_epi32(0x7fc0)));
#endif
    _mm256_storeu_si256((__m256i *)to, narrow);
}

#else

constexpr long LANES = 8;
typedef __m256i Words;
typedef __m256 Floats;

inline Words no_words() { return _mm256_setzero_si256(); }
inline Words load_words(const void *from) { return _mm256_loadu_si256((const __m256i *)from); }
inline Words spread_word(std::int32_t x) { return _mm256_set1_epi32(x); }
inline Words low_halves(Words x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline Words high_halves(Words x) { return low_halves(_mm256_srli_epi16(x, 4)); }
inline Words plus(Words a, Words b) { return _mm256_add_epi32(a, b); }
inline Words times16(Words x) { return _mm256_slli_epi32(x, 4); }
inline Words bits_of(Floats x) { return _mm256_castps_si256(x); }
inline Words magnitude_bits(Floats x) { return _mm256_and_si256(bits_of(x), _mm256_set1_epi32(0x7fffffff)); }
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
inline Words rounded(Floats x) { return _mm256_cvtps_epi32(x); }

inline Floats load_bfloat16(const bfloat16 *from) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16));
}

inline void store_bytes(std::int8_t *to, Words x) {
    const __m128i lowest = _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m128i first = _mm_shuffle_epi8(_mm256_castsi256_si128(x), lowest);
    const __m128i second = _mm_shuffle_epi8(_mm256_extracti128_si256(x, 1), lowest);
    _mm_storel_epi64((__m128i *)to, _mm_unpacklo_epi32(first, second));
}

inline void store_bfloat16(bfloat16 *to, Floats x) {
    const __m256i bits = bits_of(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i near = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i none = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i kept = _mm256_blendv_epi8(near, _mm256_set1_epi32(0x7fc0), none);
    const __m128i narrow = _mm_packus_epi32(_mm256_castsi256_si128(kept), _mm256_extracti128_si256(kept, 1));
    _mm_storeu_si128((__m128i *)to, narrow);
}

#endif

// Sums of products of bytes, for each lane over its four pairs: weights are unsigned, inputs signed.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

constexpr bool ADDS_BYTES = true;

struct ByteSums {
    Words sums = no_words();

    // By its intrinsic GCC moves every sum twice.
    void add(Words weight, Words x) {
#if defined(__AVX512F__)
        asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weight), "v"(x));
#else
        asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(weight), "x"(x));
#endif
    }
    Words whole() const { return sums; }
};

#else

constexpr bool ADDS_BYTES = false;

// Weights are at most 15 here and inputs at least -128, so that eight additions stay within 16 bits: 8 x 2 x 15 x 128.
struct ByteSums {
    Words sums = no_words();  // pairs of numbers of 16 bits

#if defined(__AVX512F__)
    void add(Words weight, Words x) { sums = _mm512_add_epi16(sums, _mm512_maddubs_epi16(weight, x)); }
    Words whole() const { return _mm512_madd_epi16(sums, _mm512_set1_epi16(1)); }
#else
    void add(Words weight, Words x) { sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(weight, x)); }
    Words whole() const { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
#endif
};

#endif

}  // namespace lanes
