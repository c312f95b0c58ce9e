// Noise, weights and scans over rows of logits: the inner loops of sampling.
//
// Written as loops over blocks of 64 tokens, in GCC's generic vectors or for the compiler to vectorise. Every float
// operation is a single rounded one (the build forbids contraction), so that all instruction sets, and the reference in
// torch, give the same bits.
#include "../sampling.hpp"

#include "simd.hpp"

namespace quire::QUIRE_ISA {

constexpr int BLOCK = 64;  // tokens; 16 Philox counters
constexpr int SPAN = 128;  // tokens that a draw passes over together, where none of them can win
constexpr float MINUS_INFINITY = -__builtin_inff();

// GCC's generic vectors, as wide as simd.hpp's Vec.
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint64_t Longs __attribute__((vector_size(4 * LANES)));
constexpr int LONG_LANES = LANES / 2;

template <typename V, typename T>
QINLINE V load_as(const T *p) {
    V x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
}

template <typename V, typename T>
QINLINE void store_as(T *p, V x) {
    __builtin_memcpy(p, &x, sizeof x);
}

QINLINE Floats all(float x) { return x - Floats{}; }

// ---- Philox4x32-10 ----
//
// A counter's words sit in the low halves of 64-bit lanes; what the upper halves hold is never looked at.

#if defined(__AVX512F__)
// With a mask of ones, because GCC 12 warns of an uninitialised value inside its own unmasked versions.
constexpr __mmask8 ALL = 0xff;
QINLINE Longs multiply_low(Longs a, Longs b) { return (Longs)_mm512_maskz_mul_epu32(ALL, (__m512i)a, (__m512i)b); }
QINLINE Longs even_pairs(Longs a, Longs b) { return (Longs)_mm512_maskz_unpacklo_epi64(ALL, (__m512i)a, (__m512i)b); }
QINLINE Longs odd_pairs(Longs a, Longs b) { return (Longs)_mm512_maskz_unpackhi_epi64(ALL, (__m512i)a, (__m512i)b); }
#elif defined(__AVX2__)
QINLINE Longs multiply_low(Longs a, Longs b) { return (Longs)_mm256_mul_epu32((__m256i)a, (__m256i)b); }
QINLINE Longs even_pairs(Longs a, Longs b) { return (Longs)_mm256_unpacklo_epi64((__m256i)a, (__m256i)b); }
QINLINE Longs odd_pairs(Longs a, Longs b) { return (Longs)_mm256_unpackhi_epi64((__m256i)a, (__m256i)b); }
#else
QINLINE Longs multiply_low(Longs a, Longs b) { return (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu); }
QINLINE Longs even_pairs(Longs a, Longs b) { return Longs{a[0], b[0]}; }
QINLINE Longs odd_pairs(Longs a, Longs b) { return Longs{a[1], b[1]}; }
#endif

constexpr int NUM_ROUNDS = 10;

// What the counters of one draw have in common: their upper words and the keys of all rounds.
struct Rounds {
    Longs position_low, position_high, keys[NUM_ROUNDS][2];

