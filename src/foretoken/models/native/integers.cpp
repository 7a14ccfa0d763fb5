// Products of a few rows by weights in 8 or 4 bits, for CPUs that add up products of bytes (AVX512-VNNI).
//
// Activations become integers, row by row: x = scale * (whole + rest / REST), two signed bytes a number, as exact as
// 15 bits.  Weights are unsigned bytes or halves of bytes.  Sums of integers are exact and sums of groups run in one
// order, so a row has the same bits whatever stands beside it.
//
// Stored are, for 32 outputs, four inputs (8 bits) or eight (4 bits) after the other: [out / 32][in / 4][32][4] bytes,
// or [out / 32][in / 8][32][4] whose low halves are the first four inputs.

#include "linear.h"

namespace {

constexpr long MOST8 = 6, MOST4 = 4;   // rows of a tile: four and six registers each
constexpr long CHUNK = 16;             // tiles that share a block of weights before the next one is read
constexpr long ONE_THREAD = 1 << 16;   // weights that one thread multiplies before a second has woken up
constexpr float WHOLE = 127, REST = 254;
constexpr int MIDDLE8 = 128;           // what is added to a weight in 8 bits to make it unsigned
constexpr float MIDDLE4 = 8;

typedef std::int32_t __attribute__((may_alias)) four;  // bytes of four inputs

// sums += four products of bytes, unsigned times signed.  (By its intrinsic GCC moves every sum twice.)
VECTORS inline void add(__m512i &sums, __m512i weight, __m512i x) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weight), "v"(x));
}

float widened(bfloat16 x) {
    const std::uint32_t bits = std::uint32_t(x) << 16;
    float found;
    std::memcpy(&found, &bits, sizeof found);
    return found;
}

VECTORS inline __m512 expanded(__m256i numbers) { return Floats::widened(numbers).all; }
VECTORS inline __m512 expanded(const bfloat16 *from) { return expanded(_mm256_loadu_si256((const __m256i *)from)); }

// The sum of whole numbers plus that of rests, whose lanes are added side by side.
VECTORS inline float both_sums(__m512i large, __m512i small) {
    const __m512i pairs = _mm512_add_epi32(_mm512_unpacklo_epi32(large, small), _mm512_unpackhi_epi32(large, small));
    const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(pairs), _mm512_extracti64x4_epi64(pairs, 1));
    const __m128i last = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    const __m128i both = _mm_add_epi32(last, _mm_unpackhi_epi64(last, last));
    return float(_mm_cvtsi128_si32(both)) + float(_mm_extract_epi32(both, 1)) / REST;
}

// Rows of activations as integers: bytes [rows, in / 4, 2, 4], whole numbers and rests of four inputs side by side, a
// scale for each row, and sums for each group of inputs.
struct Activations {
    std::int8_t *bytes;
    float *scale, *sums;  // [rows], [rows, in / group]

    Activations(char *work, long rows, long in)
        : bytes((std::int8_t *)work), scale((float *)(bytes + 2 * rows * in)), sums(scale + rows) {}

    // Sixteen inputs at a time, the last ones masked; `group` is a multiple of 8.
    VECTORS void fill(const bfloat16 *x, long row, long in, long group) const {
        // The largest magnitude by its bits, so that what is not a number counts as larger than all others.
        __m256i top = _mm256_setzero_si256();
        for (long i = 0; i < in; i += 16) {
            const __m256i bits = _mm256_maskz_loadu_epi16(few(in - i), x + i);
            top = _mm256_max_epu16(top, _mm256_and_si256(bits, _mm256_set1_epi16(0x7fff)));
        }
        const int largest = _mm512_reduce_max_epi32(_mm512_cvtepu16_epi32(top));
        const float size = largest ? widened(bfloat16(largest)) / WHOLE : 1.0f;
        const __m512 inverse = _mm512_set1_ps(1.0f / size);
        scale[row] = size;
        std::int8_t *place = bytes + 2 * row * in;
        for (long from = 0; from < in; from += group) {
            __m512i large = _mm512_setzero_si512(), small = _mm512_setzero_si512();
            for (long i = from; i < from + group; i += 16, place += 32) {
                const __mmask16 real = few(from + group - i);
                const __m512 scaled = _mm512_mul_ps(expanded(_mm256_maskz_loadu_epi16(real, x + i)), inverse);
                const __m512 near = _mm512_roundscale_ps(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
                const __m512i first = _mm512_cvtps_epi32(near);
                const __m512i second =
                    _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_sub_ps(scaled, near), _mm512_set1_ps(REST)));
                const __m128i whole = _mm512_cvtepi32_epi8(first), rest = _mm512_cvtepi32_epi8(second);
                const __m256i both = _mm256_set_m128i(_mm_unpackhi_epi32(whole, rest), _mm_unpacklo_epi32(whole, rest));
                _mm256_mask_storeu_epi16(place, real, both);
                large = _mm512_add_epi32(large, first);
                small = _mm512_add_epi32(small, second);
            }
            sums[row * (in / group) + from / group] = both_sums(large, small);
            place = bytes + 2 * (row * in + from + group);
        }
    }
};

