// Numbers as weights and activations hold them.
#pragma once

#include <cstdint>
#include <cstring>

#undef UNROLL
#define UNROLL _Pragma("GCC unroll 16")

namespace lanes {

typedef std::uint16_t bfloat16;
typedef std::int32_t __attribute__((may_alias)) four;  // bytes of four inputs
typedef std::int32_t __attribute__((may_alias)) pair;  // two neighbouring numbers of 16 bits

inline float widened(bfloat16 x) {
    const std::uint32_t bits = std::uint32_t(x) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

}  // namespace lanes