    explicit Rounds(const DrawKey &key) : position_low(Longs{} + key.position), position_high(Longs{} + (key.position >> 32)) {
        uint32_t k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
        for (int round = 0; round < NUM_ROUNDS; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
            keys[round][0] = Longs{} + uint64_t{k0};
            keys[round][1] = Longs{} + uint64_t{k1};
        }
    }
};

struct Counters {
    Longs words[4];
};

// LONG_LANES counters from `first` on: lane 2 q holds counter q and lane 2 q + 1 counter q + LONG_LANES / 2, so that pairing
// the even lanes, then the odd ones, puts their words in order.
QINLINE Counters encrypted(uint64_t first, const Rounds &rounds) {
    static const uint64_t STEPS[] = {0, LONG_LANES / 2, 1, LONG_LANES / 2 + 1, 2, LONG_LANES / 2 + 2, 3, LONG_LANES / 2 + 3};
    Longs c0 = load_as<Longs>(STEPS) + first, c1 = rounds.position_low, c2 = rounds.position_high, c3{};
    const Longs multiplier0 = Longs{} + 0xD2511F53u, multiplier1 = Longs{} + 0xCD9E8D57u;
    QUNROLL for (int round = 0; round < NUM_ROUNDS; ++round) {
        const Longs product0 = multiply_low(c0, multiplier0), product1 = multiply_low(c2, multiplier1);
        c0 = (product1 >> 32) ^ c1 ^ rounds.keys[round][0];
        c2 = (product0 >> 32) ^ c3 ^ rounds.keys[round][1];
        c1 = product1;
        c3 = product0;
    }
    return {{c0, c1, c2, c3}};
}

// The words of 2 * LANES tokens from 4 * first_counter on, in order.
QINLINE void philox(uint64_t first_counter, const Rounds &rounds, uint32_t *words) {
    const Counters c = encrypted(first_counter, rounds);
    const Longs first = (c.words[0] & 0xFFFFFFFFu) | (c.words[1] << 32);
    const Longs second = (c.words[2] & 0xFFFFFFFFu) | (c.words[3] << 32);
    store_as(words, even_pairs(first, second));
    store_as(words + LANES, odd_pairs(first, second));
}

// ---- logarithm and Gumbel noise ----

// log((1 + f) * 2^exponent); the coefficients are those of quire/kernels/reference/sampling.py
QINLINE Floats log_reduced(Floats f, Floats exponent) {
    Floats power = all(-0x1.392f30p-4f);
    power = power * f + 0x1.05b75cp-3f;
    power = power * f + -0x1.0d9a40p-3f;
    power = power * f + 0x1.22cf4ep-3f;
    power = power * f + -0x1.546f2ap-3f;
    power = power * f + 0x1.99a060p-3f;
    power = power * f + -0x1.000232p-2f;
    power = power * f + 0x1.555554p-2f;
    const Floats square = f * f;
    const Floats tail = (power * f) * square + exponent * 0x1.7f7d1cp-20f;
    return (f + (tail - square * 0.5f)) + exponent * 0x1.62e400p-1f;
}

struct Split {
    Floats f, exponent;  // of x = (1 + f) * 2^exponent
};

QINLINE Split split(Floats x) {
    const Ints shifted = (Ints)x - 0x3F3504F3;
    return {(Floats)((shifted & 0x7FFFFF) + 0x3F3504F3) - 1.0f, __builtin_convertvector(shifted >> 23, Floats)};
}

QINLINE Floats gumbel(Ints word) {
    const Ints is_high = word >> 31;  // all ones or zero
    const Floats x = (__builtin_convertvector(word ^ is_high, Floats) + 0.5f) * 0x1p-32f;
    const Split low = split(x);
    const Ints is_halved = x > 0x1.2bec34p-2f;  // 1 - sqrt(1/2)
    const Floats high_f = is_halved ? 1.0f - (x + x) : -x;
    const Floats f = is_high ? high_f : low.f;
    const Floats exponent = is_high ? (Floats)(is_halved & (Ints)all(-1.0f)) : low.exponent;
    const Split exponential = split(-log_reduced(f, exponent));
    return -log_reduced(exponential.f, exponential.exponent);
}

QINLINE void block_words(int64_t first_token, const Rounds &rounds, uint32_t *words) {
    const uint64_t counter = static_cast<uint64_t>(first_token) >> 2;
    QUNROLL for (int i = 0; i < BLOCK; i += 2 * LANES) philox(counter + i / 4, rounds, words + i);
}

static void noise(int64_t num_tokens, const DrawKey &key, float *out) {
    const Rounds rounds(key);
    alignas(64) uint32_t words[BLOCK];
    alignas(64) float block[BLOCK];
    for (int64_t start = 0; start < num_tokens; start += BLOCK) {
        block_words(start, rounds, words);
        QUNROLL for (int i = 0; i < BLOCK; i += LANES) store_as(block + i, gumbel(load_as<Ints>(words + i)));
        for (int i = 0; i < BLOCK && start + i < num_tokens; ++i) out[start + i] = block[i];
    }
}

// ---- blocks of logits ----

// The block of logits at `start`: in place where it is whole, else a copy filled up with -inf.
QINLINE const float *block_at(const float *logits, int64_t start, int64_t num_tokens, float *padded) {
    if (start + BLOCK <= num_tokens) return logits + start;
    for (int i = 0; i < BLOCK; ++i) padded[i] = start + i < num_tokens ? logits[start + i] : MINUS_INFINITY;
    return padded;
}

// kept[i] is all ones or zero; returns whether any is kept.
QINLINE bool mark_kept(const float *block, int64_t start, const FilterThreshold &threshold, int32_t *kept) {
    const int64_t last = threshold.token_id - start;
    const int32_t last_index = static_cast<int32_t>(last < -1 ? -1 : (last > BLOCK ? BLOCK : last));
    int32_t any = 0;
    for (int i = 0; i < BLOCK; ++i) {
        const int32_t above = -static_cast<int32_t>(block[i] > threshold.value);
        const int32_t equal = -static_cast<int32_t>(block[i] == threshold.value) & -static_cast<int32_t>(i <= last_index);
        kept[i] = (above | equal) & -static_cast<int32_t>(block[i] > MINUS_INFINITY);
        any |= kept[i];
    }
    return any != 0;
}

static int64_t next_above(const float *logits, int64_t start, int64_t num_tokens, float threshold) {
    int64_t i = start;
    for (; i + BLOCK <= num_tokens; i += BLOCK) {
        int32_t any = 0;
        for (int j = 0; j < BLOCK; ++j) any |= static_cast<int32_t>(!(logits[i + j] <= threshold));
        if (any) break;
    }
    for (; i < num_tokens; ++i) {
        if (!(logits[i] <= threshold)) return i;
    }
    return num_tokens;
}

static int64_t count_above(const float *logits, int64_t num_tokens, float value) {
    int64_t count = 0, i = 0;
    for (; i + BLOCK <= num_tokens; i += BLOCK) {
        int32_t in_block = 0;
        for (int j = 0; j < BLOCK; ++j) in_block += static_cast<int32_t>(logits[i + j] > value);
        count += in_block;
    }
    for (; i < num_tokens; ++i) count += logits[i] > value;
    return count;
}

// ---- draws ----

constexpr float LARGEST_NOISE = 23.0f;  // above 33 log(2), the noise of the word 2^32 - 1

// 2^x, or up to 6.2 % more, for x between -126 and 127: the bits of a float, read as an integer, are nearly its logarithm.
QINLINE float exp2_bound(float x) {
    const int32_t bits = static_cast<int32_t>((x + 127.0f) * 0x1p23f);
    float bound;
    __builtin_memcpy(&bound, &bits, sizeof bound);
    return bound;
}

// Words below this one have less noise than `noise`. As -log(1 - x) > x, noise above t needs a word r with
// (2^32 - 1 - r) / 2^32 < exp(-t); a margin covers rounding. Saves most logarithms, since few tokens can still win.
QINLINE uint32_t least_word(float noise) {
    if (!(noise >= 0.5f)) return 0;  // also where it is not a number: nothing was drawn yet
    return ~(static_cast<uint32_t>(exp2_bound(noise * -0x1.715476p+0f) * 0x1.001p32f) + 2);
}

QINLINE Words larger(Words a, Words b) { return a > b ? a : b; }

QINLINE bool any_reaches(const uint32_t *words, int count, uint32_t least) {
    int32_t any = 0;
    for (int i = 0; i < count; ++i) any |= static_cast<int32_t>(words[i] >= least);
    return any != 0;
}

// Whether some word of SPAN tokens reaches `least`, which is above 0. Their order does not matter, so they are not put in one.
QINLINE bool span_reaches(int64_t first_token, const Rounds &rounds, uint32_t least) {
    const uint64_t counter = static_cast<uint64_t>(first_token) >> 2;
    Words most{};
    QUNROLL for (int i = 0; i < SPAN / 4; i += LONG_LANES) {
        const Counters c = encrypted(counter + i, rounds);
        most = larger(most, larger(larger((Words)c.words[0], (Words)c.words[1]), larger((Words)c.words[2], (Words)c.words[3])));
    }
    uint32_t words[LANES];
    store_as(words, (Longs)most & 0xFFFFFFFFu);
    return any_reaches(words, LANES, least);
}

template <int COUNT>
QINLINE float largest(const float *logits) {
    Floats most = load_as<Floats>(logits);
    QUNROLL for (int i = LANES; i < COUNT; i += LANES) {
        const Floats x = load_as<Floats>(logits + i);
        most = x > most ? x : most;
    }
    return reduce_max((Vec)most);
}

// The search for tokens by distance and noise, in one row or a part of it.
class Search {
public:
    Search(const ScaledRow &row, int64_t first_id, const FilterThreshold *threshold, const DrawKey &key)
        : row_(row), first_id_(first_id), threshold_(threshold), rounds_(key) {}

