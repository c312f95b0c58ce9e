// The division of a mixture of experts into blocks and threads. The arithmetic is that of projections (projection.hpp), and
// isa/experts.cpp.
//
// A token's choice of an expert is a pair. Pairs are put in the order of their experts, so that an expert's tokens are
// neighbours: a group, whose rows are brought into tiles like those of any projection. Two parallel regions then do the work of
// a layer, however many experts are chosen: one computes gate and `up` of all groups, the other goes through all groups for
// some columns of the hidden size and, when it has them all, weighs and adds them token by token. So what the experts give is
// never stored whole, and one token's experts are read by all threads at once.
//
// Where only some experts are in memory, groups are computed in rounds of as many as a pool can hold. If there is more than one
// round, what experts give is stored whole until all have been computed, and added then, in the same order. So it is where
// ranks have different experts: each stores what its own give, and reads what those of the others gave. Where ranks have some
// outputs of every expert, they exchange activations between the two regions.
//
// Where adapters change an expert's gate and `up`, all of its tokens' products are kept in float32, corrected and activated then,
// with the bits that they have otherwise. Where they change what it gives, that is stored whole, corrected, and added then.
#include "experts.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "checks.hpp"
#include "elementwise.hpp"
#include "linear.hpp"
#include "projection.hpp"
#include "scratch.hpp"
#include "threads.hpp"
#include "timing.hpp"

namespace quire {

using namespace nb::literals;

namespace {

// At a time, so that scratch stays small: as many as 2,048 tokens with eight experts each.
constexpr int64_t MAX_PAIRS = 1 << 14;
// Of what one thread keeps until its columns are added: half of these stay in the second-level cache with usual choices.
constexpr int64_t SUMS_BYTES = 8 << 20;
constexpr int64_t MOST_COLUMN_PANELS = 8;
// Of what is stored whole: fewer tokens at a time, for each of which experts are read anew, where it would take more.
constexpr int64_t RESULTS_BYTES = 128 << 20;
// Of the products of gate and `up` that are kept at a time for adapters.
constexpr int64_t GATED_BYTES = 8 << 20;
constexpr int64_t LEAST_GATED_ROWS = 32;
// Of more, a layer needs nearly all experts, and the pool reads itself through them in rounds.
constexpr int64_t MOST_FORECAST_TOKENS = 512;

// The tokens of one expert: pairs [first, first + count) of the sorted ones.
struct Group {
    int64_t expert, first, count;
    InputRows rows;
    ExpertWeights weights;  // of a round's groups
};

// Some tiles of a group.
struct Tiles {
    const Group *group;
    int64_t first, count;
};

// Which tokens go where.
class Grouping {
   public:
    Grouping(const ExpertRouting &routing, const int64_t *ids, int64_t num_tokens);

    std::vector<Group> groups;     // of experts that have tokens, ascending
    std::vector<int32_t> tokens;   // of each sorted pair
    std::vector<int32_t> places;   // [T][k]: among the sorted pairs; -1: nowhere
};

Grouping::Grouping(const ExpertRouting &routing, const int64_t *ids, int64_t num_tokens)
    : tokens(num_tokens * routing.num_chosen), places(num_tokens * routing.num_chosen, -1) {
    const int64_t num_experts = routing.num_experts;
    std::vector<int64_t> next(num_experts, 0);
    const auto is_here = [&](int64_t id) { return id >= 0 && id < num_experts; };
    for (size_t pair = 0; pair < places.size(); ++pair) {
        if (is_here(ids[pair])) ++next[ids[pair]];
    }
    int64_t first = 0;
    for (int64_t expert = 0; expert < num_experts; ++expert) {
        const int64_t count = next[expert];
        if (count > 0) groups.push_back(Group{expert, first, count, {}, {}});
        next[expert] = first;
        first += count;
    }
    for (size_t pair = 0; pair < places.size(); ++pair) {
        if (!is_here(ids[pair])) continue;
        const int64_t place = next[ids[pair]]++;
        places[pair] = static_cast<int32_t>(place);
        tokens[place] = static_cast<int32_t>(pair / routing.num_chosen);
    }
}

// One layer and some tokens.
class Mixture {
   public:
    Mixture(const ExpertLayer &layer, const ExpertRouting &routing, const int64_t *ids, const float *weights, const void *x,
            DType dtype, int64_t num_tokens, const ExpertAdapters &adapters, const LikelyExperts *likely)
        : table_(kernels()), layer_(layer), dtype_(dtype), x_(x), weights_(weights), num_tokens_(num_tokens),
          num_chosen_(routing.num_chosen), grouping_(routing, ids, num_tokens), adapters_(adapters), likely_(likely) {}

