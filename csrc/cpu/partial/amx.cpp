// Projections by AMX: tiles of x times tiles of the packed weight, whose lines (a word of 16 outputs each) lie as the unit
// wants them. bfloat16 times bfloat16 for any number of rows; int8 inputs times int8 or int4 weights for many. All else is
// AVX512-VNNI's, and its table is the base of this one.
//
// Two tiles of rows meet two panels, so that each tile that is loaded is used twice and four sums are under way, which
// cover the latency of a product (Intel's optimization manual, chapter on AMX). What they come to is made outputs between the
// products of the next ones (amx_finish.hpp). Of a gated projection, the two panels are one of the gate and one of `up`. Rows are
// divided evenly into tiles, which have that height: the unit takes as long as there are rows.
//
// Rows are multiplied `depth` words at a time. Where a group does not consist of whole tiles, its last lines are copied
// and padded with zeros.
//
// bfloat16: one instruction adds up the first numbers of its words and the second ones in two chains, adds the two, and
// adds that to the tile (Intel's manual, TDPBF16PS). VDPBF16PS has one chain through both and rounds at other places, so
// it cannot stand in for few rows: every row goes through tiles, in batches of any size, cut at the same words. Rows do not
// meet in a tile, so that a row's bits depend on nothing but the row, the weight and the instruction set. One row costs
// what loading the weight's tiles costs; the unit is idle most of that time, whatever multiplies.
//
// Integers are exact sums modulo 2^32, as everywhere, so few rows may go through VNNI: three of int8, whose products take VNNI
// longer than the memory from four on; of int4 as many as one of its tiles of registers holds, which reads the weight once, and
// in groups of 32 as many as two tiles of matrices hold. Measured on an Emerald Rapids (docs/lab/kernels-cpu.md), as all
// figures here.
#include "amx_small_groups.hpp"
#include "extension.hpp"

