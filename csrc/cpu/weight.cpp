// Packing of weights into the layout of weight.hpp, and the class that Python holds a packed weight by.
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

#include <nanobind/stl/string.h>

#include "bindings.hpp"
#include "checks.hpp"
#include "threads.hpp"
#include "weight.hpp"

namespace quire {

template <typename T>
static void pack_panel(const T *weight, int64_t num_inputs, int64_t first, int64_t width, T *out) {
    constexpr int64_t PAIR = sizeof(T) == 2 ? 2 : 1;
    for (int64_t i = 0; i < width; ++i) {
        const T *row = weight + (first + i) * num_inputs;
        for (int64_t k = 0; k < num_inputs; ++k) out[(k / PAIR * PANEL + i) * PAIR + k % PAIR] = row[k];
    }
}

struct Quantized {
    const int8_t *values;            // [N, K]
    const float *scales, *offsets;   // [N, groups]; offsets may be null
};

// One output's group: bytes of four inputs lie PANEL * 4 apart.
static void pack_group(const LinearWeight &weight, const int8_t *values, uint8_t *out) {
    const int zero = static_cast<int>(weight.zero_point());
    for (int64_t k = 0; k < weight.group_size; ++k) {
        const uint8_t byte = static_cast<uint8_t>(values[k] + zero);
        if (weight.format == WeightFormat::int8) {
            out[k / 4 * 4 * PANEL + k % 4] = byte;
        } else {
            uint8_t &both = out[k / 8 * 4 * PANEL + k % 4];
            both = static_cast<uint8_t>(both | (k % 8 < 4 ? byte : byte << 4));
        }
    }
}

// From twice a number, as a byte, to its four bits, or BAD_CODE.
constexpr uint8_t BAD_CODE = 0x80;
struct E2m1Codes {
    uint8_t of[256];