    // The first token at or after `start` whose score is above `least`.
    Hit next(int64_t start, float least) const {
        while (start < row_.num_tokens) {
            if (start % SPAN == 0 && start + SPAN <= row_.num_tokens && !may_win(start, least)) {
                start += SPAN;
                continue;
            }
            const int64_t block = start / BLOCK * BLOCK;
            const Hit hit = next_in_block(block, start, least);
            if (hit.index < row_.num_tokens) return hit;
            start = block + BLOCK;
        }
        return {row_.num_tokens, 0.0f, 0.0f};
    }

private:
    // The noise that a token with this logit needs.
    float missing(float logit, float least) const { return least - (logit - row_.max_logit) * row_.scale; }

    bool may_win(int64_t start, float least) const {
        const float most = largest<SPAN>(row_.logits + start);
        if (threshold_ != nullptr && most < threshold_->value) return false;
        const float noise = missing(most, least);
        if (noise > LARGEST_NOISE) return false;
        const uint32_t word = least_word(noise);
        return word == 0 || span_reaches(first_id_ + start, rounds_, word);
    }

    Hit next_in_block(int64_t start, int64_t from, float least) const {
        const Hit none{row_.num_tokens, 0.0f, 0.0f};
        alignas(64) float padded[BLOCK], noise[BLOCK], score[BLOCK];
        alignas(64) int32_t kept[BLOCK];
        alignas(64) uint32_t words[BLOCK];
        const float *block = block_at(row_.logits, start, row_.num_tokens, padded);
        if (threshold_ != nullptr && !mark_kept(block, start, *threshold_, kept)) return none;
        const float needed = missing(largest<BLOCK>(block), least);
        if (needed > LARGEST_NOISE) return none;
        block_words(first_id_ + start, rounds_, words);
        if (!any_reaches(words, BLOCK, least_word(needed))) return none;
        QUNROLL for (int i = 0; i < BLOCK; i += LANES) {
            const Floats distance = (load_as<Floats>(block + i) - row_.max_logit) * row_.scale;
            store_as(noise + i, gumbel(load_as<Ints>(words + i)));
            store_as(score + i, distance + load_as<Floats>(noise + i));
        }
        for (int i = static_cast<int>(from - start); i < BLOCK; ++i) {
            if (score[i] > least && (threshold_ == nullptr || kept[i])) return {start + i, score[i], noise[i]};
        }
        return none;
    }