    void run(void *out);

   private:
    int64_t num_pairs() const { return static_cast<int64_t>(grouping_.tokens.size()); }
    std::vector<Group> take_round(std::vector<Group> &left) const;
    void compute_round(void *out);
    void add_results(void *out) const;
    void run_held(void *out);
    void prepare(const LinearWeight &weight, const void *x, const int32_t *rows);
    void convert(const LinearWeight &weight, const void *x, const int32_t *rows, const Tiles &tiles) const;
    void begin_gemms(const LinearWeight &weight) const;
    void end_gemms() const;
    void project_up(void *gated) const;
    void project_down(void *out) const;
    void project_columns(int64_t first_panel, int64_t num_panels, void *out) const;
    AdaptedRows adapted_rows(const Group &group) const;
    bool is_adapted(const Group &group, int64_t number) const;
    void adapt_up(const Group &group, void *gated) const;
    void adapt_down(const Group &group, const void *gated) const;

    const KernelTable &table_;
    const ExpertLayer &layer_;
    const DType dtype_;
    const void *x_;
    const float *weights_;
    const int64_t num_tokens_, num_chosen_;
    const Grouping grouping_;
    const ExpertAdapters adapters_;
    const LikelyExperts *likely_;  // null: none are known
    std::vector<Group> groups_;  // of the round
    float *results_ = nullptr;   // [pairs][hidden], if there are several rounds
};

void Mixture::run(void *out) {
    if (layer_.num_held() < layer_.num_experts) return run_held(out);
    if (adapters_.rows != nullptr && adapters_.rows->concern(adapters_.down, 0, num_tokens_)) {
        results_ = scratch(EXPERT_RESULTS, num_pairs() * layer_.own_hidden());
    }
    std::vector<Group> left = grouping_.groups;
    if (layer_.pool == nullptr) {
        for (Group &group : left) group.weights = {layer_.up_of(group.expert), layer_.down_of(group.expert)};
        groups_ = std::move(left);
        compute_round(out);
        if (results_ != nullptr) add_results(out);
        return;
    }
    std::vector<int64_t> experts;
    for (const Group &group : left) experts.push_back(group.expert);
    layer_.pool->note_use(layer_.number, experts);
    do {
        groups_ = take_round(left);
        if (left.empty() && likely_ != nullptr) layer_.pool->expect(likely_->number, num_tokens_, likely_->experts);
        if (!left.empty() && results_ == nullptr) results_ = scratch(EXPERT_RESULTS, num_pairs() * layer_.hidden());
        compute_round(out);
    } while (!left.empty());
    if (results_ != nullptr) add_results(out);
}

// The groups of this rank's experts, and then what all experts give, from the ranks that have them.
void Mixture::run_held(void *out) {
    std::vector<uint8_t> is_own(num_pairs(), 0);
    for (const Group &group : grouping_.groups) {
        if (!layer_.holds(group.expert)) continue;
        groups_.push_back(group);
        groups_.back().weights = {layer_.up_of(group.expert), layer_.down_of(group.expert)};
        std::fill_n(is_own.begin() + group.first, group.count, uint8_t{1});
    }
    results_ = scratch(EXPERT_RESULTS, num_pairs() * layer_.hidden());
    if (!groups_.empty()) compute_round(out);
    layer_.held.gathering->rows(results_, is_own, layer_.hidden() * int64_t{sizeof(float)}, results_);
    add_results(out);
}

// Groups whose experts are in memory now; the others are left.
std::vector<Group> Mixture::take_round(std::vector<Group> &left) const {
    std::vector<int64_t> experts;
    for (const Group &group : left) experts.push_back(group.expert);
    std::vector<ExpertWeights> weights;
    const std::vector<size_t> places = layer_.pool->bring(layer_.number, experts, weights);
    std::vector<Group> round, others;
    for (size_t i = 0; i < left.size(); ++i) {
        if (round.size() < places.size() && places[round.size()] == i) {
            left[i].weights = weights[round.size()];
            round.push_back(left[i]);
        } else {
            others.push_back(left[i]);
        }
    }
    left = std::move(others);
    return round;
}

void Mixture::compute_round(void *out) {
    const auto words = [&](int64_t width) { return ceil_div(num_pairs() * width * size_of(dtype_), sizeof(float)); };
    void *gated = scratch(EXPERT_ROWS, words(layer_.own_inner()));
    prepare(layer_.up, x_, grouping_.tokens.data());
    project_up(gated);
    for (const Group &group : groups_) {
        if (is_adapted(group, adapters_.up)) adapt_up(group, gated);
    }
    if (layer_.own_inner() < layer_.inner()) {
        const int64_t size = size_of(dtype_);
        const Columns own{layer_.held.inner.first * size, layer_.held.inner.num_bytes * size};
        void *whole = scratch(EXPERT_ACTIVATIONS, words(layer_.inner()));
        layer_.held.gathering->columns(gated, num_pairs(), {own}, layer_.inner() * size, whole);
        gated = whole;
    }
    prepare(layer_.down, gated, nullptr);
    project_down(out);
    for (const Group &group : groups_) {
        if (is_adapted(group, adapters_.down)) adapt_down(group, gated);
    }
}

// A group's tokens that use an adapter, numbered as in the group.
AdaptedRows Mixture::adapted_rows(const Group &group) const {
    const auto first = grouping_.tokens.begin() + group.first;
    return adapters_.rows->chosen(std::vector<int64_t>(first, first + group.count));
}

bool Mixture::is_adapted(const Group &group, int64_t number) const {
    return adapters_.rows != nullptr && adapted_rows(group).concern(number, 0, group.count);
}

// Gate and `up` of all of a group's tokens.
void Mixture::adapt_up(const Group &group, void *gated) const {
    const int64_t width = layer_.own_inner(), hidden = layer_.hidden(), row_bytes = hidden * size_of(dtype_);
    const int64_t first_output = layer_.first_up(group.expert);
    const int64_t at_once = max64(LEAST_GATED_ROWS, GATED_BYTES / (2 * width * int64_t{sizeof(float)}));
    const AdaptedRows adapted = adapted_rows(group);
    for (int64_t first = 0; first < group.count; first += at_once) {
        const int64_t last = min64(first + at_once, group.count), count = last - first;
        char *const rows = reinterpret_cast<char *>(scratch(EXPERT_INPUTS, ceil_div(count * row_bytes, sizeof(float))));
        for (int64_t r = 0; r < count; ++r) {
            std::memcpy(rows + r * row_bytes, offset(x_, grouping_.tokens[group.first + first + r] * hidden, dtype_), row_bytes);
        }
        float *const products = scratch(GATE_PRODUCTS, count * 2 * width);
        linear(group.weights.up, rows, dtype_, count, products, DType::f32);
        adapted.between(first, last).add_to(adapters_.up, rows, dtype_, products, DType::f32, first_output, 2 * width);
        void *const out = offset(gated, (group.first + first) * width, dtype_);
        over_rows(count, 4 * width, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; ++r) {
                float *const row = products + r * 2 * width;
                table_.gated(row, row, DType::f32, layer_.activation, width, 0, 1);  // over the gate's products
                table_.convert(row, DType::f32, offset(out, r * width, dtype_), dtype_, width);
            }
        });
    }
}

