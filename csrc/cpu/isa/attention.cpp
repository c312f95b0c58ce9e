// Paged attention of one task: some query rows of one sequence that share a KV head, or of several sequences that begin with
// the same blocks, whose keys are then read once for all of them.
//
// Keys are visited in tiles of TILE absolute positions, whatever the block size. A row's scores are chains over the head's
// elements, its outputs chains over the tile's positions that it sees, both ascending; its online softmax rescales at most once
// per tile that the row can see, and its state is merged into a running state at the end of each split (as in Dao et al.,
// "Flash-Decoding", 2023). None of that depends on the other rows, on how the prompt was divided into steps, or on threads.
#include "attention_tile.hpp"

namespace quire::QUIRE_ISA {

static float *take(float *&memory, int64_t count) {
    float *taken = memory;
    memory += round_up(count, 16);
    return taken;
}

static States take_states(float *&memory, int64_t padded) {
    float *max = take(memory, MAX_ROWS);
    float *total = take(memory, MAX_ROWS * LANES);
    return States{max, total, take(memory, MAX_ROWS * padded), true};
}

static Workspace lay_out(float *memory, const AttentionProblem &problem) {
    Workspace w;
    const int64_t head_size = problem.cache.head_size, padded = padded_head(problem.out_size());
    w.padded = padded;
    w.query = take(memory, MAX_ROWS * padded_keys(head_size));
    w.keys = take(memory, RUN_COPIES * TILE * padded_keys(head_size));
    w.values = take(memory, RUN_COPIES * TILE * padded_values(head_size));
    w.scores = take(memory, MAX_ROWS * TILE);
    w.rescale = take(memory, MAX_ROWS);
    w.split = take_states(memory, padded);
    w.running = take_states(memory, padded);
    w.shared_split = take_states(memory, padded);
    w.shared_running = take_states(memory, padded);
    return w;
}

int64_t max_task_rows(const AttentionProblem &) { return MAX_ROWS; }

int64_t attention_scratch(int64_t head_size) {
    return (MAX_ROWS + RUN_COPIES * TILE) * padded_keys(head_size) + 4 * MAX_ROWS * padded_head(head_size) +
           RUN_COPIES * TILE * padded_values(head_size) + MAX_ROWS * (TILE + 4 * LANES + 5) + 16;
}

int64_t state_size(int64_t out_size) { return padded_head(out_size) + LANES + 1; }

static void clear(States &states, int64_t rows) {
    states.is_empty = false;
    for (int64_t r = 0; r < rows; ++r) states.max[r] = NONE;
}

static void begin_split(Workspace &w, int64_t rows) {
    clear(w.split, rows);
    memset(w.split.total, 0, rows * LANES * sizeof(float));
    if (adds_to_outputs(rows)) memset(w.split.out, 0, rows * w.padded * sizeof(float));
}

// ---- where a tile is, and which rows see what of it ----

// The first position that any row of a task sees.
static int64_t first_seen(const AttentionProblem &problem, const AttentionTask &task) {
    return problem.window > 0 ? max64(0, task.first_position - problem.window + 1) : 0;
}

// Stands for the rows that no row of a task sees: from the end of the context on, and behind the window, whose blocks may be
// another sequence's by now and hold numbers that are not finite.
alignas(64) static const char zero_row[kv_row_bytes(KVFormat::f32, MAX_HEAD_SIZE)] = {};

static void locate_rows(const AttentionProblem &problem, const AttentionTask &task, int64_t base, TileRows &tile) {
    const KVCache &cache = problem.cache;
    const int64_t element = kv_element_bytes(cache.format), row_bytes = problem.row_stride * element;
    const int64_t num_rows = min64(TILE, task.context_len - base);
    int64_t at = (task.first_row - task.first_position + base) * row_bytes + task.kv_head * cache.head_size * element;
    for (int64_t i = 0; i < num_rows; ++i, at += row_bytes) {
        tile.rows[i] = static_cast<const char *>(cache.keys) + at;
        tile.rows[TILE + i] = static_cast<const char *>(cache.values) + at;
    }
    for (int64_t i = num_rows; i < TILE; ++i) tile.rows[i] = tile.rows[TILE + i] = zero_row;
}

static void locate(const AttentionProblem &problem, const AttentionTask &task, int64_t base, TileRows &tile) {
    if (problem.is_bidirectional()) return locate_rows(problem, task, base, tile);
    const KVCache &cache = problem.cache;
    const int64_t row_bytes = cache.row_bytes(), head_bytes = cache.block_size * row_bytes;
    const int64_t num_rows = min64(TILE, task.context_len - base);
    const int64_t num_hidden = min64(max64(0, first_seen(problem, task) - base), num_rows);
    const int32_t *table =
        problem.block_tables + task.sequence * problem.table_stride + (base + num_hidden) / cache.block_size;
    int64_t within = (base + num_hidden) % cache.block_size;
    for (int64_t i = 0; i < num_hidden; ++i) tile.rows[i] = tile.rows[TILE + i] = zero_row;
    for (int64_t i = num_hidden; i < num_rows; ++table, within = 0) {
        const int64_t end = i + min64(num_rows - i, cache.block_size - within);
        int64_t at = (*table * cache.num_kv_heads + task.kv_head) * head_bytes + within * row_bytes;
        for (; i < end; ++i, at += row_bytes) {
            tile.rows[i] = static_cast<const char *>(cache.keys) + at;
            tile.rows[TILE + i] = static_cast<const char *>(cache.values) + at;
        }
    }
    for (int64_t i = num_rows; i < TILE; ++i) tile.rows[i] = tile.rows[TILE + i] = zero_row;
}

static Range visible(const AttentionProblem &problem, const AttentionTask &task, int64_t position, int64_t base) {
    const int64_t first = problem.window > 0 ? max64(0, position - problem.window + 1 - base) : 0;
    const int64_t end = min64(task.end_of_sight(problem, position) - base, TILE);
    return first < end ? Range{static_cast<int>(first), static_cast<int>(end)} : Range{0, 0};
}

// What each row of a task sees of a tile; returns whether that is all of it, for all rows.
static bool find_ranges(const AttentionProblem &problem, const AttentionTask &task, int64_t base, Range *ranges) {
    if (problem.window == 0 && (task.members != nullptr || task.end_of_sight(problem, task.first_position) >= base + TILE)) {
        for (int64_t r = 0; r < task.num_rows(); ++r) ranges[r] = Range{0, TILE};
        return true;
    }
    bool is_whole = true;
    for (int64_t p = 0; p < task.num_positions; ++p) {
        const Range seen = visible(problem, task, task.position(p), base);
        is_whole = is_whole && seen.is_whole();
        for (int64_t head = 0; head < task.num_heads; ++head) *ranges++ = seen;
    }
    return is_whole;
}

// ---- states ----

// Merge one row's state into another: the only place where two softmax states meet.
static void merge(float *max_to, float *total_to, float *out_to, const float *max_from, const float *total_from,
                  const float *out_from, int64_t padded) {
    if (*max_from == NONE) return;
    if (*max_to == NONE) {
        *max_to = *max_from;
        memcpy(total_to, total_from, LANES * sizeof(float));
        memcpy(out_to, out_from, padded * sizeof(float));
        return;
    }
    const float highest = *max_from > *max_to ? *max_from : *max_to;
    const Vec to = exp2(broadcast(*max_to - highest)), from = exp2(broadcast(*max_from - highest));
    *max_to = highest;
    store(total_to, fma(load(total_from), from, mul(load(total_to), to)));
    for (int64_t d = 0; d < padded; d += LANES) {
        store(out_to + d, fma(load(out_from + d), from, mul(load(out_to + d), to)));
    }
}

// ---- one task ----

// The positions of a task's tiles begin at multiples of TILE, from the first that any of its rows sees.
static int64_t first_tile(const AttentionProblem &problem, const AttentionTask &task) {
    return max64(task.begin, max64(task.first_split * int64_t{SPLIT}, first_seen(problem, task) / TILE * TILE));
}

static int64_t end_of_tiles(const AttentionProblem &problem, const AttentionTask &task) {
    if (task.members != nullptr) return task.shared_end;
    return min64(task.last_split * int64_t{SPLIT}, task.end_of_keys(problem));
}

// The next tiles of a task, which end with its split.
struct TileRun {
    int64_t base = 0;  // the position at which the first of them begins
    int count = 0;
    TileRows tiles[RUN_TILES];

