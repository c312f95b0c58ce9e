// Paged attention by AMX where the query is bfloat16 and the cache has 16 or 8 bits; all else is AVX512-VNNI's.
//
// Tasks, tiles of keys, splits and the softmax are everyone's (isa/attention*). Here a tile's scores are products of tiles
// of 16 rows of the query with 16 keys, and its outputs products of 16 rows of weights, rounded to bfloat16, with 16
// elements of the values. The unit wants its right side by pairs: two elements of 16 keys side by side, which are the words
// of their rows transposed, or an element of two neighbouring positions, which are their rows interleaved. Elements of 8
// bits are exact in bfloat16; the scale of a key is multiplied into its scores, that of a value into its weights.
//
// A score is the same chain in any batch, an output one over all positions of the tile, where those that a row does not
// see have the weight 0. Rows that see nothing of a tile keep their outputs: even the sum with zeros could change a sign.
//
// Many rows go by blocks of 32 over a run of tiles whose keys and values were gathered for all of them (RowBlocks). What the
// unit multiplies and what vectors do meanwhile take turns (amx_unit.hpp).
#include "amx_attention.hpp"
#include "amx_unit.hpp"
#include "extension.hpp"

namespace quire::QUIRE_ISA {

constexpr int KEY_TILES = TILE / 16;

// The first `count` bytes of a line, or all that it has; zeros behind them.
QINLINE Bits load_line(const char *from, int64_t count) {
    return count >= LINE ? load_bits(from) : load_bytes(from, static_cast<int>(count));
}
static void store_line(char *to, Bits line) { store(reinterpret_cast<float *>(to), as_float(line)); }

// ---- gathering ----

// A row of the query in so many tiles of 32 elements; null: zeros.
static void gather_row(const bf16 *row, int64_t head_size, char *to) {
    for (int64_t d = 0; d < head_size; d += PAIRED, to += TILE_BYTES) {
        const int64_t num_bytes = min64(PAIRED, head_size - d) * int64_t{sizeof(bf16)};
        store_line(to, row != nullptr ? load_line(reinterpret_cast<const char *>(row + d), num_bytes) : broadcast_bits(0));
    }
}

// [rows / 16][chunks of 32 elements][16 rows][32]
static void gather_tiles(const AttentionProblem &problem, const AttentionTask &task, char *query) {
    const int64_t head_size = problem.cache.head_size, chunks = num_chunks(head_size), num_rows = task.num_rows();
    RowWalk walk(task);
    RowFetcher ahead(task);
    for (int64_t r = 0; r < round_up(num_rows, ROWS); ++r) {
        ahead.step([&](const RowWalk &at) { return query_row<bf16>(problem, at); }, head_size);
        char *to = query + r / ROWS * chunks * TILE_BYTES + r % ROWS * LINE;
        gather_row(r < num_rows ? query_row<bf16>(problem, walk) : nullptr, head_size, to);
        if (r < num_rows) walk.step();
    }
}

void gather_query(const AttentionProblem &problem, const AttentionTask &task, float *query) {
    if (task.num_rows() <= FEW_ROWS) return gather_few(problem, task, query);
    gather_tiles(problem, task, reinterpret_cast<char *>(query));
}

// [chunks][TILE / 16][16 pairs of elements][16 keys]
static void gather_keys(const Turn &turn, const char *const *rows, char *keys) {
    const int64_t num_bytes = turn.problem.cache.head_size * int64_t{sizeof(bf16)};
    for (int n = 0; n < KEY_TILES; ++n) {
        char *to = keys + n * TILE_BYTES;
        for (int64_t at = 0; at < num_bytes; at += LINE, to += KEY_TILES * TILE_BYTES) {
            Vec block[LANES];
            load_words(rows + n * 16, at, num_bytes, block);
            QUNROLL
            for (int i = 0; i < LANES; ++i) store_line(to + i * LINE, as_bits(block[i]));
            turn.next.prefetch_share();
        }
    }
}

// 32 positions of the values, the first of them `rows[0]`: [value tiles][16 pairs of positions][16 elements].
static void gather_step(const Turn &turn, const char *const *rows, char *to) {
    const int64_t num_bytes = turn.problem.cache.head_size * int64_t{sizeof(bf16)};
    for (int pair = 0; pair < 16; ++pair, to += LINE) {
        const char *even = rows[2 * pair], *odd = rows[2 * pair + 1];
        for (int64_t at = 0; at < num_bytes; at += LINE) {
            const Bits x = load_line(even + at, num_bytes - at), y = load_line(odd + at, num_bytes - at);
            store_line(to + at / LINE * 2 * TILE_BYTES, interleave_low(x, y));
            store_line(to + (at / LINE * 2 + 1) * TILE_BYTES, interleave_high(x, y));
        }
        turn.next.prefetch_share();
    }
}

// Rows of a tile as bfloat16, whole lines of them.
struct WholeRows {
    alignas(64) bf16 data[TILE * MAX_HEAD_SIZE];
    const char *rows[TILE];