// To what the group's expert gives, which is stored whole.
void Mixture::adapt_down(const Group &group, const void *gated) const {
    const int64_t width = layer_.own_hidden();
    adapted_rows(group).add_to(adapters_.down, offset(gated, group.first * layer_.inner(), dtype_), dtype_,
                               results_ + group.first * width, DType::f32, layer_.first_down(group.expert), width);
}

void Mixture::add_results(void *out) const {
    const int64_t width = layer_.own_hidden();
    const ExpertSums from{results_, width, num_chosen_, grouping_.places.data(), weights_};
    over_rows(num_tokens_, num_chosen_ * width * int64_t{sizeof(float)}, [&](int64_t first, int64_t last) {
        table_.combine_experts(from, first, last, offset(out, first * width, dtype_), dtype_, width);
    });
}

// Tiles that one call multiplies.
int64_t block_tiles(const InputRows &rows) { return BLOCK_ROWS / (rows.depth > 0 ? MATRIX_ROWS : rows.tile_rows); }

// Brings every group's rows into tiles. Sorted pair p is row rows[p] of x, or row p.
void Mixture::prepare(const LinearWeight &weight, const void *x, const int32_t *rows) {
    std::vector<Tiles> work;
    int64_t num_words = 0;
    for (Group &group : groups_) {
        group.rows = form_of(table_, weight, dtype_, group.count);
        num_words += group.rows.num_tiles * group.rows.tile_rows * group.rows.row_words;
    }
    uint32_t *to = reinterpret_cast<uint32_t *>(scratch(INPUT_ROWS, num_words));
    float *scales = weight.has_int8_inputs ? scratch(INPUT_SCALES, num_pairs() * (1 + weight.num_groups())) : nullptr;
    int32_t *starts = reinterpret_cast<int32_t *>(scales + (scales == nullptr ? 0 : num_pairs()));
    // One token's experts all read the same row.
    const bool is_shared = rows != nullptr && num_tokens_ == 1 && num_pairs() == static_cast<int64_t>(grouping_.groups.size());
    for (Group &group : groups_) {
        InputRows &form = group.rows;
        if (is_shared && &group != &groups_[0]) {
            form = groups_[0].rows;
            continue;
        }
        if (is_in_form(form, weight, dtype_)) {
            form.data = offset(x, (rows == nullptr ? group.first : rows[group.first]) * weight.num_inputs, dtype_);
            continue;
        }
        form.data = to;
        to += form.num_tiles * form.tile_rows * form.row_words;
        if (scales != nullptr) {
            form.scales = scales + group.first;
            form.starts = starts + group.first * weight.num_groups();
        }
        for (int64_t tile = 0; tile < form.num_tiles; ++tile) work.push_back({&group, tile, 1});
    }
    const int64_t count = static_cast<int64_t>(work.size());
    over_rows(count, ceil_div(num_pairs(), max64(1, count)) * weight.padded_inputs(), [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) convert(weight, x, rows, work[i]);
    });
}