namespace quire::QUIRE_ISA {

constexpr int64_t KEPT_BYTES = 40 << 10;  // of the first-level cache's 48 KiB
constexpr int64_t FEW_INT8_ROWS = 3;
constexpr int64_t FEW_TILES = 8;          // of rows; outputs of no more are not prefetched
constexpr int64_t TWICE_USED_TILES = 4;   // whose second pair finds some of the weights in the first-level cache in any case
constexpr int64_t MAX_GROUPS = 2;         // that are multiplied before they are added up: with four, 15 to 20 % slower
constexpr int64_t SMALL_GROUP = 64;       // inputs; larger groups gain nothing from sums in registers (amx_small_groups.hpp)
constexpr int64_t SMALL_GROUPS_INPUTS = 512;  // whose weights stay in the first-level cache while all rows pass by

// Words that a tile takes of a group of so many: 16, or fewer where the group then divides evenly.
static int depth_of(int64_t group_words) {
    const int64_t steps = ceil_div(group_words, MAX_DEPTH);
    return static_cast<int>(group_words % steps == 0 ? group_words / steps : MAX_DEPTH);
}

// So many rows are better left to VNNI, which need not write int4 as signed bytes first.
static int64_t few_rows(const LinearWeight &weight) {
    if (weight.format == WeightFormat::int8) return FEW_INT8_ROWS;
    return weight.group_size <= 32 ? 2 * MATRIX_ROWS : TILE_ROWS;
}

static int matrix_depth(const LinearWeight &weight, bool is_bf16, int64_t num_rows) {
    if (is_bf16) return depth_of(weight.padded_group() / 2);
    return weight.has_int8_inputs && num_rows > few_rows(weight) ? depth_of(weight.padded_group() / 4) : 0;
}

// ---- weights ----

// Two panels that are multiplied together: neighbours, the last one alone, or the gate's and the one of `up` with the same
// columns.
struct PanelPair {
    int64_t first, distance;  // in panels
    int count;
};

static int64_t num_pairs(const GemmBlock &block) {
    const bool is_gated = block.outputs != nullptr && block.outputs->is_gated;
    return is_gated ? block.num_panels : ceil_div(block.num_panels, 2);
}

static PanelPair pair_of(const GemmBlock &block, int64_t index) {
    if (block.outputs != nullptr && block.outputs->is_gated) return {block.first_panel + index, block.outputs->up_panels, 2};
    return {block.first_panel + 2 * index, 1, static_cast<int>(min64(2, block.num_panels - 2 * index))};
}

// What a pass of all rows goes through.
struct Chunk {
    int64_t first_group, num_groups;
};

// The lines of a chunk as they are multiplied.
struct Lines {
    const char *data;
    int64_t stride, group_stride;  // bytes from a panel to the next one, from a group to the next one
};

static Lines lines_in_place(const LinearWeight &weight, const PanelPair &pair, const Chunk &chunk) {
    const char *group = weight.panel(pair.first) + chunk.first_group * weight.group_bytes();
    return {group + weight.header_bytes(), pair.distance * weight.panel_bytes(), weight.group_bytes()};
}

// Half bytes hold value + 8. Signed bytes save an addition for each sum of products.
static void expand_signed(const char *from, int64_t num_lines, char *out) {
    const __m512i mask = _mm512_set1_epi8(15), zero_point = _mm512_set1_epi8(8);
    for (const char *end = from + num_lines * LINE; from != end; from += LINE, out += 2 * LINE) {
        const __m512i low = _mm512_loadu_si512(from), high = _mm512_srli_epi32(low, 4);
        _mm512_storeu_si512(out, _mm512_sub_epi8(_mm512_and_si512(low, mask), zero_point));
        _mm512_storeu_si512(out + LINE, _mm512_sub_epi8(_mm512_and_si512(high, mask), zero_point));
    }
}

// Of int4, as signed bytes in scratch, which the first-level cache keeps.
static Lines expanded_lines(const LinearWeight &weight, const PanelPair &pair, const Chunk &chunk, void *scratch) {
    char *data = static_cast<char *>(scratch), *to = data;
    const int64_t num_lines = (weight.group_bytes() - weight.header_bytes()) / LINE;
    for (int p = 0; p < pair.count; ++p) {
        const char *group = weight.panel(pair.first + p * pair.distance) + chunk.first_group * weight.group_bytes();
        for (int64_t g = 0; g < chunk.num_groups; ++g, group += weight.group_bytes(), to += 2 * num_lines * LINE) {
            expand_signed(group + weight.header_bytes(), num_lines, to);
        }
    }
    return {data, chunk.num_groups * 2 * num_lines * LINE, 2 * num_lines * LINE};
}

// ---- blocks ----

// The next tiles of a block, of which `left` are left.
static RowPair next_pair(Tiles &tiles, int64_t left) {
    RowPair pair{{tiles.next(), {}}, 1};
    if (left > 1) pair.tiles[pair.count++] = tiles.next();
    return pair;
}

// What a thread takes from one block to the next: rows that wait, for one. Where a block is two panels and two pairs of tiles,
// half of them would otherwise have no products to hide behind.
struct Carried {
    Meanwhile meanwhile;
    int next_products = 0;
    alignas(LINE) TileSums products[2][MAX_GROUPS];
};
static Carried &carried() {
    static thread_local Carried carried;
    return carried;
}

// Two panels after another, and of these some groups after others, which all rows pass by. Where the first-level cache keeps
// them, half of what is loaded comes from there. (Parts of a group that it keeps, with sums stored and loaded again in
// between: up to 4 % slower than all of it from the second-level cache.)
template <typename Words>
class Block {
   public:
    Block(const LinearWeight &weight, const InputRows &rows, const GemmBlock &block)
        : weight_(weight), rows_(rows), block_(block), outputs_(block.outputs != nullptr ? *block.outputs : kept(block)),
          carried_(carried()), meanwhile_(carried_.meanwhile), first_row_(rows.first_row(block.first_tile)),
          num_rows_(rows.first_row(block.first_tile + block.num_tiles) - first_row_), num_groups_(weight.num_groups()),
          num_lines_(weight.padded_group() / Words::INPUTS), group_bytes_(weight.group_bytes()),
          panel_bytes_(weight.panel_bytes()), is_whole_(num_groups_ == 1 && !weight.has_offsets),
          finish_(finish_of(Words::KIND, outputs_, is_whole_)),
          per_start_(weight.is_integer() ? -1.0f / static_cast<float>(weight.zero_point()) : 0.0f) {
        chunk_groups_ = min64(num_groups_, has_small_groups() ? max64(1, SMALL_GROUPS_INPUTS / weight.group_size) : MAX_GROUPS);
        turns_of_pair_ = ceil_div(num_groups_, chunk_groups_) * block.num_tiles;
    }

