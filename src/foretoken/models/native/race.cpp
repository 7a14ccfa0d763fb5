// The tokens that win: of each row of logits the one of largest log-probability plus noise.
//
// Few tokens can win.  The noise of a token is made only where a bound of it, which takes no logarithm, reaches the best
// sum so far; the sums of these are those of the plain computation, to the last bit.

#include "noise.h"
#include "numbers.h"

namespace {

using namespace noise;
using lanes::bfloat16;

constexpr long STRIP = 16;  // numbers that are compared together
constexpr long NOBODY = -1;
constexpr float NONE = -__builtin_inff();

inline float as_float(float x) { return x; }
inline float as_float(bfloat16 x) { return lanes::widened(x); }

// A row of logits [size].
template <typename Number>
struct Row {
    const Number *logits;
    long size;

    // The largest; NaN where one of them is no number.
    float most() const {
        float tops[STRIP];
        int faults[STRIP] = {};
        for (float &top : tops) top = NONE;
        const auto see = [&](long from, long count) {
            for (long j = 0; j < count; j++) {
                const float x = as_float(logits[from + j]);
                tops[j] = x > tops[j] ? x : tops[j];
                faults[j] |= x != x;
            }
        };
        long from = 0;
        for (; from + STRIP <= size; from += STRIP) see(from, STRIP);
        see(from, size - from);
        float most = NONE;
        for (long j = 0; j < STRIP; j++) {
            if (faults[j]) return __builtin_nanf("");
            most = tops[j] > most ? tops[j] : most;
        }
        return most;
    }

    // The first place of a value that is there.
    long place_of(float value) const {
        long from = 0;
        for (; from + STRIP <= size; from += STRIP) {
            int equal = 0;
            for (long j = 0; j < STRIP; j++) equal |= as_float(logits[from + j]) == value;
            if (equal) break;
        }
        while (as_float(logits[from]) != value) from++;
        return from;
    }
};

// The noise of a token by its word, and a bound of it.  With v = 1 - u, -log(u) > v, so that the noise is below -log(v),
// which is at most log 2 times the number of zeros in front of v's first digit.
inline double noise_of(std::uint64_t word) { return negative_log(negative_log(uniform(word))); }
inline double bound_of(std::uint64_t word) {
    return std::int32_t(1023 - (bits_of(uniform(~word)) >> 52)) * 0.6931471806;
}

struct Winner {
    long token;
    double sum;

    void meet(long other, double others) {
        if (others > sum || (others == sum && other < token)) *this = {other, others};
    }
};

// Log-probabilities, up to a constant, of a row: logits over a temperature, from the largest on if it is not 1.
template <typename Number>
struct Race {
    Row<Number> row;
    Place place;
    float most, temperature;

    double log_probability(long token) const {
        const float logit = as_float(row.logits[token]);
        return temperature == 1 ? logit : (logit - most) / temperature;
    }
    double sum(long token) const {
        return log_probability(token) + noise_of(place.words(token / 4).at[token % 4]);
    }

    // Tokens [from, to), `from` a multiple of four.
    Winner run(long from, long to, Winner best) const {
        std::uint64_t words[PIECE];
        double most_sums[PIECE];
        for (; from < to; from += PIECE) {
            const long count = to - from < PIECE ? to - from : PIECE;
            for (long i = 0; i < count; i += 4) {
                const Words four = place.words((from + i) / 4);
                std::memcpy(words + i, four.at, sizeof four.at);
            }
            for (long i = 0; i < count; i++) most_sums[i] = log_probability(from + i) + bound_of(words[i]);
            for (long i = 0; i < count; i++)
                if (most_sums[i] >= best.sum) best.meet(from + i, log_probability(from + i) + noise_of(words[i]));
        }
        return best;
    }
};

template <typename Number>
long winner(const Number *logits, const Place &place, long size, float temperature) {
    const Row<Number> row{logits, size};
    const float most = row.most();
    if (most - most != 0) return NOBODY;
    const long first = row.place_of(most);
    const Race<Number> race{row, place, most, temperature};
    return race.run(0, size, {first, race.sum(first)}).token;
}

// (One row takes a third of a millisecond, less than it can take two threads to meet.)
template <typename Number>
void find(const Number *rows, const Place *places, long count, long size, float temperature, std::int64_t *tokens) {
#pragma omp parallel for if (count > 1 && count * size > ONE_THREAD)
    for (long i = 0; i < count; i++) tokens[i] = winner(rows + i * size, places[i], size, temperature);
}

}  // namespace

// Of rows [count, size], of bfloat16 numbers if they are `narrow`, and a place for each; NOBODY where none is finite.
extern "C" void winners(
    const void *rows, long narrow, const Place *places, long count, long size, double temperature, std::int64_t *tokens
) {
    if (narrow)
        find((const bfloat16 *)rows, places, count, size, float(temperature), tokens);
    else
        find((const float *)rows, places, count, size, float(temperature), tokens);
}