// One tile, as rows of its own: those of x side by side, gathered where they are not.
void Mixture::convert(const LinearWeight &weight, const void *x, const int32_t *rows, const Tiles &tiles) const {
    const InputRows &whole = tiles.group->rows;
    const int64_t row = whole.first_row(tiles.first), height = whole.first_row(tiles.first + 1) - row;
    InputRows tile = whole;
    tile.data = static_cast<const uint32_t *>(whole.data) + row * whole.row_words;
    tile.num_rows = tile.least_height = height;
    tile.num_tiles = 1;
    tile.num_taller = 0;
    if (whole.scales != nullptr) {
        tile.scales = whole.scales + row;
        tile.starts = whole.starts + row * weight.num_groups();
    }
    const int64_t first = tiles.group->first + row, row_bytes = weight.num_inputs * size_of(dtype_);
    const void *from = offset(x, (rows == nullptr ? first : rows[first]) * weight.num_inputs, dtype_);
    const int64_t spare_words = whole.tile_rows * whole.row_words;
    float *memory = scratch(GEMM_BLOCK, spare_words + ceil_div(height * row_bytes, int64_t{sizeof(float)}));
    if (rows != nullptr && height > 1) {
        char *gathered = reinterpret_cast<char *>(memory + spare_words);
        for (int64_t r = 0; r < height; ++r) {
            std::memcpy(gathered + r * row_bytes, offset(x, rows[first + r] * weight.num_inputs, dtype_), row_bytes);
        }
        from = gathered;
    }
    table_.convert_rows(weight, from, dtype_, 0, 1, tile, reinterpret_cast<uint32_t *>(memory));
}

