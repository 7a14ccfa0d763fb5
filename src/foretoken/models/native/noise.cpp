// Numbers of a counter-based generator, as exponential ones: what a request's noise is made from.
//
// All steps are plain additions and multiplications in one order, so that a seed's numbers are the same on all machines.

#include <cstdint>
#include <cstring>

namespace {

constexpr long PIECE = 512;           // numbers that go through all steps while they are in the nearest cache
constexpr long ONE_THREAD = 1 << 14;  // numbers that one thread makes before a second has woken up
constexpr int ROUNDS = 10;

struct Words {
    std::uint64_t at[4];
};

// Philox 4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
inline Words philox(Words counter, std::uint64_t key) {
    std::uint64_t first = key, second = 0;
    for (int round = 0; round < ROUNDS; round++) {
        const auto a = (unsigned __int128)counter.at[0] * 0xD2E7470EE14C6C93u;
        const auto b = (unsigned __int128)counter.at[2] * 0xCA5A826395121157u;
        counter = {{std::uint64_t(b >> 64) ^ counter.at[1] ^ first, std::uint64_t(b),
                    std::uint64_t(a >> 64) ^ counter.at[3] ^ second, std::uint64_t(a)}};
        first += 0x9E3779B97F4A7C15u;
        second += 0xBB67AE8584CAA73Bu;
    }
    return counter;
}

inline std::uint64_t bits_of(double x) {
    std::uint64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline double of_bits(std::uint64_t bits) {
    double x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// -log(x) of a positive, normal number, to about one unit in the last place.
//
// x = 2^e (1 + f) with 1 + f from sqrt(1/2) to sqrt(2).  With s = f / (2 + f), log(1 + f) is twice the series
// s + s^3/3 + s^5/5 + ..., and 2 s = f - s f, whose first term is exact.
inline double negative_log(double x) {
    constexpr std::uint64_t ONE = 0x3FF0000000000000, ROOT = 0x3FE6A09E667F3BCD, SHIFT = 0x4330000000000000;
    const std::uint64_t raised = bits_of(x) + (ONE - ROOT);  // the exponent changes at sqrt(1/2)
    const std::uint64_t power = raised >> 52;                // e + 1023
    const double e = of_bits(power | SHIFT) - (4503599627370496.0 + 1023.0);
    const double f = of_bits((raised & 0x000FFFFFFFFFFFFFu) + ROOT) - 1.0;
    const double s = f / (2.0 + f), z = s * s;
    double rest = 2.0 / 21.0;
    for (int odd = 19; odd > 1; odd -= 2) rest = rest * z + 2.0 / odd;
    rest *= z;
    constexpr double HIGH = 0x1.62e42fefa38p-1, LOW = 0x1.ef35793c7673p-45;  // log 2, the first part of 42 bits
    return (s * (f - rest) - e * LOW) - f - e * HIGH;
}

// The noise of a position of a seed: words behind the counter [0, 0, position, 0], four of which are made together.
struct Place {
    std::uint64_t seed, position;

    Words words(long block) const { return philox({{std::uint64_t(block) + 1, 0, position, 0}}, seed); }
};

// A word's first 52 bits k as a number inside (0, 1): (k + 1/2) / 2^52.
inline double uniform(std::uint64_t word) { return of_bits(word >> 12 | 0x3FF0000000000000u) - (1.0 - 0x1p-53); }

}  // namespace

// The exponential numbers [size] of a position, -log of uniform ones.
extern "C" void exponentials(const Place *place, long size, double *result) {
#pragma omp parallel for if (size > ONE_THREAD)
    for (long from = 0; from < size; from += PIECE) {
        const long to = size - from < PIECE ? size : from + PIECE;
        for (long i = from; i < to; i += 4) {
            const Words words = place->words(i / 4);
            for (long j = 0; j < 4 && i + j < to; j++) result[i + j] = uniform(words.at[j]);
        }
        for (long i = from; i < to; i++) result[i] = negative_log(result[i]);
    }
}

// Those of some tokens [count] in order.
extern "C" void exponentials_of(const Place *place, const std::int64_t *tokens, long count, double *result) {
    long block = -1;
    Words words;
    for (long i = 0; i < count; i++) {
        if (tokens[i] / 4 != block) words = place->words(block = tokens[i] / 4);
        result[i] = negative_log(uniform(words.at[tokens[i] % 4]));
    }
}

// -log of positive numbers [size], in their place.
extern "C" void negative_logs(double *numbers, long size) {
#pragma omp parallel for if (size > ONE_THREAD)
    for (long i = 0; i < size; i++) numbers[i] = negative_log(numbers[i]);
}
