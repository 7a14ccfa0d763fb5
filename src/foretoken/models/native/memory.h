// Memory that a call works in.
#pragma once

#include <cstdlib>

// Pieces laid out one behind the other; from a null pointer on they are only counted.
struct Pieces {
    char *at;

    template <class T>
    T *take(long count) {
        T *piece = (T *)at;
        at += (count * long(sizeof(T)) + 127) / 64 * 64;
        return piece;
    }
};

// Many rows that lie a multiple of 1024 bytes apart share few places of the nearest cache.
inline long apart(long size) { return 2 * size % 1024 == 0 ? size + 32 : size + size % 2; }

// Memory that a thread of the caller's keeps from call to call.
struct Kept {
    char *bytes = nullptr;
    long size = 0;

    char *of(long wanted) {
        if (wanted > size) {
            std::free(bytes);
            bytes = (char *)std::aligned_alloc(64, (wanted + 63) / 64 * 64);
            size = bytes ? wanted : 0;
        }
        return bytes;
    }
    ~Kept() { std::free(bytes); }
};
