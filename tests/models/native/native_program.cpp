// Runs every kernel on numbers made from a seed and writes the results to a file, for one CPU to be compared with another.
//
//   native_program SEED FILE
//
// A block of the file is its name, a tab, how many bfloat16 numbers it has, a newline, and the numbers.  The exit code is
// 1 where a row has other bits alone than in company.

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "forward.cpp"

extern "C" {
void linear_product(const Linear *, bfloat16 *, long, long, const bfloat16 *, bfloat16 *, long *);
void attention(const bfloat16 *, const bfloat16 *, const bfloat16 *, const long *, const bfloat16 *, long, long, long, long,
               long, long, long, long, double, bfloat16 *, long, long *);
}

namespace {

typedef std::vector<bfloat16> Numbers;

std::uint64_t state;
std::FILE *file;
bool differs = false;

std::uint32_t bits() {  // splitmix64
    std::uint64_t x = state += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return std::uint32_t((x ^ (x >> 31)) >> 32);
}
float between(float low, float high) { return low + (high - low) * (float(bits() >> 8) * 0x1p-24f); }

bfloat16 narrow(float x) {
    std::uint32_t all;
    std::memcpy(&all, &x, sizeof all);
    return bfloat16(all >> 16);
}
Numbers some(long count, float low, float high) {
    Numbers x(count);
    for (bfloat16 &number : x) number = narrow(between(low, high));
    return x;
}
std::vector<float> wide(long count, float low, float high) {
    std::vector<float> x(count);
    for (float &number : x) number = between(low, high);
    return x;
}
template <class Number>
std::vector<Number> random_bits(long count, std::uint32_t mask) {
    std::vector<Number> x(count);
    for (Number &number : x) number = Number(bits() & mask);
    return x;
}

void write(const std::string &name, const Numbers &x) {
    std::fprintf(file, "%s\t%zu\n", name.c_str(), x.size());
    std::fwrite(x.data(), sizeof x[0], x.size(), file);
}

Numbers product(const Linear &linear, bfloat16 *x, long rows, const bfloat16 *residual = nullptr) {
    Numbers y(rows * linear.out);
    long failed = 0;
    linear_product(&linear, x, rows, linear.in, residual, y.data(), &failed);
    if (failed) std::exit(2);
    return y;
}

// Results [rows, out] of `run(first row, rows)`, which are written, and those of every row alone.
template <class Run>
void compare(const std::string &name, long rows, Run run) {
    const Numbers together = run(0, rows);
    Numbers alone;
    for (long row = 0; row < rows; row++) {
        const Numbers one = run(row, 1);
        alone.insert(alone.end(), one.begin(), one.end());
    }
    if (alone != together) {
        std::fprintf(stderr, "%s: a row has other bits alone\n", name.c_str());
        differs = true;
    }
    write(name, together);
}

std::string numbered(const char *name, long a, long b = 0, long c = 0) {
    return std::string(name) + " " + std::to_string(a) + " " + std::to_string(b) + " " + std::to_string(c);
}

void bfloat16_products() {
    for (long in : {30, 512})
        for (long out : {33, 96}) {
            Numbers x = some(9 * in, -2, 2), residual = some(9 * out, -2, 2);
            const Numbers weight = some((out + WIDTH - 1) / WIDTH * WIDTH * in, -1, 1);
            const auto bias = wide(out, -1, 1);
            const Linear linear = {BFLOAT16, in, out, 0, weight.data(), nullptr, bias.data()};
            compare(numbered("bfloat16", in, out), 9,
                    [&](long row, long rows) { return product(linear, &x[row * in], rows, &residual[row * out]); });
        }
}

void integer_products() {
    for (long bits : {8, 4})
        for (long group : {32, 128}) {
            const long in = 256, out = 40, blocks = 2, each = bits == 8 ? in : group;
            Numbers x = some(9 * in, -2, 2);
            const auto weight = random_bits<std::uint8_t>(blocks * WIDTH * in * bits / 8, 255);
            const Numbers scales = some(blocks * 2 * WIDTH * (in / each), -.02f, .02f);
            const Linear linear = {bits == 8 ? EIGHT : FOUR, in, out, each, weight.data(), scales.data(), nullptr};
            compare(numbered("integers", bits, group), 9,
                    [&](long row, long rows) { return product(linear, &x[row * in], rows); });
        }
}

// A weight in bytes and what it points to.
struct Bytes {
    std::vector<std::uint8_t> weight;
    std::vector<std::uint16_t> scales;
    std::vector<std::int8_t> steps;
    std::vector<float> bias;
    Linear linear;