    template <KVFormat F>
    void fill(const char *const *from, int64_t head_size) {
        const int64_t width = num_chunks(head_size) * PAIRED;
        for (int i = 0; i < TILE; ++i) {
            bf16 *to = data + i * width;
            int64_t d = 0;
            for (; d + LANES <= head_size; d += LANES) store_normal(to + d, load_lanes<F>(from[i], d));
            for (; d < width; d += LANES) store_normal(to + d, load_elements<F>(from[i], d, head_size, 1.0f));
            rows[i] = reinterpret_cast<const char *>(to);
        }
    }
};

// ---- a run of tiles ----

// Two tiles of rows, a block, pass over all of a run's tiles before the next block does, so that their outputs stay in the
// first-level cache meanwhile, and each tile of the other side, which comes from the second level, is multiplied by both. While
// vectors make weights of one step's scores, the unit makes the next step's scores and the last step's outputs.
template <KVFormat F>
class RowBlocks {
   public:
    RowBlocks(const Run &run, int64_t num_rows)
        : run_(run), num_rows_(num_rows), head_size_(run.problem.cache.head_size), chunks_(num_chunks(head_size_)) {
        run.next.spread(run.count * (KEY_TILES * chunks_ + TILE / 2 + num_rows));
    }

    void attend() {
        if (num_rows_ <= ROWS && run_.count == 1) return attend_one();
        for (int tile = 0; tile < run_.count; ++tile) {
            const char *const *values = prepare(tile);
            for (int k = 0; k < VALUE_STEPS; ++k) gather_values(tile, k, values);
        }
        find_steps();
        attend_steps();
    }

   private:
    static constexpr int64_t BLOCK_ROWS = 2 * ROWS;

    struct Step {
        int64_t first_row, num_rows;
        int tile;
        bool has_blind;  // rows that see nothing of the tile
        bool is_first;   // none of the rows has seen anything before
    };