    void locate(const AttentionProblem &problem, const AttentionTask &task, int64_t from) {
        const int64_t split_end = (from / SPLIT + 1) * int64_t{SPLIT}, end = min64(split_end, end_of_tiles(problem, task));
        base = from;
        count = static_cast<int>(min64(run_length(task.num_rows()), ceil_div(max64(end - from, 0), TILE)));
        for (int i = 0; i < count; ++i) QUIRE_ISA::locate(problem, task, from + i * TILE, tiles[i]);
    }
    int64_t end() const { return base + count * int64_t{TILE}; }
};

// The tiles of a task in order; while some are computed, the next are prefetched, the first of `next_task` (null: none) last.
struct TileWalk {
    const AttentionProblem &problem;
    const AttentionTask &task, *next_task;
    TileRun runs[2];
    int turn = 0;

    TileWalk(const AttentionProblem &of, const AttentionTask &now, const AttentionTask *then)
        : problem(of), task(now), next_task(then) {
        runs[0].locate(problem, task, first_tile(problem, task));
    }
    bool is_over() const { return runs[turn].count == 0; }
    int64_t base() const { return runs[turn].base; }

    void attend_run(const Workspace &w) {
        const TileRun &now = runs[turn];
        TileRun &then = runs[turn ^ 1];
        then.locate(problem, task, now.end());
        const bool goes_on = then.count > 0;
        if (!goes_on && next_task != nullptr) then.locate(problem, *next_task, first_tile(problem, *next_task));
        Prefetcher next(then.tiles[0].rows, then.count * int64_t{2 * TILE}, problem.cache.row_bytes(), problem.has_one_cache());
        Range ranges[RUN_TILES][MAX_ROWS];
        bool is_whole[RUN_TILES];
        for (int i = 0; i < now.count; ++i) is_whole[i] = find_ranges(problem, task, now.base + i * TILE, ranges[i]);
        QUIRE_ISA::attend_run(Run{problem, task, w, next, now.base, now.count, now.tiles, ranges, is_whole}, task.num_rows());
        if (!goes_on) then.base = now.end(), then.count = 0;
        turn ^= 1;
    }
};

// The states of a split's rows join the running ones; nothing where no key has been seen since the last time.
static void end_split(Workspace &w, int64_t rows) {
    if (w.split.is_empty) return;
    if (w.running.is_empty) {
        const States first = w.split;
        w.split = w.running;
        w.running = first;
        return;
    }
    const int64_t padded = w.padded;
    for (int64_t r = 0; r < rows; ++r) {
        merge(w.running.max + r, w.running.total + r * LANES, w.running.out + r * padded, w.split.max + r,
              w.split.total + r * LANES, w.split.out + r * padded, padded);
    }
    w.split.is_empty = true;
}

// All tiles of a task; the last split is left open.
static void attend_tiles(const AttentionProblem &problem, const AttentionTask &task, const AttentionTask *next_task,
                         Workspace &w) {
    for (TileWalk walk(problem, task, next_task); !walk.is_over();) {
        if (w.split.is_empty) begin_split(w, task.num_rows());
        walk.attend_run(w);
        if (walk.base() % SPLIT == 0) end_split(w, task.num_rows());
    }
}

template <typename T>
static T *out_row(const AttentionProblem &problem, const RowWalk &walk) {
    return static_cast<T *>(problem.out) + (walk.row() * problem.num_heads + walk.query_head()) * problem.out_size();
}

// What a row's outputs are multiplied by where a score without a value joins its total: once, when all keys have. Either of
// the two scores may be far above the other.
static Vec share_beside(float sink, float max_seen, float total) {
    const float score = sink * LOG2_E, highest = max_seen < score ? score : max_seen;
    const Vec keys = exp2(broadcast(max_seen - highest)), own = exp2(broadcast(score - highest));
    return div(keys, fma(broadcast(total), keys, own));
}

template <typename T>
static void store_rows(const AttentionProblem &problem, const AttentionTask &task, const States &states,
                       int64_t padded) {
    RowWalk walk(task);
    RowFetcher ahead(task);
    for (int64_t r = 0; r < task.num_rows(); ++r, walk.step()) {
        ahead.step([&](const RowWalk &at) { return out_row<T>(problem, at); }, problem.out_size());
        T *to = out_row<T>(problem, walk);
        const float total = reduce_add(load(states.total + r * LANES));
        const Vec inverse = problem.sinks == nullptr ? broadcast(1.0f / total)
                                                     : share_beside(problem.sinks[walk.query_head()], states.max[r], total);
        for (int64_t d = 0; d < problem.out_size(); d += LANES) {
            store_up_to(to + d, mul(load(states.out + r * padded + d), inverse), problem.out_size() - d);
        }
    }
}

static void finish(const AttentionProblem &problem, const AttentionTask &task, const States &states, int64_t padded) {
    if (problem.dtype == DType::f32) {
        store_rows<float>(problem, task, states, padded);
    } else {
        store_rows<bf16>(problem, task, states, padded);
    }
}

// A partial state in memory: [rows] max, [rows][LANES] total, [rows][padded head] out.
static States partial_states(float *memory, int64_t rows) {
    return States{memory, memory + rows, memory + rows * (1 + LANES), false};
}

static void copy_states(const States &from, int64_t first, int64_t count, int64_t padded, States &to) {
    to.is_empty = from.is_empty;
    if (from.is_empty) return;
    memcpy(to.max, from.max + first, count * sizeof(float));
    memcpy(to.total, from.total + first * LANES, count * LANES * sizeof(float));
    memcpy(to.out, from.out + first * padded, count * padded * sizeof(float));
}

// Each member goes on alone behind the shared keys, with the states that its rows have then.
static void attend_members(const AttentionProblem &problem, const AttentionTask &task, const AttentionTask *next_task,
                           const Workspace &shared, Workspace &w) {
    AttentionTask rest = task.rest_of(0), after{};
    for (int64_t p = 0; p < task.num_positions; ++p, rest = after) {
        const bool is_last = p + 1 == task.num_positions;
        if (!is_last) after = task.rest_of(p + 1);
        gather_query(problem, rest, w.query);
        copy_states(shared.split, p * task.num_heads, task.num_heads, w.padded, w.split);
        copy_states(shared.running, p * task.num_heads, task.num_heads, w.padded, w.running);
        attend_tiles(problem, rest, is_last ? next_task : &after, w);
        end_split(w, task.num_heads);
        finish(problem, rest, w.running, w.padded);
    }
}

static void attend_shared(const AttentionProblem &problem, const AttentionTask &task, const AttentionTask *next_task,
                          Workspace &w) {
    Workspace shared = w;
    shared.split = w.shared_split;
    shared.running = w.shared_running;
    gather_query(problem, task, w.query);
    const AttentionTask first = task.rest_of(0);
    attend_tiles(problem, task, &first, shared);
    attend_members(problem, task, next_task, shared, w);
}

void attend(const AttentionProblem &problem, const AttentionTask &task, const AttentionTask *next_task, float *scratch) {
    const int64_t rows = task.num_rows();
    Workspace w = lay_out(scratch, problem);
    if (task.members != nullptr) return attend_shared(problem, task, next_task, w);
    if (task.partial != nullptr) w.running = partial_states(task.partial, rows), clear(w.running, rows);
    gather_query(problem, task, w.query);
    attend_tiles(problem, task, next_task, w);
    end_split(w, rows);
    if (task.partial == nullptr) finish(problem, task, w.running, w.padded);
}

// Merge a task's partial states (one per split, ascending) in order, and store its rows.
void finish_rows(const AttentionProblem &problem, const AttentionTask &task, int num_partials, int64_t partial_stride,
                 float *scratch) {
    const int64_t padded = padded_head(problem.out_size()), rows = task.num_rows();
    Workspace w = lay_out(scratch, problem);
    clear(w.running, rows);
    for (int i = 0; i < num_partials; ++i) {
        const States from = partial_states(task.partial + i * partial_stride, rows);
        for (int64_t r = 0; r < rows; ++r) {
            merge(w.running.max + r, w.running.total + r * LANES, w.running.out + r * padded, from.max + r,
                  from.total + r * LANES, from.out + r * padded, padded);
        }
    }
    finish(problem, task, w.running, padded);
}

}  // namespace quire::QUIRE_ISA