    void run() {
        for (; index_ < num_pairs(block_); ++index_) {
            pair_ = pair_of(block_, index_);
            upcoming_ = upcoming();
            place_ = 0;
            for (int64_t group = 0; group < num_groups_; group += chunk_groups_) {
                const Chunk chunk{group, min64(chunk_groups_, num_groups_ - group)};
                has_small_groups() ? add_chunk(chunk) : run_chunk(chunk);
            }
        }
        if (block_.outputs == nullptr) meanwhile_.waiting.finish_all();
    }

   private:
    bool has_small_groups() const { return Words::IS_EXPANDED && num_groups_ > 1 && weight_.group_size <= SMALL_GROUP; }
    static Outputs kept(const GemmBlock &block) {
        const OutputBlock out{block.sums, DType::f32, GROUP_WIDTH, 0, int64_t{block.num_panels} * PANEL, 0};
        return {out, nullptr, nullptr, false, Activation::silu, 0, false};
    }
    // The panels behind a pair, as many as it has or as there are: of this block, or of the next one, mostly this thread's too.
    Upcoming upcoming() const {
        const int64_t num_panels = outputs_.is_gated ? 1 : 2, from = pair_.first + num_panels;
        const int64_t left = (outputs_.is_gated ? outputs_.up_panels : weight_.num_panels()) - from;
        const int64_t num_lines = max64(0, min64(num_panels, left)) * panel_bytes_ / LINE;
        const char *next = static_cast<const char *>(weight_.data) + from * panel_bytes_;
        return {next, num_lines, outputs_.is_gated ? outputs_.up_panels * panel_bytes_ : 0};
    }
    // Of the tiles before `end`. Weights are kept for the next pair of tiles, if there is one.
    Reuse reuse_of(const Chunk &chunk, int64_t end) const {
        const int64_t num_rows = block_.num_tiles * MATRIX_ROWS, row_bytes = rows_.row_words * int64_t{sizeof(uint32_t)};
        if (block_.num_tiles <= 2 && !Words::IS_EXPANDED) return {num_rows * row_bytes <= KEPT_BYTES, false};
        const bool fits = 2 * chunk.num_groups * num_lines_ * LINE <= KEPT_BYTES;
        return {false, (fits || block_.num_tiles <= TWICE_USED_TILES) && end < block_.num_tiles};
    }

    void run_chunk(const Chunk &chunk) {
        const Lines lines = Words::IS_EXPANDED ? expanded_lines(weight_, pair_, chunk, block_.panels)
                                               : lines_in_place(weight_, pair_, chunk);
        const int64_t num_steps = chunk.num_groups * ceil_div(num_lines_, rows_.depth);
        Tiles tiles(rows_, block_);
        for (int64_t t = 0; t < block_.num_tiles; t += 2) {
            const RowPair rows = next_pair(tiles, block_.num_tiles - t);
            prefetch_next_panels(rows.count, num_steps);
            Shapes::set(rows_.depth, rows_.tile_rows);
            const Reuse reuse = reuse_of(chunk, t + rows.count);
            rows.count == 2 ? multiply_chunk<2>(rows, chunk, lines, reuse) : multiply_chunk<1>(rows, chunk, lines, reuse);
        }
    }