    // One tile of rows has no others to pass the time with: what is stored for the unit is loaded behind something else.
    void attend_one() {
        const char *const *values = prepare(0);
        steps_[num_steps_++] = Step{0, num_rows_, 0, !run_.is_whole[0], false};
        gather_values(0, 0, values);
        score(0);
        unit_.finish();
        gather_values(0, 1, values);
        if (raise(0)) rescale_rows(0);
        soften(0);
        weigh_alone(0);
    }
    void find_steps() {
        for (int64_t row = 0; row < num_rows_; row += BLOCK_ROWS) {
            const int64_t count = min64(BLOCK_ROWS, num_rows_ - row);
            for (int tile = 0; tile < run_.count; ++tile) {
                const int64_t num_blind = run_.is_whole[tile] ? 0 : num_empty(run_.ranges[tile] + row, count);
                if (num_blind < count) steps_[num_steps_++] = Step{row, count, tile, num_blind > 0, false};
            }
        }
    }
    static int64_t num_empty(const Range *ranges, int64_t count) {
        int64_t total = 0;
        for (int64_t r = 0; r < count; ++r) total += ranges[r].is_empty();
        return total;
    }
    void attend_steps() {
        if (num_steps_ == 0) return;
        score(0);
        unit_.finish();
        bool is_left = false;  // the last step's outputs
        for (int n = 0; n < num_steps_; ++n) {
            steps_[n].is_first = is_first(steps_[n]);
            if (raise(n)) {
                if (is_left) weigh_alone(n - 1);
                is_left = false;
                rescale_rows(n);
            }
            if (n + 1 < num_steps_) score(n + 1);
            if (is_left) weigh(n - 1);
            soften(n);
            unit_.finish();
            is_left = !steps_[n].has_blind;
            if (!is_left) weigh_alone(n);
        }
        if (is_left) weigh_alone(num_steps_ - 1);
    }
    bool is_first(const Step &step) const {
        const float *max_seen = run_.w.split.max + step.first_row;
        for (int64_t r = 0; r < step.num_rows; ++r) {
            if (max_seen[r] != NONE) return false;
        }
        return true;
    }
    // Gathers a tile's keys; returns where the rows of its values are.
    const char *const *prepare(int tile) {
        const Turn turn = run_.turn(tile);
        if constexpr (F == KVFormat::bf16) {
            gather_keys(turn, turn.tile.rows, keys_of(tile));
            return turn.tile.rows + TILE;
        } else {
            load_scales(turn, scales_[tile].keys, scales_[tile].values);
            whole_.template fill<F>(turn.tile.rows, head_size_);
            gather_keys(turn, whole_.rows, keys_of(tile));
            whole_.template fill<F>(turn.tile.rows + TILE, head_size_);
            return whole_.rows;
        }
    }
    void gather_values(int tile, int k, const char *const *values) const {
        gather_step(run_.turn(tile), values + k * PAIRED, values_of(tile) + k * step_bytes());
    }
    // The scores of step n, [rows][TILE], to the unit.
    void score(int n) {
        const Step &step = steps_[n];
        for (int k = 0; k < KEY_TILES; k += 2) {
            Job &job = unit_.add();
            job.left = reinterpret_cast<const char *>(run_.w.query) + step.first_row / ROWS * chunks_ * TILE_BYTES;
            job.right = keys_of(step.tile) + k * TILE_BYTES;
            job.second_left = chunks_ * TILE_BYTES, job.stride = LINE;
            job.left_step = TILE_BYTES, job.right_step = KEY_TILES * TILE_BYTES;
            job.num_steps = chunks_;
            job.sums = scores_of(n) + k * 16, job.row = TILE, job.adds = false;
            job.is_tall = step.num_rows > ROWS, job.is_wide = true;
        }
    }
    // To the outputs, the values of step n by their weights.
    void weigh(int n) {
        const Step &step = steps_[n];
        for (int64_t d = 0; d < run_.w.padded; d += PAIRED) add_outputs(n, piece_of(step, d));
    }
    // Without a softmax beside it; rows that see nothing of the tile keep their outputs, or get zeros in their first step.
    void weigh_alone(int n) {
        const Step &step = steps_[n];
        if (step.is_first) return weigh(n), unit_.finish();
        const Turn turn = run_.turn(step.tile);
        for (int64_t d = 0; d < run_.w.padded; d += PAIRED) {
            const OutPiece piece = piece_of(step, d);
            const Unseen unseen(turn, piece);
            add_outputs(n, piece);
            unit_.finish();
        }
    }
    OutPiece piece_of(const Step &step, int64_t d) const {
        return {step.first_row, step.num_rows, d, min64(PAIRED, run_.w.padded - d)};
    }
    void add_outputs(int n, const OutPiece &piece) {
        Job &job = unit_.add();
        job.left = reinterpret_cast<const char *>(weights_of(n));
        job.right = values_of(steps_[n].tile) + piece.first / PAIRED * 2 * TILE_BYTES;
        job.second_left = ROWS * TILE * int64_t{sizeof(bf16)}, job.stride = TILE * int64_t{sizeof(bf16)};
        job.left_step = LINE, job.right_step = step_bytes();
        job.num_steps = VALUE_STEPS;
        job.sums = piece.at(run_.w), job.row = run_.w.padded, job.adds = !steps_[n].is_first;
        job.is_tall = piece.num_rows > ROWS, job.is_wide = piece.width == PAIRED;
    }
    RawScores<is_scaled(F)> kind_of(int n, int64_t r) const {
        return RawScores<is_scaled(F)>(run_.problem, scales_[steps_[n].tile].values, scores_of(n) + r * TILE,
                                       weights_of(n) + r * TILE);
    }
    bool raise(int n) const {
        const Step &step = steps_[n];
        bool is_raised = false;
        for (int64_t r = 0; r < step.num_rows; r += ROWS) {
            const int64_t count = min64(ROWS, step.num_rows - r);
            float *scores = scores_of(n) + r * TILE;
            if constexpr (is_scaled(F)) scale_scores(scores, count, scales_[step.tile].keys);
            is_raised |= raise_max(kind_of(n, r), run_.turn(step.tile), scores, step.first_row + r, count);
        }
        return is_raised;
    }
    void rescale_rows(int n) const {
        rescale(run_.w, OutPiece{steps_[n].first_row, steps_[n].num_rows, 0, run_.w.padded});
    }
    // Step n's scores to weights, a row or so for each portion of the unit's.
    void soften(int n) {
        const Step &step = steps_[n];
        const Turn turn = run_.turn(step.tile);
        const int64_t per_row = ceil_div(unit_.num_portions(), step.num_rows);
        for (int64_t r = 0; r < step.num_rows; r += ROWS) {
            soften_rows(kind_of(n, r), turn, scores_of(n) + r * TILE, step.first_row + r, min64(ROWS, step.num_rows - r), [&] {
                for (int64_t i = 0; i < per_row; ++i) unit_.advance();
                turn.next.prefetch_share();
            });
        }
    }
    char *keys_of(int tile) const {
        return reinterpret_cast<char *>(run_.w.keys) + tile * chunks_ * KEY_TILES * TILE_BYTES;
    }
    char *values_of(int tile) const { return reinterpret_cast<char *>(run_.w.values) + tile * VALUE_STEPS * step_bytes(); }
    int64_t step_bytes() const { return chunks_ * 2 * TILE_BYTES; }
    // Neighbouring steps have buffers of their own; behind the scores, the weights.
    float *scores_of(int n) const { return run_.w.scores + n % 2 * BLOCK_ROWS * TILE; }
    bf16 *weights_of(int n) const {
        return reinterpret_cast<bf16 *>(run_.w.scores + 2 * BLOCK_ROWS * TILE) + n % 2 * BLOCK_ROWS * TILE;
    }