    const ScaledRow &row_;
    const int64_t first_id_;
    const FilterThreshold *threshold_;
    const Rounds rounds_;
};

static int64_t draw(const ScaledRow &row, const FilterThreshold *threshold, const DrawKey &key) {
    const Search search(row, 0, threshold, key);
    Hit best{0, MINUS_INFINITY, 0.0f};
    for (Hit hit = search.next(0, best.score); hit.index < row.num_tokens; hit = search.next(hit.index + 1, best.score)) {
        best = hit;
    }
    return best.index;
}

static Hit next_hit(const ScaledRow &row, int64_t first_id, const DrawKey &key, int64_t start, float least) {
    return Search(row, first_id, nullptr, key).next(start, least);
}

// ---- weights ----

// exp(d), to the bit that of quire/kernels/reference/sampling.py; 0 < exp(d) <= 1 for d <= 0
QINLINE Floats exp_of(Floats d) {
    const Floats clamped = d < -80.0f ? all(-80.0f) : d;
    const Floats n = (clamped * 0x1.715476p+0f + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: rounds to nearest even
    const Floats r = (clamped - n * 0x1.62e400p-1f) - n * 0x1.7f7d1cp-20f;
    Floats power = all(0x1.6a2352p-10f);
    power = power * r + 0x1.123a6cp-7f;
    power = power * r + 0x1.5558f4p-5f;
    power = power * r + 0x1.555490p-3f;
    power = power * r + 0x1.fffffcp-2f;
    const Floats mantissa = ((power * (r * r)) + r) + 1.0f;
    return mantissa * (Floats)((__builtin_convertvector(n, Ints) + 127) << 23);
}

// Whether all distances of a block are such that weights and buckets are defined for them.
QINLINE bool are_below(const float *block, const ScaledRow &row) {
    int32_t any = 0;
    for (int i = 0; i < BLOCK; ++i) any |= static_cast<int32_t>(block[i] > row.max_logit);
    return any == 0;
}

// exp of a block's distances, and zero where not kept (kept may be null)
QINLINE void block_exp(const float *block, const ScaledRow &row, const int32_t *kept, float *out) {
    QUNROLL for (int i = 0; i < BLOCK; i += LANES) {
        const Floats e = exp_of((load_as<Floats>(block + i) - row.max_logit) * row.scale);
        store_as(out + i, kept == nullptr ? e : (Floats)((Ints)e & load_as<Ints>(kept + i)));
    }
}

// int(e * 2^40) = high * 2^20 + low, both below or at 2^20: sums of up to 2^11 of them fit 32 bits.
constexpr int SUM_BLOCKS = 256;

static int64_t total(const ScaledRow &row, const FilterThreshold *threshold) {
    alignas(64) float padded[BLOCK], e[BLOCK];
    alignas(64) int32_t kept[BLOCK];
    int64_t sum = 0, start = 0;
    while (start < row.num_tokens) {
        Ints high_sum{}, low_sum{};
        const int64_t end = min64(row.num_tokens, start + SUM_BLOCKS * BLOCK);
        for (; start < end; start += BLOCK) {
            const float *block = block_at(row.logits, start, row.num_tokens, padded);
            if (!are_below(block, row)) return -1;
            if (threshold != nullptr && !mark_kept(block, start, *threshold, kept)) continue;
            block_exp(block, row, threshold != nullptr ? kept : nullptr, e);
            QUNROLL for (int i = 0; i < BLOCK; i += LANES) {
                const Floats x = load_as<Floats>(e + i) * 0x1p20f;
                const Ints high = __builtin_convertvector(x, Ints);
                high_sum += high;
                low_sum += __builtin_convertvector((x - __builtin_convertvector(high, Floats)) * 0x1p20f, Ints);
            }
        }
        for (int lane = 0; lane < LANES; ++lane) sum += (int64_t{high_sum[lane]} << 20) + low_sum[lane];
    }
    return sum;
}

// Bucket of each token of a block; NUM_BUCKETS for those that are not kept.
QINLINE void find_buckets(const float *block, const ScaledRow &row, float floor, int32_t *buckets) {
    for (int i = 0; i < BLOCK; ++i) {
        const float d = (block[i] - row.max_logit) * row.scale;
        const float far = d * -BUCKETS_PER_NAT;
        const float clamped = far < float{NUM_BUCKETS - 1} ? far : float{NUM_BUCKETS - 1};
        const int32_t is_kept = -static_cast<int32_t>(d >= floor) & -static_cast<int32_t>(block[i] > MINUS_INFINITY);
        buckets[i] = (static_cast<int32_t>(clamped) & is_kept) | (NUM_BUCKETS & ~is_kept);
    }
}

static bool histogram(const ScaledRow &row, float floor, Histogram &out) {
    alignas(64) float padded[BLOCK], e[BLOCK];
    int32_t buckets[BLOCK];
    __builtin_memset(&out, 0, sizeof out);
    for (int64_t start = 0; start < row.num_tokens; start += BLOCK) {
        const float *block = block_at(row.logits, start, row.num_tokens, padded);
        if (!are_below(block, row)) return false;
        find_buckets(block, row, floor, buckets);
        block_exp(block, row, nullptr, e);
        for (int i = 0; i < BLOCK; ++i) {
            if (buckets[i] == NUM_BUCKETS) continue;
            Bucket &bucket = out.buckets[buckets[i]];
            bucket.count += 1;
            bucket.weight += static_cast<int64_t>(e[i] * 0x1p40f);
        }
    }
    return true;
}

static int64_t collect(const ScaledRow &row, float floor, int bucket, int32_t *ids) {
    float padded[BLOCK];
    int32_t buckets[BLOCK];
    int64_t count = 0;
    for (int64_t start = 0; start < row.num_tokens; start += BLOCK) {
        find_buckets(block_at(row.logits, start, row.num_tokens, padded), row, floor, buckets);
        int32_t any = 0;
        for (int i = 0; i < BLOCK; ++i) any |= static_cast<int32_t>(buckets[i] == bucket);
        for (int i = 0; any && i < BLOCK; ++i) {
            if (buckets[i] == bucket) ids[count++] = static_cast<int32_t>(start + i);
        }
    }
    return count;
}

static void weigh(const ScaledRow &row, const int32_t *ids, int64_t count, int64_t *weights) {
    alignas(64) float logits[BLOCK], e[BLOCK];
    for (int64_t start = 0; start < count; start += BLOCK) {
        const int64_t width = min64(BLOCK, count - start);
        for (int i = 0; i < BLOCK; ++i) logits[i] = i < width ? row.logits[ids[start + i]] : row.max_logit;
        block_exp(logits, row, nullptr, e);
        for (int i = 0; i < width; ++i) weights[start + i] = static_cast<int64_t>(e[i] * 0x1p40f);
    }
}

extern const SamplingTable sampling_table;
const SamplingTable sampling_table = {
    next_above, count_above, draw, next_hit, total, histogram, collect, weigh, noise,
};

}  // namespace quire::QUIRE_ISA
