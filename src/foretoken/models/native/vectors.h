// Vectors of numbers as the kernels use them, for CPUs with AVX512 (-VNNI, -BF16).
#pragma once

#include <cstdint>
#include <cstring>
#include <immintrin.h>

// OpenMP's library is PyTorch's own, which is loaded already: two of them would have two pools of threads.
extern "C" int omp_get_thread_num(void);
extern "C" int omp_get_num_threads(void);

#define VECTORS __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni")))
#define UNROLL _Pragma("GCC unroll 16")

typedef std::uint16_t bfloat16;

inline __mmask16 few(long left) { return left >= 16 ? 0xffff : (1u << left) - 1; }

// Sixteen numbers in float32.
struct Floats {
    __m512 all;

    static VECTORS Floats of(float x) { return {_mm512_set1_ps(x)}; }
    // The first `left` numbers, zeros behind them.
    static VECTORS Floats load(const float *from, long left) { return {_mm512_maskz_loadu_ps(few(left), from)}; }
    static VECTORS Floats load(const bfloat16 *from, long left) {
        return widened(_mm256_maskz_loadu_epi16(few(left), from));
    }
    static VECTORS Floats widened(__m256i x) {
        return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))};
    }
    VECTORS void store(float *to, long left) const { _mm512_mask_storeu_ps(to, few(left), all); }
    VECTORS void store(bfloat16 *to, long left) const {
        _mm256_mask_storeu_epi16(to, few(left), (__m256i)_mm512_cvtneps_pbh(all));
    }
    VECTORS float sum() const { return _mm512_reduce_add_ps(all); }
};

VECTORS inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.all, b.all)}; }
VECTORS inline Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.all, b.all)}; }
VECTORS inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.all, b.all)}; }
VECTORS inline Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.all, b.all)}; }
VECTORS inline Floats multiply_add(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.all, b.all, c.all)}; }

// e^x for x <= 0, to one unit of the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2] (Taylor, 7 terms).
VECTORS inline __m512 exponential(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-104));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), r);
    __m512 p = _mm512_set1_ps(1.0f / 5040);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 720));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}
