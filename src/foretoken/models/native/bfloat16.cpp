// Products of a few rows by bfloat16 weights, for CPUs that multiply bfloat16 in vector registers (AVX512-BF16).
//
// A weight [out, in] is stored as [out / WIDTH][in / 2][WIDTH][2]: for WIDTH outputs, one pair of inputs after the
// other, so that it is read from memory in one stream.  A tile keeps the sums of up to MOST rows times WIDTH outputs in
// registers.  Every sum runs over the inputs in the same order, so a row has the same bits whatever stands beside it.

#include <cstdint>
#include <immintrin.h>

// OpenMP's library is PyTorch's own, which is loaded already: two of them would have two pools of threads.
extern "C" int omp_get_thread_num(void);
extern "C" int omp_get_num_threads(void);

#define AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define UNROLL _Pragma("GCC unroll 16")

namespace {

constexpr long WIDTH = 32;       // outputs of a tile: two registers
constexpr long MOST = 14;        // rows of a tile: 28 registers of sums, 2 of weights, 1 of activations
constexpr long FEWER = 8;        // where that many long rows would not stay in the nearest cache
constexpr long LONG = 2048;      // inputs of a long row
constexpr long CHUNK = 8;        // tiles that share a block of weights before the next one is read
constexpr long ONE_THREAD = 1 << 15;  // weights that one thread multiplies before a second has woken up

typedef std::uint16_t bfloat16;
typedef std::int32_t __attribute__((may_alias)) pair;  // two neighbouring bfloat16 numbers

// [ROWS, in] x [WIDTH, in]^T, plus bias [WIDTH] and residual [ROWS, WIDTH] where they are not null; `width` outputs are
// real, the others fill the last block up.  x is `stride` pairs from row to row, result and residual are `out` numbers.
template <int ROWS>
AVX512_BF16 void tile(const pair *x, long stride, long pairs, const bfloat16 *weight, const bfloat16 *bias,
                      const bfloat16 *residual, bfloat16 *result, long out, int width) {
    __m512 sums[2][ROWS];
    UNROLL for (int row = 0; row < ROWS; row++) sums[0][row] = sums[1][row] = _mm512_setzero_ps();
    for (long k = 0; k < pairs; k++, weight += 2 * WIDTH) {
        const __m512bh first = (__m512bh)_mm512_loadu_si512(weight);
        const __m512bh second = (__m512bh)_mm512_loadu_si512(weight + WIDTH);
        UNROLL for (int row = 0; row < ROWS; row++) {
            const __m512bh both = (__m512bh)_mm512_set1_epi32(x[row * stride + k]);
            sums[0][row] = _mm512_dpbf16_ps(sums[0][row], first, both);
            sums[1][row] = _mm512_dpbf16_ps(sums[1][row], second, both);
        }
    }
    UNROLL for (int half = 0; half < 2; half++) {
        const int left = width - 16 * half;
        if (left <= 0) break;
        const __mmask16 real = left >= 16 ? 0xffff : (1u << left) - 1;
        const auto widened = [real](const bfloat16 *from) AVX512_BF16 {
            return _mm512_castsi512_ps(
                _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(real, from)), 16));
        };
        const __m512 offset = bias ? widened(bias + 16 * half) : _mm512_setzero_ps();
        UNROLL for (int row = 0; row < ROWS; row++) {
            __m512 sum = _mm512_add_ps(sums[half][row], offset);
            if (residual) sum = _mm512_add_ps(sum, widened(residual + row * out + 16 * half));
            _mm256_mask_storeu_epi16(result + row * out + 16 * half, real, (__m256i)_mm512_cvtneps_pbh(sum));
        }
    }
}

typedef void (*Tile)(const pair *, long, long, const bfloat16 *, const bfloat16 *, const bfloat16 *, bfloat16 *, long,
                     int);
const Tile TILES[MOST + 1] = {nullptr, tile<1>, tile<2>,  tile<3>,  tile<4>,  tile<5>,  tile<6>, tile<7>,
                              tile<8>, tile<9>, tile<10>, tile<11>, tile<12>, tile<13>, tile<14>};

}  // namespace

// result [rows, out] = x [rows, in] weight^T (+ bias [out]) (+ residual [rows, out]).  `in` and `stride`, the numbers
// from one row of x to the next, are even.
extern "C" void product(const bfloat16 *x, long rows, long in, long stride, const bfloat16 *weight, long out,
                        const bfloat16 *bias, const bfloat16 *residual, bfloat16 *result) {
    const long blocks = (out + WIDTH - 1) / WIDTH, most = in < LONG ? MOST : FEWER, tiles = (rows + most - 1) / most;
#pragma omp parallel if (in * out > ONE_THREAD)
    {
        const long thread = omp_get_thread_num(), threads = omp_get_num_threads();
        const long from = blocks * thread / threads, to = blocks * (thread + 1) / threads;
        for (long chunk = 0; chunk < tiles; chunk += CHUNK)
            for (long block = from; block < to; block++) {
                const long column = block * WIDTH;
                const int width = out - column < WIDTH ? int(out - column) : int(WIDTH);
                for (long t = chunk; t < tiles && t < chunk + CHUNK; t++) {
                    const long row = rows * t / tiles, at = row * out + column;
                    TILES[rows * (t + 1) / tiles - row](
                        (const pair *)(x + row * stride), stride / 2, in / 2, weight + column * in,
                        bias ? bias + column : nullptr, residual ? residual + at : nullptr, result + at, out, width);
                }
            }
    }
}