// Takes as much scratch as any block needs, on the calling thread: what a product leaves to be done during the next one, whose
// block may be larger, must not lose its memory.
void Mixture::begin_gemms(const LinearWeight &weight) const {
    scratch(GEMM_BLOCK, 2 * BLOCK_ROWS * GROUP_WIDTH + expanded_bytes(weight) / sizeof(float));
}

void Mixture::end_gemms() const {
    if (table_.end_gemms != nullptr) table_.end_gemms();
}

// Of each group: blocks of the same panels are neighbours, so that a thread has them from its cache.
void Mixture::project_up(void *gated) const {
    struct Item {
        const Group *group;
        Block block;
    };
    const int team = team_size(num_pairs() * layer_.up.num_bytes() / layer_.num_held());
    const int64_t panels = ceil_div(layer_.own_inner(), PANEL);
    const int64_t num_groups = static_cast<int64_t>(groups_.size());
    const int64_t widest = max64(1, panels * num_groups / (FEW_ITEMS * team));
    const auto projection = [&](const Group &group) {
        const Destination to{offset(gated, group.first * layer_.own_inner(), dtype_), dtype_, layer_.own_inner(), true,
                             layer_.activation};
        return Projection{table_, group.weights.up, group.rows, to};
    };
    std::vector<Item> items;
    for (const Group &group : groups_) {
        if (is_adapted(group, adapters_.up)) continue;
        const int64_t parts = ceil_div(panels, min64(widest, projection(group).max_panels()));
        const int64_t row_parts = ceil_div(group.rows.num_tiles, block_tiles(group.rows));
        for (int64_t i = 0; i < parts * row_parts; ++i) {
            const int64_t panel = share(panels, parts, i / row_parts), tile = share(group.rows.num_tiles, row_parts, i % row_parts);
            items.push_back({&group, {tile, share(group.rows.num_tiles, row_parts, i % row_parts + 1) - tile, panel,
                                      share(panels, parts, i / row_parts + 1) - panel}});
        }
    }
    Shares shares(static_cast<int64_t>(items.size()), team);
#pragma omp parallel num_threads(team)
    {
        begin_gemms(layer_.up);
        for (int64_t item; (item = shares.take(thread_index())) >= 0;) {
            compute(projection(*items[item].group), items[item].block);
        }
        end_gemms();
    }
}

void Mixture::project_down(void *out) const {
    const int team = team_size(num_pairs() * layer_.down.num_bytes() / layer_.num_held());
    const int64_t panels = layer_.own_hidden() / PANEL;
    const int64_t fitting = SUMS_BYTES / (num_pairs() * PANEL * int64_t{sizeof(float)});
    const int64_t widest = max64(1, min64(min64(MOST_COLUMN_PANELS, fitting), panels / (FEW_ITEMS * team)));
    const int64_t parts = ceil_div(panels, widest);
    Shares shares(parts, team);
#pragma omp parallel num_threads(team)
    {
        begin_gemms(layer_.down);
        for (int64_t part; (part = shares.take(thread_index())) >= 0;) {
            const int64_t first = share(panels, parts, part);
            project_columns(first, share(panels, parts, part + 1) - first, out);
        }
    }
}