    template <int TALL>
    void multiply_chunk(const RowPair &rows, const Chunk &chunk, const Lines &lines, const Reuse &reuse) {
        if (pair_.count == 2) return multiply_chunk<TALL, 2>(rows, chunk, lines, reuse);
        multiply_chunk<TALL, 1>(rows, chunk, lines, reuse);
    }

    // Of small groups.
    void add_chunk(const Chunk &chunk) {
        const Lines lines = expanded_lines(weight_, pair_, chunk, block_.panels);
        const int64_t row_step = round_up(num_lines_, rows_.depth) * int64_t{sizeof(uint32_t)};
        Tiles tiles(rows_, block_);
        for (int64_t t = 0; t < block_.num_tiles; ++t) {
            const Tile tile = tiles.next();
            const int64_t x_step = tile.height * row_step;
            prefetch_next_panels(1, pair_.count);
            Shapes::set(rows_.depth, rows_.tile_rows);
            Finish finish;
            describe(finish, chunk, tile.row - first_row_, tile.height);
            for (int p = 0; p < pair_.count; ++p) {
                const TileAndPanel at{weight_,
                                      tile.height,
                                      rows_.depth,
                                      reinterpret_cast<const char *>(tile.x) + chunk.first_group * x_step,
                                      lines.data + p * lines.stride,
                                      finish.headers + p * finish.header_stride,
                                      num_lines_,
                                      x_step,
                                      finish.header_group_stride};
                add_small_groups(at, chunk.num_groups, finish.is_first, finish.starts, finish.sums + p * PANEL);
                meanwhile_.ahead.prefetch();
            }
            if (is_complete(chunk)) finish_(finish, 0, tile.height);
        }
    }

    void prefetch_next_panels(int64_t num_tiles, int64_t num_steps) {
        meanwhile_.ahead = PanelPrefetcher(upcoming_, rows_.num_tiles, place_, place_ + num_tiles, turns_of_pair_);
        meanwhile_.ahead.spread(num_steps);
        meanwhile_.waiting.spread(num_steps);
        place_ += num_tiles;
    }

    template <int TALL, int WIDE>
    void multiply_chunk(const RowPair &rows, const Chunk &chunk, const Lines &lines, const Reuse &reuse) {
        const int64_t first_block = chunk.first_group * ceil_div(num_lines_, rows_.depth);
        Sides at = rows.sides(first_block, rows_.depth, lines.stride, reuse);
        TileSums *products = carried_.products[carried_.next_products];
        for (int64_t group = 0; group < chunk.num_groups; ++group) {
            zero_tiles<TALL, WIDE>();
            multiply<Words, TALL, WIDE>(at, lines.data + group * lines.group_stride, num_lines_, meanwhile_);
            store_tiles<TALL, WIDE>(products[group][0], products[group][rows.tiles[0].height], sizeof products[group][0]);
        }
        put_rows(chunk, rows);
    }

    bool is_complete(const Chunk &chunk) const { return chunk.first_group + chunk.num_groups == num_groups_; }

    // Groups of some rows have been multiplied.
    void put_rows(const Chunk &chunk, const RowPair &rows) {
        meanwhile_.waiting.finish_all();
        Finish &finish = meanwhile_.waiting.put(is_whole_ ? finish_ : addition_of(Words::KIND), rows.height());
        finish.finish = is_complete(chunk) ? finish_ : nullptr;
        finish.products = carried_.products[carried_.next_products];
        describe(finish, chunk, rows.tiles[0].row - first_row_, rows.height());
        carried_.next_products ^= 1;
    }

