// One type of vector for each instruction set, so that a kernel is written once.
//
// The compiler's flags say which one it is (`LEVELS` in compiling.py): AVX-512 or AVX2 with FMA, each with or without
// instructions that add up products of bytes and words (VNNI) or of bfloat16 numbers (BF16), or the portable one, which
// 64-bit Arm takes.  Vectors of numbers have the operators + - * /, which the compiler never joins (-ffp-contract=off):
// what is one rounding is written as one.

#pragma once

#include "numbers.h"

#if defined(__AVX2__) && !defined(PORTABLE)
#include "lanes_x86.h"
#else
#include "lanes_portable.h"
#endif

// OpenMP's library is PyTorch's own, which is loaded already: two of them would have two pools of threads.
extern "C" int omp_get_thread_num(void);
extern "C" int omp_get_num_threads(void);
extern "C" int omp_get_max_threads(void);

namespace lanes {

// sums + a b for each lane's two bfloat16 numbers.
inline Floats plus_pairs(Floats sums, Words a, Words b) {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b);
#else
    return times_plus(odds(a), odds(b), times_plus(evens(a), evens(b), sums));
#endif
}

// sums += a b for each lane's two signed numbers of 16 bits, or for its four bytes, of which a's have no sign.  (By
// their intrinsics GCC moves every sum twice.)
#if defined(__AVX512VNNI__)
inline void add_pairs(Words &sums, Words a, Words b) { asm("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b)); }
inline void add_fours(Words &sums, Words a, Words b) { asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b)); }
#elif defined(__AVXVNNI__)
inline void add_pairs(Words &sums, Words a, Words b) {
    asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sums) : "x"(a), "x"(b));
}
inline void add_fours(Words &sums, Words a, Words b) {
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(a), "x"(b));
}
#else
inline void add_pairs(Words &sums, Words a, Words b) { sums = plus(sums, pair_sums(a, b)); }
#endif

// Sums of products of bytes, for each lane over its four pairs: weights are unsigned, inputs signed.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

constexpr bool ADDS_BYTES = true;

struct ByteSums {
    Words sums = no_words();

    void add(Words weight, Words x) { add_fours(sums, weight, x); }
    Words whole() const { return sums; }
};

#else

constexpr bool ADDS_BYTES = false;

// Weights are at most 15 here and inputs at least -128, so that eight additions stay within 16 bits: 8 x 2 x 15 x 128.
struct ByteSums {
    Words sums = no_words();  // pairs of numbers of 16 bits

#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(PORTABLE)
    void add(Words weight, Words x) {  // by its intrinsics GCC runs out of registers, and one sum waits for memory
        Words products;
        asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sums), "=&x"(products) : "x"(weight), "x"(x));
    }
#else
    void add(Words weight, Words x) { sums = plus_byte_sums(sums, weight, x); }
#endif
    Words whole() const { return pair_sums(sums, spread_word(0x00010001)); }
};

#endif

// e^x for x <= 0, to one unit of the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2] (Taylor, 7 terms).
inline Floats exponential(Floats x) {
    x = larger(spread(-104), x);
    const Floats n = as_floats(rounded(x * spread(1.44269504f)));
    Floats r = minus_times(n, spread(0.693145752f), x);
    r = minus_times(n, spread(1.42860677e-6f), r);
    Floats p = spread(1.0f / 5040);
    p = times_plus(p, r, spread(1.0f / 720));
    p = times_plus(p, r, spread(1.0f / 120));
    p = times_plus(p, r, spread(1.0f / 24));
    p = times_plus(p, r, spread(1.0f / 6));
    p = times_plus(p, r, spread(0.5f));
    p = times_plus(p, r, spread(1.0f));
    p = times_plus(p, r, spread(1.0f));
    return scaled(p, n);
}

}  // namespace lanes

using namespace lanes;
