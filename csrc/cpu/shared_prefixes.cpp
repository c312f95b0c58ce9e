// See shared_prefixes.hpp. Reads block tables that have been checked.
#include "shared_prefixes.hpp"

#include <algorithm>
#include <utility>

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "checks.hpp"

namespace quire {

namespace {

class Finder {
   public:
    Finder(const AttentionProblem &problem, const Sequences &sequences) : problem_(problem), sequences_(sequences) {
        const int64_t first_tile_end = (TILE - 1) / problem.cache.block_size;
        for (int64_t s = 0; s < sequences.count; ++s) {
            const bool is_decoding = sequences.query_start[s + 1] - sequences.query_start[s] == 1;
            const int64_t context = sequences.context_len[s];
            if (!is_decoding || context < TILE || (problem.window > 0 && context > problem.window)) continue;
            order_.push_back(static_cast<int32_t>(s));
            blocks_.push_back(table(s)[first_tile_end]);
        }
    }

    // Whether any two sequences may share blocks at all: in most batches none do, and every layer calls this.
    bool is_promising() {
        std::sort(blocks_.begin(), blocks_.end());
        return std::adjacent_find(blocks_.begin(), blocks_.end()) != blocks_.end();
    }

    // Sequences that share lie next to each other in the order of their tables, so that groups are runs of it: the best division
    // into runs, by dynamic programming.
    std::vector<SharedPrefix> find(int64_t max_members) {
        std::sort(order_.begin(), order_.end(), [this](int32_t a, int32_t b) { return is_before(a, b); });
        const int64_t count = static_cast<int64_t>(order_.size());
        std::vector<int64_t> shared(count), saved(count + 1), begin(count + 1);
        for (int64_t i = 0; i + 1 < count; ++i) shared[i] = num_shared_tiles(order_[i], order_[i + 1]);
        for (int64_t end = 1; end <= count; ++end) {
            saved[end] = saved[end - 1];
            begin[end] = end - 1;
            int64_t tiles = INT64_MAX;
            for (int64_t i = end - 2; i >= max64(0, end - max_members); --i) {
                tiles = min64(tiles, shared[i]);
                if (tiles == 0) break;
                const int64_t gain = saved[i] + (end - 1 - i) * tiles;
                if (gain <= saved[end]) continue;
                saved[end] = gain;
                begin[end] = i;
            }
        }
        std::vector<SharedPrefix> groups;
        for (int64_t end = count; end > 0; end = begin[end]) {
            if (end - begin[end] < 2) continue;
            const int64_t tiles = *std::min_element(shared.begin() + begin[end], shared.begin() + end - 1);
            groups.push_back(SharedPrefix{members(begin[end], end), tiles * TILE});
        }
        return groups;
    }

   private:
    const int32_t *table(int64_t s) const { return problem_.block_tables + s * problem_.table_stride; }

    int64_t num_full_blocks(int64_t s) const { return sequences_.context_len[s] / problem_.cache.block_size; }

    bool is_before(int32_t a, int32_t b) const {
        const int64_t count = min64(num_full_blocks(a), num_full_blocks(b));
        const auto [x, y] = std::mismatch(table(a), table(a) + count, table(b));
        if (x != table(a) + count) return *x < *y;
        return num_full_blocks(a) != num_full_blocks(b) ? num_full_blocks(a) < num_full_blocks(b) : a < b;
    }

    int64_t num_shared_tiles(int32_t a, int32_t b) const {
        const int64_t count = min64(num_full_blocks(a), num_full_blocks(b));
        return (std::mismatch(table(a), table(a) + count, table(b)).first - table(a)) * problem_.cache.block_size / TILE;
    }

    std::vector<Member> members(int64_t begin, int64_t end) const {
        std::vector<Member> found;
        for (int64_t i = begin; i < end; ++i) {
            const int32_t s = order_[i];
            found.push_back(Member{s, sequences_.query_start[s], int64_t{sequences_.context_len[s]} - 1});
        }
        return found;
    }

    const AttentionProblem &problem_;
    const Sequences &sequences_;
    std::vector<int32_t> order_, blocks_;  // candidates, and the blocks that their first tiles end in
};

}  // namespace

std::vector<SharedPrefix> find_shared_prefixes(const AttentionProblem &problem, const Sequences &sequences,
                                               int64_t max_members) {
    if (max_members < 2) return {};
    Finder finder(problem, sequences);
    return finder.is_promising() ? finder.find(max_members) : std::vector<SharedPrefix>{};
}

// For tests: the end of each group, and its sequences.
static std::vector<std::pair<int64_t, std::vector<int32_t>>> shared_prefixes(uintptr_t query_start, uintptr_t context_len,
                                                                            int64_t num_sequences, uintptr_t block_tables,
                                                                            int64_t table_stride, int64_t block_size,
                                                                            int64_t window, int64_t max_members) {
    const Arguments args("shared_prefixes");
    AttentionProblem problem{};
    problem.cache.block_size = args.count("the block size", block_size, 1);
    args.count("the number of sequences", num_sequences);
    problem.block_tables = args.array<const int32_t>("block_tables", block_tables, {num_sequences, table_stride});
    problem.table_stride = table_stride;
    problem.window = args.count("the window", window);
    const Sequences sequences{args.array<const int32_t>("query_start", query_start, {num_sequences + 1}),
                              args.array<const int32_t>("context_len", context_len, {num_sequences}), num_sequences, 0};
    for (int64_t s = 0; s < num_sequences; ++s) {
        args.between(1, table_stride * block_size, "a context", sequences.context_len[s]);
        args.require(sequences.query_start[s] < sequences.query_start[s + 1], "query_start must ascend");
    }
    std::vector<std::pair<int64_t, std::vector<int32_t>>> found;
    for (const SharedPrefix &prefix : find_shared_prefixes(problem, sequences, max_members)) {
        found.emplace_back(prefix.end, std::vector<int32_t>{});
        for (const Member &member : prefix.members) found.back().second.push_back(member.sequence);
    }
    return found;
}

static void bind_shared_prefixes(nb::module_ &m) { m.def("shared_prefixes", &shared_prefixes); }
static const Registration registration(bind_shared_prefixes);

}  // namespace quire