    constexpr E2m1Codes() : of{} {
        constexpr int DOUBLED[] = {0, 1, 2, 3, 4, 6, 8, 12};
        for (uint8_t &code : of) code = BAD_CODE;
        for (int i = 7; i >= 0; --i) {
            of[(256 - DOUBLED[i]) % 256] = static_cast<uint8_t>(8 | i);
            of[DOUBLED[i]] = static_cast<uint8_t>(i);
        }
    }
};
constexpr E2m1Codes E2M1_CODES;

// Half a scale, as Python has it, to the byte of the scale; -1 where it is no power of two from 2^-128 to 2^124.
static int e8m0_of(float half) {
    uint32_t bits;
    memcpy(&bits, &half, sizeof bits);
    if (bits == 0x200000 || bits == 0x400000) return static_cast<int>(bits >> 22);  // below the normal numbers
    const int exponent = static_cast<int>(bits >> 23);
    return (bits & 0x7fffff) != 0 || exponent < 1 || exponent > 251 ? -1 : exponent + 1;
}

// Returns whether all numbers can be held.
static bool pack_mxfp4(const LinearWeight &weight, const Quantized &from, int64_t first, int64_t width, char *panel) {
    const int64_t num_groups = weight.num_groups();
    bool is_whole = true;
    for (int64_t i = 0; i < width; ++i) {
        for (int64_t group = 0; group < num_groups; ++group) {
            uint8_t *to = reinterpret_cast<uint8_t *>(panel + group * weight.group_bytes());
            const int scale = e8m0_of(from.scales[(first + i) * num_groups + group]);
            is_whole &= scale >= 0;
            to[i] = static_cast<uint8_t>(scale);
            const int8_t *values = from.values + (first + i) * weight.num_inputs + group * weight.group_size;
            uint8_t *codes = to + weight.header_bytes() + i * 4;
            uint8_t seen = 0;
            for (int64_t k = 0; k < weight.group_size; ++k) {
                const uint8_t code = E2M1_CODES.of[static_cast<uint8_t>(values[k])];
                seen |= code;
                uint8_t &both = codes[k / 8 * 4 * PANEL + k % 4];
                both = static_cast<uint8_t>(both | code << (k & 4));
            }
            is_whole &= (seen & BAD_CODE) == 0;
        }
    }
    return is_whole;
}

static void pack_integers(const LinearWeight &weight, const Quantized &from, int64_t first, int64_t width, char *panel) {
    const int64_t num_groups = weight.num_groups();
    for (int64_t i = 0; i < width; ++i) {
        for (int64_t group = 0; group < num_groups; ++group) {
            char *to = panel + group * weight.group_bytes();
            float *header = reinterpret_cast<float *>(to);
            const int64_t scale = (first + i) * num_groups + group;
            header[i] = from.scales[scale];
            if (from.offsets != nullptr) header[PANEL + i] = from.offsets[scale];
            const int8_t *values = from.values + (first + i) * weight.num_inputs + group * weight.group_size;
            pack_group(weight, values, reinterpret_cast<uint8_t *>(to + weight.header_bytes()) + i * 4);
        }
    }
}

// A scale that is not finite would turn every logit of the model into a not-a-number, without an error.
static void check_scales(const Arguments &args, const float *scales, int64_t count) {
    for (int64_t i = 0; i < count; ++i) args.finite("a scale or an offset", scales[i]);
}

static Memory memory_of(const LinearWeight &weight) { return {reinterpret_cast<uintptr_t>(weight.data), weight.num_bytes()}; }

template <typename Pack>
static void pack_panels(const LinearWeight &weight, const Pack &pack) {
    char *to = static_cast<char *>(const_cast<void *>(weight.data));
#pragma omp parallel for schedule(static) num_threads(team_size(weight.num_bytes()))
    for (int64_t panel = 0; panel < weight.num_panels(); ++panel) {
        char *panel_to = to + panel * weight.panel_bytes();
        std::memset(panel_to, 0, weight.panel_bytes());
        pack(panel * PANEL, min64(PANEL, weight.num_outputs - panel * PANEL), panel_to);
    }
}

void check_attached(const char *function, const LinearWeight &weight) {
    const bool has_memory = weight.data != nullptr || weight.num_bytes() == 0;
    Arguments(function).require(has_memory, "the weight is attached to no memory");
}

static void pack(const LinearWeight &weight, uintptr_t from) {
    const Arguments args("pack");
    check_attached("pack", weight);
    args.require(!weight.has_scales(), "a weight of integers is packed by pack_quantized");
    const DType dtype = weight.format == WeightFormat::f32 ? DType::f32 : DType::bf16;
    const Memory values = args.memory("the values", from, dtype, {weight.num_outputs, weight.num_inputs});
    args.apart(memory_of(weight), values);
    pack_panels(weight, [&](int64_t first, int64_t width, char *to) {
        if (weight.format == WeightFormat::f32) {
            pack_panel(values.as<const float>(), weight.num_inputs, first, width, reinterpret_cast<float *>(to));
        } else {
            pack_panel(values.as<const bf16>(), weight.num_inputs, first, width, reinterpret_cast<bf16 *>(to));
        }
    });
}

static void pack_quantized(const LinearWeight &weight, uintptr_t values, uintptr_t scales, uintptr_t offsets) {
    const Arguments args("pack_quantized");
    check_attached("pack_quantized", weight);
    args.require(weight.has_scales(), "a weight of floats is packed by pack");
    args.require(weight.has_offsets == (offsets != 0), "offsets are given, or not, as the weight says");
    const int64_t num_groups = weight.num_groups();
    const Quantized from{args.array<const int8_t>("the values", values, {weight.num_outputs, weight.num_inputs}),
                         args.array<const float>("the scales", scales, {weight.num_outputs, num_groups}),
                         args.array<const float>("the offsets", offsets, {weight.has_offsets ? weight.num_outputs : 0, num_groups})};
    check_scales(args, from.scales, weight.num_outputs * num_groups);
    if (from.offsets != nullptr) check_scales(args, from.offsets, weight.num_outputs * num_groups);
    std::atomic<bool> is_whole = true;
    pack_panels(weight, [&](int64_t first, int64_t width, char *to) {
        if (weight.is_integer()) return pack_integers(weight, from, first, width, to);
        if (!pack_mxfp4(weight, from, first, width, to)) is_whole = false;
    });
    args.require(is_whole, "mxfp4 holds twice e2m1 numbers, and powers of two from 2^-128 to 2^124 as halves of scales");
}

static constexpr const char *FORMATS[] = {"f32", "bf16", "int8", "int4", "mxfp4"};

static WeightFormat format_of(const std::string &name) {
    for (int i = 0; i < 5; ++i) {
        if (name == FORMATS[i]) return static_cast<WeightFormat>(i);
    }
    throw std::invalid_argument("there is no weight format " + name);
}

// The arguments say how `data` is laid out; nothing is copied, and the caller keeps the memory alive.
static void init_weight(LinearWeight *self, const std::string &format, int64_t num_outputs, int64_t num_inputs,
                        int64_t group_size, bool has_offsets, bool has_int8_inputs) {
    constexpr int64_t MOST = int64_t{1} << 31;  // so that no product below overflows
    LinearWeight weight{format_of(format), has_offsets, has_int8_inputs, num_outputs, num_inputs, group_size, nullptr,
                        nullptr};
    const bool is_sensible = num_outputs >= 0 && num_outputs <= MOST && num_inputs >= 1 && num_inputs <= MOST;
    if (!is_sensible || group_size < 1 || num_inputs % group_size != 0) {
        throw std::invalid_argument("a weight [" + std::to_string(num_outputs) + ", " + std::to_string(num_inputs) +
                                    "] with groups of " + std::to_string(group_size) + " inputs cannot be");
    }
    if (!weight.is_integer() && (has_offsets || has_int8_inputs || (!weight.has_scales() && group_size != num_inputs))) {
        throw std::invalid_argument("only integer weights have offsets and int8 inputs, and only they and mxfp4 groups");
    }
    if (has_int8_inputs && group_size > MAX_INT8_GROUP) {
        throw std::invalid_argument("the sum of " + std::to_string(group_size) + " products does not fit 32 bits");
    }
    new (self) LinearWeight(weight);
}

static void bind_weight(nb::module_ &m) {
    nb::class_<LinearWeight>(m, "LinearWeight")
        .def("__init__", &init_weight, nb::arg("format"), nb::arg("num_outputs"), nb::arg("num_inputs"),
             nb::arg("group_size"), nb::arg("has_offsets"), nb::arg("has_int8_inputs"))
        .def_prop_ro("num_bytes", &LinearWeight::num_bytes)
        .def("attach", [](LinearWeight &self, uintptr_t data, uintptr_t bias) {
            const Arguments args("LinearWeight.attach");
            const int64_t num_biases = bias == 0 ? 0 : self.num_outputs;
            const void *held = args.memory("the weight", data, int64_t{sizeof(float)}, {self.num_bytes() / int64_t{sizeof(float)}}).as<const void>();
            self.bias = args.array<const float>("the bias", bias, {num_biases});
            self.data = held;
        })
        .def("attach_bias", [](LinearWeight &self, uintptr_t bias) {
            self.bias = Arguments("LinearWeight.attach_bias").array<const float>("the bias", bias, {self.num_outputs});
        });
    m.attr("WEIGHT_LAYOUT") = WEIGHT_LAYOUT;
    m.attr("MAX_INT8_GROUP") = MAX_INT8_GROUP;
    using release = nb::call_guard<nb::gil_scoped_release>;
    m.def("pack", &pack, release());
    m.def("pack_quantized", &pack_quantized, release());
}
static const Registration registration(bind_weight);

}  // namespace quire
