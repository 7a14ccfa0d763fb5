// Vectors of eight numbers for any CPU, in the vector extensions of GCC and clang: two halves, of which each is a register
// on 64-bit Arm, see lanes.h.  Everything is added in the order of AVX2's vectors, so that results have the same bits.
#pragma once

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__FMA__)
#include <immintrin.h>
#endif

#include "numbers.h"

namespace lanes {

constexpr long LANES = 8;

typedef float Real __attribute__((vector_size(16)));
typedef std::uint32_t Bits __attribute__((vector_size(16)));
typedef std::int32_t Signed __attribute__((vector_size(16)));
typedef std::uint16_t Sixteens __attribute__((vector_size(16)));
typedef std::int16_t SignedSixteens __attribute__((vector_size(16)));

struct Words {
    Bits low, high;
};
struct Floats {
    Real low, high;
};

template <class Number>
inline auto read(const void *from) {
    Number x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
inline Real spread_real(float x) { return Real{x, x, x, x}; }
inline Bits spread_bits(std::uint32_t x) { return Bits{x, x, x, x}; }

// Every number rounded once, as all x86-64 CPUs with AVX2 and all 64-bit Arm CPUs do it in one instruction.
inline Real fused(Real a, Real b, Real c) {
#if defined(__aarch64__)
    return (Real)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif defined(__FMA__)
    return (Real)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c);
#else
    Real sum;
    for (int i = 0; i < 4; i++) sum[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return sum;
#endif
}

inline Words spread_word(std::int32_t x) { return {spread_bits(x), spread_bits(x)}; }
inline Words no_words() { return spread_word(0); }
inline Words load_words(const void *from) { return read<Words>(from); }
inline void store_words(void *to, Words x) { std::memcpy(to, &x, sizeof x); }
inline Words count_up() { return {Bits{0, 1, 2, 3}, Bits{4, 5, 6, 7}}; }
inline Words bits_and(Words a, Words b) { return {a.low & b.low, a.high & b.high}; }
inline Words low_halves(Words x) { return bits_and(x, spread_word(0x0f0f0f0f)); }
inline Words high_halves(Words x) { return low_halves({x.low >> 4, x.high >> 4}); }
template <int BITS>
inline Words shifted_pairs(Words x) {
    return {(Bits)((Sixteens)x.low >> BITS), (Bits)((Sixteens)x.high >> BITS)};
}
inline Words plus(Words a, Words b) { return {a.low + b.low, a.high + b.high}; }
inline Words times16(Words x) { return {x.low << 4, x.high << 4}; }
inline Words larger(Words a, Words b) {
    return {(Signed)a.low > (Signed)b.low ? a.low : b.low, (Signed)a.high > (Signed)b.high ? a.high : b.high};
}
inline std::int32_t largest(Words x) {
    const Signed low = (Signed)x.low, high = (Signed)x.high, all = low > high ? low : high;
    const std::int32_t even = all[0] > all[2] ? all[0] : all[2], odd = all[1] > all[3] ? all[1] : all[3];
    return even > odd ? even : odd;
}
inline std::int32_t total(Words x) {
    const Bits sums = x.low + x.high;
    return sums[0] + sums[1] + (sums[2] + sums[3]);
}

// Sums of two products of signed numbers of 16 bits.
inline Bits pair_sums(Bits a, Bits b) {
    const Signed x = (Signed)a, y = (Signed)b;
    return (Bits)((Signed(x << 16) >> 16) * (Signed(y << 16) >> 16)) + (Bits)((x >> 16) * (y >> 16));
}
inline Words pair_sums(Words a, Words b) { return {pair_sums(a.low, b.low), pair_sums(a.high, b.high)}; }

// Sums of 16 bits of two products of bytes, of which a's have no sign.
inline Bits byte_sums(Bits a, Bits b) {
    const Sixteens x = (Sixteens)a;
    const SignedSixteens y = (SignedSixteens)b, even = SignedSixteens(y << 8) >> 8, odd = y >> 8;
    return (Bits)((x & 255) * (Sixteens)even + (x >> 8) * (Sixteens)odd);
}
inline Words plus_byte_sums(Words sums, Words a, Words b) {
    return {(Bits)((Sixteens)sums.low + (Sixteens)byte_sums(a.low, b.low)),
            (Bits)((Sixteens)sums.high + (Sixteens)byte_sums(a.high, b.high))};
}

inline Floats operator+(Floats a, Floats b) { return {a.low + b.low, a.high + b.high}; }
inline Floats operator-(Floats a, Floats b) { return {a.low - b.low, a.high - b.high}; }
inline Floats operator*(Floats a, Floats b) { return {a.low * b.low, a.high * b.high}; }
inline Floats operator/(Floats a, Floats b) { return {a.low / b.low, a.high / b.high}; }

inline Floats spread(float x) { return {spread_real(x), spread_real(x)}; }
inline Floats no_floats() { return spread(0); }
inline Floats load_floats(const float *from) { return read<Floats>(from); }
inline void store_floats(float *to, Floats x) { std::memcpy(to, &x, sizeof x); }
inline Floats times(Floats a, Floats b) { return a * b; }
inline Floats plus(Floats a, Floats b) { return a + b; }
inline Floats times_plus(Floats a, Floats b, Floats c) {
    return {fused(a.low, b.low, c.low), fused(a.high, b.high, c.high)};
}
inline Floats minus_times(Floats a, Floats b, Floats c) {
    return {fused(-a.low, b.low, c.low), fused(-a.high, b.high, c.high)};
}
inline Words bits_of(Floats x) { return {(Bits)x.low, (Bits)x.high}; }
inline Floats of_bits(Words x) { return {(Real)x.low, (Real)x.high}; }
inline Words magnitude_bits(Floats x) { return bits_and(bits_of(x), spread_word(0x7fffffff)); }
inline Floats as_floats(Words x) {
    return {__builtin_convertvector((Signed)x.low, Real), __builtin_convertvector((Signed)x.high, Real)};
}

// The nearest whole number, of two the even one, for magnitudes below 2^22: a sum with 1.5 2^23 has no room for more.
inline Words rounded(Floats x) {
    const Words shifted = bits_of(x + spread(12582912.0f));
    return plus(shifted, spread_word(-0x4b400000));
}

inline Floats larger(Floats a, Floats b) {
    return {a.low > b.low ? a.low : b.low, a.high > b.high ? a.high : b.high};
}
inline float largest(Floats x) {
    const Real all = x.low > x.high ? x.low : x.high;
    const float even = all[0] > all[2] ? all[0] : all[2], odd = all[1] > all[3] ? all[1] : all[3];
    return even > odd ? even : odd;
}
inline float total(Floats x) {
    const Real sums = x.low + x.high;
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

inline Floats first_of(Floats x, long count, Floats rest) {
    const Signed end = (Signed)spread_bits(count < LANES ? count : LANES);
    return {Signed{0, 1, 2, 3} < end ? x.low : rest.low, Signed{4, 5, 6, 7} < end ? x.high : rest.high};
}
inline Floats where_negative(Floats x, Floats yes, Floats no) {
    return {x.low < Real{} ? yes.low : no.low, x.high < Real{} ? yes.high : no.high};
}

// In two steps, of which the first is exact: the bits of 2^n are those of no usual number for n < -126.
inline Floats scaled(Floats x, Floats n) {
    const auto power = [](Words n) -> Floats { return {(Real)((n.low + 127) << 23), (Real)((n.high + 127) << 23)}; };
    const Words all = rounded(n), half = {(Bits)((Signed)all.low >> 1), (Bits)((Signed)all.high >> 1)};
    return x * power(half) * power({all.low - half.low, all.high - half.high});
}

inline Floats evens(Words pairs) { return {(Real)(pairs.low << 16), (Real)(pairs.high << 16)}; }
inline Floats odds(Words pairs) { return of_bits(bits_and(pairs, spread_word(0xffff0000))); }

// Eight numbers of fewer bits, widened.
template <class Number>
inline Words load_wide(const void *from) {
    typedef Number Narrow __attribute__((vector_size(4 * sizeof(Number))));
    const char *place = (const char *)from;
    return {(Bits)__builtin_convertvector(read<Narrow>(place), Signed),
            (Bits)__builtin_convertvector(read<Narrow>(place + sizeof(Narrow)), Signed)};
}
template <class Number>
inline void store_narrow(Number *to, Words x) {
    UNROLL for (int i = 0; i < 4; i++) to[i] = Number(x.low[i]), to[4 + i] = Number(x.high[i]);
}

inline Floats load_bfloat16(const bfloat16 *from) { return evens(load_wide<std::uint16_t>(from)); }
inline Floats load_int8(const void *from) { return as_floats(load_wide<std::int8_t>(from)); }

// Numbers below 2^-14 have their bits behind those of 2^-14, which is subtracted again.
inline Floats load_float16(const void *from) {
    const Words all = load_wide<std::uint16_t>(from);
    const auto wide = [](Bits x) {
        const Bits sign = (x & 0x8000) << 16, bits = (x & 0x7fff) << 13, exponent = bits & 0x0f800000;
        const Bits small = (Bits)((Real)(bits + 0x38800000) - spread_real(0x1p-14f));
        const Bits large = bits + (exponent == 0x0f800000 ? spread_bits(0x70000000) : spread_bits(0x38000000));
        return (Real)(sign | (exponent == 0 ? small : large));
    };
    return {wide(all.low), wide(all.high)};
}

inline void store_halves(std::int16_t *to, Words x) { store_narrow(to, x); }
inline void store_bytes(std::int8_t *to, Words x) { store_narrow(to, x); }
inline void store_bfloat16(bfloat16 *to, Floats x) {
    const auto near = [](Real x) {  // what is not a number stays none: rounding could make it infinite
        const Bits bits = (Bits)x;
        return x != x ? spread_bits(0x7fc0) : (bits + ((bits >> 16) & 1) + 0x7fff) >> 16;
    };
    store_narrow(to, {near(x.low), near(x.high)});
}

template <class Number>
inline Floats load_some(const Number *from, long left, Floats (*whole)(const Number *)) {
    if (left >= LANES) return whole(from);
    Number filled[LANES] = {};
    std::memcpy(filled, from, left * sizeof *from);
    return whole(filled);
}
inline Floats load(const float *from, long left) { return load_some(from, left, load_floats); }
inline Floats load(const bfloat16 *from, long left) { return load_some(from, left, load_bfloat16); }
inline void store(bfloat16 *to, Floats x, long left) {
    if (left >= LANES) return store_bfloat16(to, x);
    bfloat16 all[LANES];
    store_bfloat16(all, x);
    std::memcpy(to, all, left * sizeof *to);
}

inline void store_ordered(std::int16_t *to, const std::int16_t *from, const int (&order)[8]) {
    UNROLL for (int i = 0; i < 8; i++) to[i] = from[order[i]];
}

inline unsigned zeros(const bfloat16 *from, long left) {
    unsigned found = 0;
    for (long i = 0; i < left && i < LANES; i++) found |= unsigned((from[i] & 0x7fff) == 0) << i;
    return found;
}
inline void store_chosen(std::int32_t *to, Words x, unsigned chosen) {
    std::int32_t all[LANES];
    store_words(all, x);
    store_words(to, no_words());
    for (; chosen; chosen &= chosen - 1) *to++ = all[__builtin_ctz(chosen)];
}

inline Floats totals(Floats (&x)[LANES]) {
    const auto twos = [](Real a, Real b) { return Real{a[0], a[2], b[0], b[2]} + Real{a[1], a[3], b[1], b[3]}; };
    const auto fours = [=](const Floats *x, Real Floats::*half) {
        return twos(twos(x[0].*half, x[1].*half), twos(x[2].*half, x[3].*half));
    };
    return {fours(x, &Floats::low) + fours(x, &Floats::high), fours(x + 4, &Floats::low) + fours(x + 4, &Floats::high)};
}

}  // namespace lanes