// All groups' results for columns that begin with a panel, and their sum, unless further rounds add to it.
void Mixture::project_columns(int64_t first_panel, int64_t num_panels, void *out) const {
    const int64_t width = num_panels * PANEL, first = first_panel * PANEL;
    const int64_t stride = results_ == nullptr ? width : layer_.own_hidden();
    float *sums = results_ == nullptr ? scratch(EXPERT_SUMS, num_pairs() * width) : results_ + first;
    for (const Group &group : groups_) {
        const Destination to{sums + group.first * stride, DType::f32, stride, false, Activation::silu, false, first};
        const Projection projection{table_, group.weights.down, group.rows, to};
        const int64_t most = block_tiles(group.rows), most_panels = projection.max_panels();
        for (int64_t tile = 0; tile < group.rows.num_tiles; tile += most) {
            for (int64_t panel = 0; panel < num_panels; panel += most_panels) {
                compute(projection, {tile, min64(most, group.rows.num_tiles - tile), first_panel + panel,
                                     min64(most_panels, num_panels - panel)});
            }
        }
    }
    end_gemms();
    if (results_ != nullptr) return;
    const ExpertSums from{sums, width, num_chosen_, grouping_.places.data(), weights_};
    table_.combine_experts(from, 0, num_tokens_, offset(out, first, dtype_), dtype_, layer_.own_hidden());
}

}  // namespace

bool are_whole(const ExpertLayer &layer) {
    const int64_t count = layer.num_held();
    if (count < 1 || 2 * layer.own_inner() % PANEL != 0 || layer.own_hidden() % PANEL != 0) return false;
    if (layer.up.num_outputs != count * 2 * layer.own_inner() || layer.down.num_outputs != count * layer.own_hidden()) return false;
    const HeldExperts &held = layer.held;
    if (held.gathering == nullptr) return layer.own_inner() == layer.inner() && layer.own_hidden() == layer.hidden();
    if (held.first < 0 || held.first + count > layer.num_experts) return false;
    if (count < layer.num_experts) return layer.own_inner() == layer.inner() && layer.own_hidden() == layer.hidden();
    return held.inner.num_bytes == layer.own_inner() && held.inner.first >= 0 &&
           held.inner.first + held.inner.num_bytes <= layer.inner();
}

void check_memory(const char *function, const ExpertLayer &layer) {
    const Arguments args(function);
    if (layer.pool == nullptr) {
        check_attached(function, layer.up);
        return check_attached(function, layer.down);
    }
    args.between(0, layer.pool->num_layers() - 1, "the layer of the pool", layer.number);
    const StoredLayer &stored = layer.pool->layer(layer.number);
    const auto are_alike = [](const LinearWeight &a, const LinearWeight &b) {
        return a.format == b.format && a.num_outputs == b.num_outputs && a.num_inputs == b.num_inputs &&
               a.num_bytes() == b.num_bytes() && a.bias == b.bias;
    };
    args.require(stored.num_experts == layer.num_experts && are_alike(stored.up, layer.up) && are_alike(stored.down, layer.down),
                 "the pool has other experts");
}

void choose_experts(const ExpertRouting &routing, const float *logits, int64_t num_tokens, int64_t *ids, float *weights) {
    const KernelTable &table = kernels();
    over_rows(num_tokens, 8 * routing.num_experts, [&](int64_t first, int64_t last) {
        float *spare = scratch(GEMM_BLOCK, routing.spare_floats());
        table.choose_experts(routing, logits, first, last, ids, weights, spare);
    });
}

void apply_experts(const ExpertLayer &layer, const ExpertRouting &routing, const int64_t *ids, const float *weights,
                   const void *x, DType dtype, int64_t num_tokens, void *out, const ExpertAdapters &adapters,
                   const LikelyExperts *likely) {
    const Stopwatch stopwatch(KernelClass::linear);
    const int64_t results = RESULTS_BYTES / (layer.hidden() * int64_t{sizeof(float)});
    const bool stores_results = layer.pool != nullptr || layer.num_held() < layer.num_experts || adapters.rows != nullptr;
    const int64_t pairs = stores_results ? min64(MAX_PAIRS, results) : MAX_PAIRS;
    const int64_t pass = max64(1, pairs / routing.num_chosen);
    for (int64_t t = 0; t < num_tokens; t += pass) {
        const int64_t pair = t * routing.num_chosen, count = min64(pass, num_tokens - t);
        ExpertAdapters used = adapters;
        AdaptedRows part;
        if (adapters.rows != nullptr) {
            part = adapters.rows->between(t, t + count);
            used.rows = part.is_empty() ? nullptr : &part;
        }
        Mixture(layer, routing, ids + pair, weights + pair, offset(x, t * layer.hidden(), dtype), dtype, count, used,
                t + count == num_tokens ? likely : nullptr)
            .run(offset(out, t * layer.own_hidden(), dtype));
    }
}