    Bytes(Form form, long bits, long group, long in, long out, bool zeros) {
        const long blocks = (out + WIDTH - 1) / WIDTH, kinds = zeros ? 2 : 1;
        weight = random_bits<std::uint8_t>(blocks * WIDTH * in * bits / 8, 255);
        if (form == PER_ROW || form == PAIRS)
            scales = some(blocks * WIDTH * (form == PER_ROW ? 1 : 2 * (in / group)), -.02f, .02f);
        else  // float16 numbers up to 2^-7, those below 2^-14 among them
            scales = random_bits<std::uint16_t>(blocks * kinds * WIDTH * (in / group), 0x9fff);
        steps = random_bits<std::int8_t>(blocks * kinds * WIDTH * (in / group), 63);
        bias = wide(out, -1, 1);
        linear = {BYTES, in, out, group, weight.data(), scales.data(), bias.data(), steps.data(), bits, form, zeros,
                  bits == 8 ? 128. : 8.};
    }
};

void byte_products() {
    struct Case { Form form; long bits, group; bool zeros; };
    const Case cases[] = {{PER_ROW, 8, 512, false}, {PAIRS, 4, 32, true}, {PAIRS, 4, 128, true}, {HALVES, 8, 32, false},
                          {HALVES, 4, 32, true},    {STEPS, 4, 32, true}, {STEPS, 8, 16, false}, {STEPS, 4, 16, true}};
    for (const Case &one : cases) {
        const long in = 512, out = 40;
        const Bytes weight(one.form, one.bits, one.group, in, out, one.zeros);
        Numbers x = some(11 * in, -2, 2);
        compare(numbered("bytes", one.form, one.bits, one.group), 11,
                [&](long row, long rows) { return product(weight.linear, &x[row * in], rows); });
    }
}

void attentions() {
    for (long size : {32, 64, 96, 128, 256}) {
        const long heads = 6, groups = 2, rows = 5, slots = 37;
        const Numbers query = some(rows * heads * size, -2, 2), keys = some(groups * slots * size, -2, 2);
        const Numbers values = some(groups * slots * size, -2, 2);
        Numbers mask(rows * slots);
        for (long i = 0; i < rows * slots; i++) mask[i] = i % slots && bits() % 5 < 2 ? 0xff7f : 0;
        long failed;
        const long strides[] = {0, size, heads * size, 0, slots * size, size, 0, slots * size, size};
        compare(numbered("attention", size), rows, [&](long row, long count) {
            Numbers y(count * heads * size);
            attention(&query[row * heads * size], keys.data(), values.data(), strides, &mask[row * slots], 0, slots, 1,
                      heads, groups, count, slots, size, .2, y.data(), 1, &failed);
            return y;
        });
    }
}

// Two layers: weights of all kinds, norms of heads, a scaled sublayer and one with a norm behind it.
void whole_forward() {
    const long width = 96, heads = 4, groups = 2, dim = 32, inner = 160, vocabulary = 70, slots = 24, before = 7, rows = 6;
    const long qkv = (heads + 2 * groups) * dim;
    std::vector<Numbers> kept;
    std::vector<std::vector<float>> norms;
    std::vector<Bytes *> bytes;
    const auto plain = [&](long in, long out) -> Linear {
        kept.push_back(some((out + WIDTH - 1) / WIDTH * WIDTH * in, -.2f, .2f));
        return {BFLOAT16, in, out, 0, kept.back().data(), nullptr, nullptr};
    };
    const auto in_bytes = [&](long in, long out) {
        bytes.push_back(new Bytes(PAIRS, 4, 32, in, out, true));
        return bytes.back()->linear;
    };
    const auto four = [&](long in, long out) {
        Linear linear = in_bytes(in, out);
        linear.kind = FOUR;
        return linear;
    };
    const auto norm = [&](long size) -> Norm {
        norms.push_back(wide(size, .5f, 1.5f));
        return {norms.back().data(), 1e-6};
    };
    const Linear weights[2][4] = {
        {plain(width, qkv), four(heads * dim, width), in_bytes(width, 2 * inner), plain(inner, width)},
        {in_bytes(width, qkv), in_bytes(heads * dim, width), four(width, 2 * inner), four(inner, width)}};
    const Linear head = plain(width, vocabulary);
    const Norm none = {nullptr, 0};
    std::vector<Layer> layers;
    for (long i = 0; i < 2; i++)
        layers.push_back({norm(width), i ? norm(width) : none, norm(width), none, i ? none : norm(dim), i ? none : norm(dim),
                          {&weights[i][0], 1}, {&weights[i][1], 1}, {&weights[i][2], 1}, {&weights[i][3], 1},
                          .17, i ? .5 : 1., 0, 0, 0, i ? GELU_TANH : SILU});
    const Model model = {layers.data(), 2, width, heads, groups, dim, norm(width), {&head, 1}};
    const Numbers x = some((before + rows) * width, -1, 1);
    const auto cos = wide((before + rows) * dim, -1, 1), sin = wide((before + rows) * dim, -1, 1);

    // Logits of tokens `from` to `to`, which see all before them and themselves.
    std::vector<Numbers> cache(4, Numbers(groups * slots * dim));
    const auto run = [&](long from, long to) {
        const long count = to - from, width_ = count;
        bfloat16 *keys[] = {cache[0].data(), cache[1].data()}, *values[] = {cache[2].data(), cache[3].data()};
        Numbers mask(count * to);
        for (long row = 0; row < count; row++)
            for (long slot = 0; slot < to; slot++) mask[row * to + slot] = slot > from + row ? 0xff7f : 0;
        const bfloat16 *masks[] = {mask.data()};
        const Group group = {keys, values, slots, to, 0, 1, width_, &from, &width_, masks};
        const float *cosines[] = {&cos[from * dim]}, *sines[] = {&sin[from * dim]};
        bfloat16 *taps[] = {nullptr, nullptr, nullptr};
        std::vector<long> want(count);
        for (long row = 0; row < count; row++) want[row] = row;
        Numbers logits(count * vocabulary);
        const Call call = {count, 1, &group, &x[from * width], 0, 2, "\0\0", "\0\0", 1, dim, cosines, sines, taps, nullptr,
                           count, want.data(), nullptr, logits.data()};
        long failed = 0;
        forward(&model, &call, 2, &failed);
        if (failed) std::exit(2);
        return logits;
    };
    write("prompt", run(0, before));
    compare("forward", rows, [&](long row, long count) { return run(before + row, before + row + count); });
    for (Bytes *one : bytes) delete one;
}

}  // namespace

int main(int count, char **arguments) {
    if (count != 3 || !(file = std::fopen(arguments[2], "wb"))) return 2;
    state = std::strtoull(arguments[1], nullptr, 10);
    bfloat16_products();
    integer_products();
    byte_products();
    attentions();
    whole_forward();
    return std::fclose(file) || differs;
}