// Sums times the rows' scales, plus bias [WIDTH] and the residual where they are not null, to `width` results a row.
template <int ROWS>
VECTORS inline void finish(const __m512 (&sums)[2][ROWS], const float *scale, const float *bias, const Outputs &y,
                           int width) {
    UNROLL for (int half = 0; half < 2; half++) {
        const long left = width - 16 * half;
        if (left <= 0) break;
        UNROLL for (int row = 0; row < ROWS; row++) {
            const long place = row * y.stride + 16 * half;
            Floats sum = Floats{sums[half][row]} * Floats::of(scale[row]);
            if (bias) sum = sum + Floats::load(bias + 16 * half, left);
            if (y.residual) sum = sum + Floats::load(y.residual + place, left);
            sum.store(y.result + place, left);
        }
    }
}

// Weights in 8 bits with a scale [WIDTH] for each output.
template <int ROWS>
VECTORS void tile8(const Activations &x, long row, const Linear &linear, long block, const Outputs &y,
                   int width) {
    const long in = linear.in;
    const std::uint8_t *weight = (const std::uint8_t *)linear.weight + block * WIDTH * in;
    const bfloat16 *scales = (const bfloat16 *)linear.scales + block * WIDTH;
    const four *inputs = (const four *)(x.bytes + 2 * row * in);
    __m512i large[2][ROWS], small[2][ROWS];
    UNROLL for (int r = 0; r < ROWS; r++)
        large[0][r] = large[1][r] = small[0][r] = small[1][r] = _mm512_setzero_si512();
    for (long k = 0; k < in / 4; k++, weight += 4 * WIDTH) {
        const __m512i first = _mm512_loadu_si512(weight), second = _mm512_loadu_si512(weight + 64);
        UNROLL for (int r = 0; r < ROWS; r++) {
            const four *both = inputs + 2 * (r * (in / 4) + k);
            const __m512i a = _mm512_set1_epi32(both[0]), b = _mm512_set1_epi32(both[1]);
            add(large[0][r], first, a);
            add(large[1][r], second, a);
            add(small[0][r], first, b);
            add(small[1][r], second, b);
        }
    }
    __m512 sums[2][ROWS];
    UNROLL for (int half = 0; half < 2; half++) {
        const __m512 scale = expanded(scales + 16 * half);
        UNROLL for (int r = 0; r < ROWS; r++) {
            __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(small[half][r]), _mm512_set1_ps(1 / REST),
                                         _mm512_cvtepi32_ps(large[half][r]));
            sum = _mm512_sub_ps(sum, _mm512_set1_ps(MIDDLE8 * x.sums[row + r]));
            sums[half][r] = _mm512_mul_ps(sum, scale);
        }
    }
    finish<ROWS>(sums, x.scale + row, linear.bias ? linear.bias + block * WIDTH : nullptr, y, width);
}

