// Paged attention and cache movement: checks of the indices, and the division of a batch into tasks and threads.
// The arithmetic is in isa/attention*.cpp.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include <nanobind/stl/vector.h>

#include "attention.hpp"
#include "bindings.hpp"
#include "checks.hpp"
#include "scratch.hpp"
#include "shared_prefixes.hpp"
#include "threads.hpp"
#include "timing.hpp"

namespace quire {

constexpr int64_t MAX_TOKENS = int64_t{1} << 31;  // of a step: they are counted in 32 bits
constexpr int64_t MIN_TASK_ROWS = 96;  // of a task that others are cut off from, for every thread to have some

// A wrong index is a bug of the caller's; it must not become an access outside the cache.
static void check_starts(const Sequences &sequences) {
    if (sequences.query_start[0] != 0 || sequences.query_start[sequences.count] != sequences.num_tokens) {
        throw std::invalid_argument("attention: query_start must run from 0 to the number of query rows");
    }
}

static void check_key_ends(const AttentionProblem &problem, const Sequences &sequences, int64_t s) {
    if (problem.key_ends == nullptr) return;
    const int64_t start = sequences.query_start[s], end = sequences.query_start[s + 1], context = sequences.context_len[s];
    for (int64_t row = start, before = 0; row < end; before = problem.key_ends[row++]) {
        const int64_t position = context - (end - row);
        if (problem.key_ends[row] <= position || problem.key_ends[row] > context || problem.key_ends[row] < before) {
            throw std::invalid_argument("paged_attention: the query at position " + std::to_string(position) + " of " +
                                        std::to_string(context) + " is to see positions below " +
                                        std::to_string(problem.key_ends[row]) + "; the one before it saw those below " +
                                        std::to_string(before));
        }
    }
}

static void check_blocks(const AttentionProblem &problem, const Sequences &sequences) {
    for (int64_t s = 0; s < sequences.count; ++s) {
        const int64_t rows = sequences.query_start[s + 1] - sequences.query_start[s],
                      context = sequences.context_len[s];
        const int64_t blocks = ceil_div(context, problem.cache.block_size);
        if (rows < 1 || context < rows || blocks > problem.table_stride) {
            throw std::invalid_argument("paged_attention: sequence " + std::to_string(s) + " has " +
                                        std::to_string(rows) + " query rows, a context of " + std::to_string(context) +
                                        " and a table of " + std::to_string(problem.table_stride) + " blocks");
        }
        check_key_ends(problem, sequences, s);
        const int32_t *table = problem.block_tables + s * problem.table_stride;
        const int64_t first_seen = problem.window > 0 ? max64(0, context - rows - problem.window + 1) : 0;
        for (int64_t b = first_seen / problem.cache.block_size; b < blocks; ++b) {
            if (table[b] < 0 || table[b] >= problem.cache.num_blocks) {
                throw std::invalid_argument("paged_attention: sequence " + std::to_string(s) + " names block " +
                                            std::to_string(table[b]) + " of " + std::to_string(problem.cache.num_blocks));
            }
        }
    }
}

// The whole of every sequence is there. Its context is all of its rows, or the first ones: no row sees those behind.
static void check_rows(const AttentionProblem &problem, const Sequences &sequences) {
    for (int64_t s = 0; s < sequences.count; ++s) {
        const int64_t rows = sequences.query_start[s + 1] - sequences.query_start[s], context = sequences.context_len[s];
        const bool sees_nothing = problem.window > 0 && rows - context >= problem.window;  // its last row
        if (context < 1 || context > rows || sees_nothing || (problem.bias != nullptr && rows > problem.bias_reach + 1)) {
            throw std::invalid_argument("attention: sequence " + std::to_string(s) + " has " + std::to_string(rows) +
                                        " rows of a context of " + std::to_string(context));
        }
    }
}

static void check(const AttentionProblem &problem, const Sequences &sequences) {
    check_starts(sequences);
    problem.is_bidirectional() ? check_rows(problem, sequences) : check_blocks(problem, sequences);
}

// Rows of a task, at most. More of them share what is done to keys and values; fewer leave every thread four tasks.
static int64_t max_task_rows(const AttentionProblem &problem, const Sequences &sequences, int team) {
    const int64_t share = ceil_div(sequences.num_tokens * problem.num_heads, int64_t{4} * team);
    const int64_t most = kernels().max_task_rows(problem), least = max64(MIN_TASK_ROWS, most / 4);
    return min64(most, max64(least, share));
}

// The tasks of a batch, and what those of several sequences point into.
struct Division {
    std::vector<SharedPrefix> prefixes;
    std::vector<AttentionTask> tasks;
};

// Per KV head, `add(task)` for each group of at most `max_heads` query heads.
template <typename Add>
static void for_head_groups(const AttentionProblem &problem, int64_t max_heads, Add add) {
    const int64_t group = problem.num_heads / problem.cache.num_kv_heads;
    for (int64_t kv_head = 0; kv_head < problem.cache.num_kv_heads; ++kv_head) {
        for (int64_t head = 0; head < group; head += max_heads) {
            AttentionTask task{};
            task.kv_head = static_cast<int32_t>(kv_head);
            task.first_head = static_cast<int32_t>(kv_head * group + head);
            task.num_heads = static_cast<int32_t>(min64(max_heads, group - head));
            add(task);
        }
    }
}

// All tasks of one sequence: per group of heads, even shares of at most `max_rows` rows.
static void add_tasks(const AttentionProblem &problem, const Sequences &sequences, int64_t s, int64_t max_rows,
                      std::vector<AttentionTask> &tasks) {
    const int64_t heads = min64(problem.num_heads / problem.cache.num_kv_heads, max_rows);
    const int64_t start = sequences.query_start[s], rows = sequences.query_start[s + 1] - start;
    const int64_t positions = ceil_div(rows, ceil_div(rows, max_rows / heads));
    const int64_t context = sequences.context_len[s];
    for_head_groups(problem, heads, [&](AttentionTask task) {
        for (int64_t p = 0; p < rows; p += positions) {
            task.sequence = static_cast<int32_t>(s);
            task.num_positions = static_cast<int32_t>(min64(positions, rows - p));
            task.first_row = start + p;
            task.first_position = problem.is_bidirectional() ? p : context - rows + p;
            task.context_len = context;
            const int64_t seen = problem.window > 0 ? max64(0, task.first_position - problem.window + 1) : 0;
            task.first_split = static_cast<int32_t>(seen / SPLIT);
            task.last_split = static_cast<int32_t>(ceil_div(task.end_of_keys(problem), SPLIT));
            tasks.push_back(task);
        }
    });
}

static void add_shared_tasks(const AttentionProblem &problem, const SharedPrefix &prefix, int64_t max_heads,
                             std::vector<AttentionTask> &tasks) {
    const Member &first = prefix.members[0];
    for_head_groups(problem, max_heads, [&](AttentionTask task) {
        task.sequence = first.sequence;
        task.num_positions = static_cast<int32_t>(prefix.members.size());
        task.first_row = first.row;
        task.first_position = first.position;
        task.context_len = task.shared_end = prefix.end;
        task.members = prefix.members.data();
        tasks.push_back(task);
    });
}

static Division divide(const AttentionProblem &problem, const Sequences &sequences, int team) {
    const int64_t max_rows = max_task_rows(problem, sequences, team);
    const int64_t group = problem.num_heads / problem.cache.num_kv_heads, heads = min64(group, max_rows);
    // As few as leave each thread four tasks or so.
    const int64_t num_alone = sequences.count * problem.cache.num_kv_heads * ceil_div(group, heads);
    const int64_t max_members = min64(max_rows / heads, num_alone / (int64_t{4} * team));
    Division division;
    if (!problem.is_bidirectional()) division.prefixes = find_shared_prefixes(problem, sequences, max_members);
    std::vector<bool> is_member(sequences.count);
    for (const SharedPrefix &prefix : division.prefixes) {
        for (const Member &member : prefix.members) is_member[member.sequence] = true;
        add_shared_tasks(problem, prefix, heads, division.tasks);
    }
    for (int64_t s = 0; s < sequences.count; ++s) {
        if (!is_member[s]) add_tasks(problem, sequences, s, max_rows, division.tasks);
    }
    return division;
}

static int64_t cost_of(const AttentionProblem &problem, const AttentionTask &task) {
    if (task.members == nullptr) {
        return (task.num_rows() + 8) * (task.end_of_keys(problem) - task.first_split * int64_t{SPLIT});
    }
    int64_t total = (task.num_rows() + 8) * task.shared_end;
    for (int64_t p = 0; p < task.num_positions; ++p) {
        total += (task.num_heads + 8) * (task.position(p) + 1 - task.shared_end);
    }
    return total;
}

static int64_t memory_of_thread(const KernelTable &table, const AttentionProblem &problem) {
    return round_up(table.attention_scratch(problem.cache.head_size) + 1024, 16);
}

// Neighbouring tasks by the same thread, which prefetches the next one's keys before it has finished with one.
static void attend_all(const KernelTable &table, const AttentionProblem &problem,
                       const std::vector<AttentionTask> &tasks, int team) {
    const int64_t per_thread = memory_of_thread(table, problem), num_tasks = static_cast<int64_t>(tasks.size());
    float *memory = scratch(ATTENTION, per_thread * team);
    Shares shares(num_tasks, team);
#pragma omp parallel num_threads(team)
    for (int64_t i; (i = shares.take(thread_index())) >= 0;) {
        const AttentionTask *next = i + 1 < num_tasks ? &tasks[i + 1] : nullptr;
        table.attend(problem, tasks[i], next, memory + per_thread * thread_index());
    }
}

// Few tasks over long contexts (a lone sequence decoding): one piece per split, so that all threads have work.
static void attend_in_splits(const KernelTable &table, const AttentionProblem &problem,
                             const std::vector<AttentionTask> &tasks, int64_t num_pieces, int team) {
    int64_t max_rows = 0;
    for (const AttentionTask &task : tasks) max_rows = max64(max_rows, task.num_rows());
    const int64_t state = table.state_size(problem.out_size()) * max_rows;
    float *partials = scratch(PARTIAL_STATES, num_pieces * state), *partial = partials;
    std::vector<AttentionTask> pieces;
    for (const AttentionTask &task : tasks) {
        for (int32_t split = task.first_split; split < task.last_split; ++split, partial += state) {
            pieces.push_back(task);
            pieces.back().first_split = split;
            pieces.back().last_split = split + 1;
            pieces.back().partial = partial;
        }
    }
    attend_all(table, problem, pieces, team);
    float *memory = scratch(ATTENTION, memory_of_thread(table, problem));
    partial = partials;
    for (AttentionTask task : tasks) {
        task.partial = partial;
        const int count = task.last_split - task.first_split;
        table.finish_rows(problem, task, count, state, memory);
        partial += count * state;
    }
}

KVCache rows_as_cache(void *keys, void *values, DType dtype, int64_t num_kv_heads, int64_t head_size) {
    const KVFormat format = dtype == DType::f32 ? KVFormat::f32 : KVFormat::bf16;
    return KVCache{keys, values, format, 0, num_kv_heads, 1, head_size};
}

void paged_attention(const AttentionProblem &problem, const Sequences &sequences) {
    const Stopwatch stopwatch(KernelClass::attention);
    check(problem, sequences);
    const KernelTable &table = kernels();
    Division division = divide(problem, sequences, num_threads());
    std::vector<AttentionTask> &tasks = division.tasks;
    int64_t total = 0, num_pieces = 0;
    for (AttentionTask &task : tasks) {
        task.cost = cost_of(problem, task);
        total += task.cost;
        num_pieces += task.last_split - task.first_split;
    }
    const int team = team_size(total * problem.cache.head_size);
    const int64_t num_tasks = static_cast<int64_t>(tasks.size());
    const bool is_shared = !division.prefixes.empty();
    if (team > 1 && !is_shared && num_tasks < 4 * team && num_pieces > num_tasks && num_pieces <= 1024) {
        return attend_in_splits(table, problem, tasks, num_pieces, team);
    }
    std::stable_sort(tasks.begin(), tasks.end(),
                     [](const AttentionTask &a, const AttentionTask &b) { return a.cost > b.cost; });
    attend_all(table, problem, tasks, team);
}

static void attend(uintptr_t query, uintptr_t out, int dtype, uintptr_t key_cache, uintptr_t value_cache, int format,
                   int64_t num_tokens, int64_t query_stride, int64_t num_heads, int64_t num_kv_heads, int64_t head_size,
                   int64_t num_blocks, int64_t block_size, uintptr_t query_start, uintptr_t context_len,
                   int64_t num_sequences, uintptr_t block_tables, int64_t table_stride, float scale, int64_t window,
                   float soft_cap, uintptr_t sinks, int64_t value_size, uintptr_t key_ends) {
    const Arguments args("paged_attention");
    const DType type = args.dtype(dtype);
    AttentionProblem problem{};
    problem.cache = make_cache(key_cache, value_cache, format, num_blocks, num_kv_heads, block_size, head_size);
    args.between(1, MAX_HEADS, "the number of heads", num_heads);
    args.require(num_heads % num_kv_heads == 0, "heads must be a multiple of KV heads");
    args.between(0, MAX_TOKENS - 1, "the number of tokens", num_tokens);
    args.between(0, MAX_TOKENS - 1, "the number of sequences", num_sequences);
    args.between(1, head_size, "the size of a value", value_size);
    const Memory from = args.rows("query", query, type, num_tokens, query_stride, num_heads * head_size);
    const Memory to = args.memory("out", out, type, {num_tokens, num_heads, value_size});
    args.apart(to, from);
    problem.query = from.as<const void>();
    problem.out = to.as<void>();
    problem.dtype = type;
    problem.num_heads = num_heads;
    problem.value_size = value_size;
    problem.query_stride = query_stride;
    problem.block_tables = args.array<const int32_t>("block_tables", block_tables, {num_sequences, table_stride});
    problem.table_stride = table_stride;
    problem.scale = args.finite("the scale", scale);
    problem.soft_cap = args.magnitude("the soft cap", soft_cap);
    problem.sinks = args.array<const float>("sinks", sinks, {sinks == 0 ? 0 : num_heads});
    problem.key_ends = args.array<const int32_t>("key_ends", key_ends, {key_ends == 0 ? 0 : num_tokens});
    problem.window = args.count("the window", window);
    const int32_t *starts = args.array<const int32_t>("query_start", query_start, {num_sequences + 1});
    const int32_t *lengths = args.array<const int32_t>("context_len", context_len, {num_sequences});
    paged_attention(problem, Sequences{starts, lengths, num_sequences, num_tokens});
}

// Rows of queries, keys and values lie side by side, `stride` elements from token to token.
static void attend_rows(uintptr_t query, uintptr_t key, uintptr_t value, uintptr_t out, int dtype, int64_t num_tokens,
                        int64_t stride, int64_t num_heads, int64_t num_kv_heads, int64_t head_size, uintptr_t query_start,
                        uintptr_t context_len, int64_t num_sequences, float scale, int64_t window, uintptr_t bias,
                        int64_t bias_reach) {
    const Arguments args("bidirectional_attention");
    const DType type = args.dtype(dtype);
    args.between(1, MAX_HEAD_SIZE, "the head size", head_size);
    args.between(1, MAX_HEADS, "the number of KV heads", num_kv_heads);
    args.between(1, MAX_HEADS, "the number of heads", num_heads);
    args.require(num_heads % num_kv_heads == 0, "heads must be a multiple of KV heads");
    args.between(0, MAX_TOKENS - 1, "the number of tokens", num_tokens);
    args.between(0, MAX_TOKENS - 1, "the number of sequences", num_sequences);
    args.between(0, MAX_TOKENS - 1, "the reach of the bias", bias_reach);
    const int64_t width = num_heads * head_size, kv_width = num_kv_heads * head_size;
    const Memory from = args.rows("query", query, type, num_tokens, stride, width);
    const Memory keys = args.rows("key", key, type, num_tokens, stride, kv_width);
    const Memory values = args.rows("value", value, type, num_tokens, stride, kv_width);
    const Memory to = args.memory("out", out, type, {num_tokens, width});
    for (const Memory &each : {from, keys, values}) args.apart(to, each);
    AttentionProblem problem{};
    problem.query = from.as<const void>();
    problem.out = to.as<void>();
    problem.dtype = type;
    problem.num_heads = num_heads;
    problem.query_stride = problem.row_stride = stride;
    problem.cache = rows_as_cache(keys.as<void>(), values.as<void>(), type, num_kv_heads, head_size);
    problem.scale = args.finite("the scale", scale);
    problem.window = args.count("the window", window);
    problem.bias = args.array<const float>("bias", bias, {bias == 0 ? 0 : num_heads, 2 * bias_reach + 1});
    problem.bias_reach = bias_reach;
    const int32_t *starts = args.array<const int32_t>("query_start", query_start, {num_sequences + 1});
    const int32_t *lengths = args.array<const int32_t>("context_len", context_len, {num_sequences});
    paged_attention(problem, Sequences{starts, lengths, num_sequences, num_tokens});
}

static void bind_attention(nb::module_ &m) {
    m.def("bidirectional_attention", &attend_rows, nb::call_guard<nb::gil_scoped_release>());
    m.def("paged_attention", &attend, nb::call_guard<nb::gil_scoped_release>());
}
static const Registration registration(bind_attention);

}  // namespace quire
