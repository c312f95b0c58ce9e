// Outliers of int8 rows: what must not meet int8 weights in AVX2's multiply of bytes (vpmaddubsw), which adds products two and two
// in 16 bits and saturates. Weights are bytes up to 255, so the pair of inputs x and y is safe if
//
//     255 * max(x, 0) + 255 * max(y, 0) <= 32767  and  255 * min(x, 0) + 255 * min(y, 0) >= -32768.
//
// Inputs lie between -128 and 127. With opposite signs each side has one of them, and 255 * 128 = 32640 fits. With equal signs
// both hold just if |x + y| <= 128. So in every pair with a larger sum the second input is taken out, and is multiplied by itself:
// all sums are exact. The rows of a normal distribution, whose largest element is quantized to 127, have outliers in 4 % of
// their quads; those of language models, with a few large elements, in less.
//
// A group of a row is its quads (words of four inputs), then as much memory for a list with a word for each quad that has
// outliers, in ascending order: the quad's number in the high half, the second inputs of its pairs in the low half. The list ends
// with a zero, which no entry is. A row of which more than every fourth quad has outliers keeps them, and has HAS_LARGE_PAIRS for
// a list: its tile is multiplied in 16 bits.
#pragma once

#include "kernels.hpp"

#if SHORT_PAIRS

namespace quire::QUIRE_ISA {

constexpr int LARGEST_PAIR = 128;
static_assert(255 * LARGEST_PAIR <= 32767);
static_assert(MAX_INT8_GROUP / 4 < 1 << 16);  // numbers of quads

constexpr uint32_t HAS_LARGE_PAIRS = 1u << 16;  // as an entry, this would have no outliers

// The inputs that an entry stands for, in each word.
QINLINE Bits outliers_of(const uint32_t *entry) {
    return _mm256_shuffle_epi8(broadcast_word(entry), broadcast_bits(0x01800080u));
}

// Takes the outliers out of one word, whose quad is number `index`; `mask`: four bits, two for each pair that is too large.
QINLINE uint32_t take_outliers(char *word, int64_t index, uint32_t mask) {
    uint32_t inputs;
    memcpy(&inputs, word, sizeof inputs);
    const uint32_t outliers = inputs & ((mask & 3 ? 0x0000ff00u : 0) | (mask >> 2 ? 0xff000000u : 0));
    inputs &= ~outliers;
    memcpy(word, &inputs, sizeof inputs);
    return static_cast<uint32_t>(index) << 16 | (outliers >> 8 & 0xffu) | (outliers >> 16 & 0xff00u);
}

// Two bits for each pair of eight quads, or as many as there are: whether it is too large.
QINLINE uint32_t large_pairs(const char *words, int64_t num_quads) {
    const Bits inputs = num_quads >= LANES ? load_bits(words) : load_bytes(words, static_cast<int>(4 * num_quads));
    const Bits sums = _mm256_abs_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), inputs));
    return static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpgt_epi16(sums, _mm256_set1_epi16(LARGEST_PAIR))));
}

// Takes the outliers out of `num_quads` words and lists them behind.
QINLINE void set_outliers_aside(Input *group, int64_t num_quads) {
    char *words = reinterpret_cast<char *>(group);
    uint32_t *list = reinterpret_cast<uint32_t *>(words) + num_quads;
    int64_t count = 0;
    for (int64_t q = 0; q < num_quads; q += LANES) {
        const uint32_t mask = large_pairs(words + 4 * q, num_quads - q);
        count += __builtin_popcount((mask | mask >> 2) & 0x11111111u);
    }
    if (4 * count > num_quads) {
        *list = HAS_LARGE_PAIRS;
        return;
    }
    for (int64_t q = 0; count > 0 && q < num_quads; q += LANES) {
        uint32_t mask = large_pairs(words + 4 * q, num_quads - q);
        while (mask != 0) {
            const int quad = __builtin_ctz(mask) / 4;
            *list++ = take_outliers(words + 4 * (q + quad), q + quad, mask >> 4 * quad & 15);
            mask &= ~(15u << 4 * quad);
        }
    }
    *list = 0;
}

}  // namespace quire::QUIRE_ISA

#endif