// What the router chooses for rows of another layer, all tokens' first choices before the second ones. The rows of neighbours
// differ by what one layer adds.
static LikelyExperts forecast(const NextMixture &next, const void *x, DType dtype, int64_t num_tokens) {
    const int64_t num_experts = next.routing.num_experts, num_chosen = next.routing.num_chosen, num_pairs = num_tokens * num_chosen;
    float *logits = scratch(ROUTING, num_tokens * num_experts + 3 * num_pairs + 1);
    linear(next.router, x, dtype, num_tokens, logits, DType::f32);
    int64_t *ids = reinterpret_cast<int64_t *>(logits + round_up(num_tokens * num_experts, 2));
    choose_experts(next.routing, logits, num_tokens, ids, reinterpret_cast<float *>(ids + num_pairs));
    LikelyExperts likely{next.number, {}};
    std::vector<char> is_listed(num_experts, 0);
    for (int64_t pair = 0; pair < num_pairs; ++pair) {
        const int64_t expert = ids[pair % num_tokens * num_chosen + pair / num_tokens];
        if (expert < 0 || expert >= num_experts || is_listed[expert]) continue;
        is_listed[expert] = 1;
        likely.experts.push_back(expert);
    }
    return likely;
}

void mix_experts(const ExpertLayer &layer, const ExpertRouting &routing, const LinearWeight &router, const void *x, DType dtype,
                 int64_t num_tokens, void *out, const ExpertAdapters &adapters, const NextMixture &next) {
    const bool is_foreseen = next.number != NextMixture::NONE && num_tokens <= MOST_FORECAST_TOKENS &&
                             layer.pool->wants_forecast(next.number);
    const LikelyExperts likely = is_foreseen ? forecast(next, x, dtype, num_tokens) : LikelyExperts{};
    const int64_t num_pairs = num_tokens * routing.num_chosen;
    float *logits = scratch(ROUTING, num_tokens * routing.num_experts + 3 * num_pairs + 1);
    linear(router, x, dtype, num_tokens, logits, DType::f32);
    if (adapters.rows != nullptr) adapters.rows->add_to(adapters.router, x, dtype, logits, DType::f32, 0, routing.num_experts);
    int64_t *ids = reinterpret_cast<int64_t *>(logits + round_up(num_tokens * routing.num_experts, 2));
    float *weights = reinterpret_cast<float *>(ids + num_pairs);
    choose_experts(routing, logits, num_tokens, ids, weights);
    const bool are_changed = adapters.rows != nullptr && (adapters.rows->concern(adapters.up, 0, num_tokens) ||
                                                         adapters.rows->concern(adapters.down, 0, num_tokens));
    apply_experts(layer, routing, ids, weights, x, dtype, num_tokens, out, are_changed ? adapters : ExpertAdapters{},
                  is_foreseen ? &likely : nullptr);
}

// ---- bindings ----

static void init_routing(ExpertRouting *self, int64_t num_experts, int64_t num_chosen, bool is_normalised, bool is_sigmoid,
                         int64_t num_groups, int64_t num_groups_chosen, bool sums_best_two, float factor, uintptr_t bias) {
    const Arguments args("ExpertRouting");
    args.count("the number of experts", num_experts, 1);
    args.between(1, num_experts, "the number of groups", num_groups);
    args.between(1, num_groups, "the number of chosen groups", num_groups_chosen);
    args.require(num_experts % num_groups == 0, "the groups are not even");
    const int64_t size = num_experts / num_groups;
    args.between(1, size * num_groups_chosen, "the number of chosen experts", num_chosen);
    args.require(!sums_best_two || size > 1, "groups of one expert have no best two");
    args.require(bias == 0 || is_sigmoid, "a bias is for sigmoids");
    const float *added = args.array<const float>("the bias", bias, {bias == 0 ? 0 : num_experts});
    new (self) ExpertRouting{num_experts,       num_chosen,    is_normalised,                     is_sigmoid, num_groups,
                             num_groups_chosen, sums_best_two, args.finite("the factor", factor), added};
}