    const Run &run_;
    const int64_t num_rows_, head_size_, chunks_;
    Unit unit_;
    int num_steps_ = 0;
    Step steps_[MAX_ROWS / BLOCK_ROWS * RUN_TILES];
    Scales scales_[RUN_TILES];
    WholeRows whole_;
};

// Takes subnormal numbers as zero, as the unit does, for as long as it lives.
class FlushesSubnormals {
   public:
    FlushesSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | FLUSH_RESULTS | ZERO_OPERANDS); }
    FlushesSubnormals(const FlushesSubnormals &) = delete;
    FlushesSubnormals &operator=(const FlushesSubnormals &) = delete;
    ~FlushesSubnormals() { _mm_setcsr(before_); }

   private:
    static constexpr unsigned FLUSH_RESULTS = 0x8000, ZERO_OPERANDS = 0x40;
    const unsigned before_;
};

// A function of its own, that the compiler moves nothing past the change of the control register.
__attribute__((noinline)) static void attend_many(const Run &run, int64_t num_rows) {
    switch (run.problem.cache.format) {
        case KVFormat::bf16: return RowBlocks<KVFormat::bf16>(run, num_rows).attend();
        case KVFormat::int8: return RowBlocks<KVFormat::int8>(run, num_rows).attend();
        case KVFormat::fp8: return RowBlocks<KVFormat::fp8>(run, num_rows).attend();
        case KVFormat::f32: __builtin_unreachable();
    }
}

int run_length(int64_t num_rows) { return num_rows <= ROWS ? 1 : RUN_TILES; }
bool adds_to_outputs(int64_t num_rows) { return num_rows <= ROWS; }

void attend_run(const Run &run, int64_t num_rows) {
    {
        const FlushesSubnormals flushing;
        num_rows <= FEW_ROWS ? attend_few(run.turn(0), num_rows) : attend_many(run, num_rows);
    }
    run.next.prefetch_rest();
}

// ---- tasks ----

int64_t max_rows_by_tiles(const AttentionProblem &problem) {
    return has_bf16_products(problem) ? MAX_ROWS : avx512::table.max_task_rows(problem);
}

void attend_by_tiles(const AttentionProblem &problem, const AttentionTask &task, const AttentionTask *next_task,
                     float *scratch) {
    if (!has_bf16_products(problem)) return avx512::table.attend(problem, task, next_task, scratch);
    const WholeTiles configured;
    attend(problem, task, next_task, scratch);
}

}  // namespace quire::QUIRE_ISA