    // What becomes of rows whose products are there.
    void describe(Finish &finish, const Chunk &chunk, int64_t row, int64_t height) const {
        const OutputBlock &out = outputs_.out;
        const int64_t column = index_ * (outputs_.is_gated ? PANEL : PAIR), left = out.width - column;
        const int64_t element = size_of(out.dtype);
        finish.num_groups = chunk.num_groups;
        finish.count = num_groups_;
        finish.headers = static_cast<const char *>(weight_.data) + pair_.first * panel_bytes_;
        finish.headers += chunk.first_group * group_bytes_;
        finish.header_stride = pair_.count == 2 ? pair_.distance * panel_bytes_ : 0;
        finish.header_group_stride = group_bytes_;
        finish.has_offsets = weight_.has_offsets;
        finish.is_first = chunk.first_group == 0;
        finish.per_start = per_start_;
        finish.starts = rows_.starts + (first_row_ + row) * num_groups_ + chunk.first_group;
        finish.row_scales = rows_.scales + first_row_ + row;
        finish.sums = block_.sums + index_ * PAIR + row * GROUP_WIDTH;
        finish.out = static_cast<char *>(out.data) + (row * out.stride + out.first + column) * element;
        finish.out_stride = out.stride * element;
        finish.to_next = to_next_output(row, height);
        finish.columns = left >= PAIR ? ~uint32_t{0} : (uint32_t{1} << left) - 1;
        const bool has_bias = outputs_.bias != nullptr;
        finish.bias[0] = has_bias ? outputs_.bias + column : nullptr;
        finish.bias[1] = !has_bias ? nullptr : outputs_.is_gated ? outputs_.up_bias + column : finish.bias[0] + PANEL;
    }

    // To as many rows that follow, or the first ones in the columns that follow.
    int64_t to_next_output(int64_t row, int64_t height) const {
        const int64_t left = num_rows_ - row - height, element = size_of(outputs_.out.dtype);
        const int64_t row_bytes = outputs_.out.stride * element;
        if (block_.num_tiles <= FEW_TILES || (left > 0 && left < height)) return 0;
        if (left > 0) return height * row_bytes;
        return index_ + 1 == num_pairs(block_) ? 0 : (outputs_.is_gated ? PANEL : PAIR) * element - row * row_bytes;
    }

    const LinearWeight &weight_;
    const InputRows &rows_;
    const GemmBlock &block_;
    const Outputs outputs_;
    Carried &carried_;
    Meanwhile &meanwhile_;
    const int64_t first_row_, num_rows_, num_groups_, num_lines_;
    const int64_t group_bytes_, panel_bytes_;  // found by divisions
    const bool is_whole_;
    const FinishRows finish_;
    const float per_start_;
    int64_t chunk_groups_, turns_of_pair_, place_ = 0;  // place_: of a pair's turns
    int64_t index_ = 0;  // of the pair of panels
    PanelPair pair_;
    Upcoming upcoming_;
};

void gemm(const LinearWeight &weight, const InputRows &rows, const GemmBlock &block) {
    if (rows.depth == 0) return avx512vnni::extended_table().gemm(weight, rows, block);
    if (rows.is_bf16) return Block<Pairs>(weight, rows, block).run();
    if (weight.format == WeightFormat::int4) return Block<SignedQuads>(weight, rows, block).run();
    Block<Quads>(weight, rows, block).run();
}

static void end_gemms() {
    carried().meanwhile.waiting.finish_all();
    _mm_sfence();  // what went past the caches is there for other threads
    Shapes::release();
}

const KernelTable &extended_table() {
    static const KernelTable made = extend(avx512vnni::extended_table(), [](KernelTable &table) {
        table.has_bf16_dots = true;
        table.matrix_depth = matrix_depth;
        table.gemm = gemm;
        table.end_gemms = end_gemms;
        table.max_task_rows = max_rows_by_tiles;
        table.attention_scratch = attention_scratch;
        table.attend = attend_by_tiles;
        table.probe_pairs = probe_pair_tiles;
        table.probe_integers = table.probe_half_bytes = probe_quad_tiles;
    });
    return made;
}

}  // namespace quire::QUIRE_ISA