static void choose(const ExpertRouting &routing, uintptr_t logits, int64_t num_tokens, uintptr_t ids, uintptr_t weights) {
    const Arguments args("choose_experts");
    const int64_t num_experts = routing.num_experts, num_chosen = routing.num_chosen;
    const float *from = args.array<const float>("the logits", logits, {num_tokens, num_experts});
    int64_t *to = args.array<int64_t>("the ids", ids, {num_tokens, num_chosen});
    const Stopwatch stopwatch(KernelClass::elementwise);
    choose_experts(routing, from, num_tokens, to, args.array<float>("the weights", weights, {num_tokens, num_chosen}));
}

static void check_adapters(const Arguments &args, const ExpertLayer &layer, const std::vector<const Adapter *> &adapters,
                           const ExpertAdapters &numbers) {
    for (const Adapter *adapter : adapters) {
        const LoraWeight *up = adapter->of(numbers.up), *down = adapter->of(numbers.down);
        const bool fits = (up == nullptr || (up->num_inputs == layer.hidden() && up->num_outputs == layer.up.num_outputs)) &&
                          (down == nullptr || (down->num_inputs == layer.inner() && down->num_outputs == layer.down.num_outputs));
        args.require(fits, "an adapter for other experts");
    }
}

static void apply(const LinearWeight &up, const LinearWeight &down, int64_t num_experts, int activation, uintptr_t ids,
                  uintptr_t weights, int64_t num_chosen, uintptr_t x, int dtype, int64_t num_tokens, uintptr_t out,
                  ExpertPool *pool, int64_t number, const std::vector<const Adapter *> &adapters, uintptr_t of_token,
                  int64_t up_number, int64_t down_number) {
    const Arguments args("apply_experts");
    const ExpertLayer layer{up, down, args.count("the number of experts", num_experts, 1), args.activation(activation), pool, number};
    check_memory("apply_experts", layer);
    args.require(are_whole(layer), "the weights are not those of so many experts, or one does not begin with a panel");
    const DType type = args.dtype(dtype);
    const Memory from = args.memory("x", x, type, {num_tokens, layer.hidden()});
    const Memory to = args.memory("out", out, type, {num_tokens, layer.hidden()});
    args.apart(to, from);
    const ExpertRouting routing{num_experts, args.count("the number of choices", num_chosen, 1), false};
    const int64_t num_adapted = adapters.empty() ? 0 : num_tokens;
    const AdaptedRows adapted(adapters, args.array<const int32_t>("of_token", of_token, {num_adapted}), num_adapted);
    check_adapters(args, layer, adapters, {&adapted, -1, up_number, down_number});
    apply_experts(layer, routing, args.array<const int64_t>("the ids", ids, {num_tokens, num_chosen}),
                  args.array<const float>("the weights", weights, {num_tokens, num_chosen}), from.as<const void>(), type,
                  num_tokens, to.as<void>(), {adapted.is_empty() ? nullptr : &adapted, -1, up_number, down_number});
}

static void bind_experts(nb::module_ &m) {
    using release = nb::call_guard<nb::gil_scoped_release>;
    nb::class_<ExpertRouting>(m, "ExpertRouting")
        .def("__init__", &init_routing, "num_experts"_a, "num_chosen"_a, "is_normalised"_a, "is_sigmoid"_a, "num_groups"_a,
             "num_groups_chosen"_a, "sums_best_two"_a, "factor"_a, "bias"_a);
    m.def("choose_experts", &choose, release());
    m.def("apply_experts", &apply, "up"_a, "down"_a, "num_experts"_a, "activation"_a, "ids"_a, "weights"_a, "num_chosen"_a, "x"_a,
          "dtype"_a, "num_tokens"_a, "out"_a, "pool"_a.none(), "number"_a, "adapters"_a, "of_token"_a, "up_number"_a,
          "down_number"_a, release());
}
static const Registration registration(bind_experts);

}  // namespace quire
