// The groups of an integer weight, and what becomes of a group's sum of products: groups are added in ascending order in
// float32, a multiplication and an addition each, so that every instruction set rounds alike. Shared by the GEMMs in
// integers, whatever multiplies them.
#pragma once

#include "gemm.hpp"

namespace quire::QUIRE_ISA {

// Weights as they are multiplied, and the scales (then offsets) of each group.
struct Groups {
    Panels weights;  // num_steps: of one group
    int64_t stride;  // bytes from a group's weights to the next one's
    const char *headers;
    int64_t header_stride, header_group_stride;  // bytes from a panel's to the next one's, from a group's to the next one's
    int64_t count;
    bool has_offsets;
    float per_start;  // what a group's start is multiplied with to give the sum of its inputs
};

// A group is complete: sums += scale * integers, then sums += offset * sum of the inputs. `starts`: of the first row.
template <int ROWS, int PANELS>
QINLINE void add_group(float *sums, const Bits (&acc)[ROWS][PANELS * PANEL_VECS], const Groups &groups,
                       const int32_t *starts, int64_t group, const char *headers) {
    constexpr int VECS = PANELS * PANEL_VECS;
    Vec scales[VECS];
    QUNROLL
    for (int v = 0; v < VECS; ++v) scales[v] = as_float(load_bits(line(headers, v, groups.header_stride)));
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        QUNROLL
        for (int v = 0; v < VECS; ++v) {
            float *to = sums + r * GROUP_WIDTH + v * LANES;
            store(to, add(group == 0 ? broadcast(0.0f) : load(to), mul(scales[v], to_float(acc[r][v]))));
        }
    }
    if (!groups.has_offsets) return;
    const char *offsets = headers + PANEL * sizeof(float);
    QUNROLL
    for (int r = 0; r < ROWS; ++r) {
        const Vec inputs = broadcast(static_cast<float>(starts[r * groups.count + group]) * groups.per_start);
        QUNROLL
        for (int v = 0; v < VECS; ++v) {
            float *to = sums + r * GROUP_WIDTH + v * LANES;
            store(to, add(load(to), mul(as_float(load_bits(line(offsets, v, groups.header_stride))), inputs)));
        }
    }
}

// A line of bytes as the lines that multiplications take one after another.
QINLINE char *expand_bytes(const Bits (&bytes)[PANEL_VECS], char *out) {
    QUNROLL
    for (int v = 0; v < PANEL_VECS; ++v) {
        char *to = out + v * 4 * LANES;
        store(reinterpret_cast<float *>(to), as_float(part_of<0>(bytes[v])));
        if (NUM_PARTS > 1) store(reinterpret_cast<float *>(to + LINE), as_float(part_of<NUM_PARTS - 1>(bytes[v])));
    }
    return out + NUM_PARTS * LINE;
}

// All groups of a panel.
template <WeightFormat FORMAT>
static void expand_panel(const Groups &groups, const char *panel, char *out) {
    const Bits mask = broadcast_bits(0x0f0f0f0fu);
    for (int64_t group = 0; group < groups.count; ++group, panel += groups.stride) {
        const char *from = panel, *end = from + groups.weights.num_steps * LINE;
        for (; from != end; from += LINE) {
            Bits line[PANEL_VECS], low[PANEL_VECS], high[PANEL_VECS];
            QUNROLL
            for (int v = 0; v < PANEL_VECS; ++v) {
                line[v] = load_bits(from + v * 4 * LANES);
                low[v] = and_bits(line[v], mask);
                high[v] = and_bits(shift_right<4>(line[v]), mask);
            }
            if constexpr (FORMAT == WeightFormat::int8) {
                out = expand_bytes(line, out);
            } else {
                out = expand_bytes(high, expand_bytes(low, out));
            }
        }
    }
}

// The groups with their weights in the block's scratch, in the form that is multiplied.
template <WeightFormat FORMAT>
static Groups expanded(const Groups &groups, const GemmBlock &block) {
    Groups parts = groups;
    char *to = static_cast<char *>(block.panels);
    parts.weights.num_steps = NUM_PARTS * (FORMAT == WeightFormat::int8 ? 1 : 2) * groups.weights.num_steps;
    parts.stride = parts.weights.num_steps * LINE;
    parts.weights.stride = groups.count * parts.stride;
    parts.weights.data = to;
    for (int p = 0; p < groups.weights.num_panels; ++p) {
        expand_panel<FORMAT>(groups, groups.weights.data + p * groups.weights.stride, to + p * parts.weights.stride);
    }
    return parts;
}

static Groups groups_of(const LinearWeight &weight, const GemmBlock &block) {
    const char *data = weight.panel(block.first_panel);
    const int64_t header = weight.header_bytes(), group = weight.group_bytes(), panel = weight.panel_bytes();
    return {{data + header, panel, block.num_panels, (group - header) / LINE},
            group,
            data,
            panel,
            group,
            weight.num_groups(),
            weight.has_offsets,
            -1.0f / static_cast<float>(weight.zero_point())};
}

}  // namespace quire::QUIRE_ISA