// Weights in 4 bits; scales and zeros [in / group][2][WIDTH].
template <int ROWS>
VECTORS void tile4(const Activations &x, long row, const Linear &linear, long block, const Outputs &y,
                   int width) {
    const long in = linear.in, group = linear.group;
    const std::uint8_t *weight = (const std::uint8_t *)linear.weight + block * WIDTH * in / 2;
    const bfloat16 *scales = (const bfloat16 *)linear.scales + block * 2 * WIDTH * (in / group);
    const four *inputs = (const four *)(x.bytes + 2 * row * in);
    const __m512i low = _mm512_set1_epi8(15);
    __m512 sums[2][ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) sums[0][r] = sums[1][r] = _mm512_setzero_ps();
    for (long g = 0; g < in / group; g++, scales += 2 * WIDTH) {
        __m512i large[2][ROWS], small[2][ROWS];
        UNROLL for (int r = 0; r < ROWS; r++)
            large[0][r] = large[1][r] = small[0][r] = small[1][r] = _mm512_setzero_si512();
        for (long k = g * group / 4; k < (g + 1) * group / 4; k += 2, weight += 4 * WIDTH) {
            const __m512i first = _mm512_loadu_si512(weight), second = _mm512_loadu_si512(weight + 64);
            const __m512i parts[2][2] = {
                {_mm512_and_si512(first, low), _mm512_and_si512(second, low)},
                {_mm512_and_si512(_mm512_srli_epi16(first, 4), low), _mm512_and_si512(_mm512_srli_epi16(second, 4), low)}};
            UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int part = 0; part < 2; part++) {
                const four *both = inputs + 2 * (r * (in / 4) + k + part);
                const __m512i a = _mm512_set1_epi32(both[0]), b = _mm512_set1_epi32(both[1]);
                UNROLL for (int half = 0; half < 2; half++) {
                    add(large[half][r], parts[part][half], a);
                    add(small[half][r], parts[part][half], b);
                }
            }
        }
        UNROLL for (int half = 0; half < 2; half++) {
            const __m512 scale = expanded(scales + 16 * half);
            const __m512 zero = _mm512_fnmadd_ps(scale, _mm512_set1_ps(MIDDLE4), expanded(scales + WIDTH + 16 * half));
            UNROLL for (int r = 0; r < ROWS; r++) {
                const __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(small[half][r]), _mm512_set1_ps(1 / REST),
                                                   _mm512_cvtepi32_ps(large[half][r]));
                const __m512 all = _mm512_set1_ps(x.sums[(row + r) * (in / group) + g]);
                sums[half][r] = _mm512_fmadd_ps(sum, scale, _mm512_fmadd_ps(all, zero, sums[half][r]));
            }
        }
    }
    finish<ROWS>(sums, x.scale + row, linear.bias ? linear.bias + block * WIDTH : nullptr, y, width);
}

typedef void (*Tile)(const Activations &, long, const Linear &, long, const Outputs &, int);
const Tile TILES8[MOST8 + 1] = {nullptr, tile8<1>, tile8<2>, tile8<3>, tile8<4>, tile8<5>, tile8<6>};
const Tile TILES4[MOST4 + 1] = {nullptr, tile4<1>, tile4<2>, tile4<3>, tile4<4>};

}  // namespace

void prepare_integers(const Linear &linear, const Inputs &x, long row) {
    Activations(x.prepared, x.count, linear.in).fill(x.rows + row * x.stride, row, linear.in, linear.group);
}

void multiply_integers(const Linear &linear, const Inputs &x, const Outputs &y, long from, long to) {
    const long most = linear.kind == EIGHT ? MOST8 : MOST4, tiles = (x.count + most - 1) / most;
    const Tile *tile = linear.kind == EIGHT ? TILES8 : TILES4;
    const Activations activations(x.prepared, x.count, linear.in);
    for (long chunk = 0; chunk < tiles; chunk += CHUNK)
        for (long block = from; block < to; block++) {
            const long column = block * WIDTH;
            const int width = linear.out - column < WIDTH ? int(linear.out - column) : int(WIDTH);
            for (long t = chunk; t < tiles && t < chunk + CHUNK; t++) {
                const long row = x.count * t / tiles, at = row * y.stride + column;
                tile[x.count * (t + 1) / tiles - row](
                    activations, row, linear, block,
                    {y.result + at, y.residual ? y.residual + at : nullptr, y.stride}, width);
            }
        }
}

// result [rows, out] = x [rows, in] weight^T with weights in `bits` 8 or 4.  x is `stride` numbers from row to row, `in` a
// multiple of `group` and that of 8; `work` holds 2 rows in bytes and rows (1 + in / group) floats.
extern "C" void integer_product(bfloat16 *x, long rows, long in, long stride, const std::uint8_t *weight, long bits,
                                long group, const bfloat16 *scales, long out, bfloat16 *result, char *work) {
    const Linear linear = {bits == 8 ? EIGHT : FOUR, in, out, group, weight, scales, nullptr};
    const Product alone = {&linear, 1};
    const Inputs inputs = {x, stride, rows, work, 0};
#pragma omp parallel if (in * out > ONE_THREAD)
    {
        const long thread = omp_get_thread_num(), threads = omp_get_num_threads();
        for (long row = thread; row < rows; row += threads) alone.prepare_row(inputs, row);
#pragma omp barrier
        alone.run(inputs, {result, nullptr, out}, thread, threads);
    }
}
