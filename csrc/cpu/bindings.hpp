// How a source file adds functions to the extension module `quire.kernels.cpu._native`.
//
// A file defines a function that takes the module and registers it, once, at namespace scope:
//
//     static void bind_sampling(nb::module_ &m) { m.def("sample", &sample, "rows"_a, nb::call_guard<...>()); }
//     static const quire::Registration registration(bind_sampling);
//
// Nothing else has to be edited: CMakeLists.txt globs csrc/cpu/*.cpp. Describe what you add in
// quire/kernels/cpu/_native.pyi.
#pragma once

#include <nanobind/nanobind.h>

namespace quire {

namespace nb = nanobind;

using BindFunction = void (*)(nb::module_ &);

// A static object that puts `bind` on the list that the module's initialiser walks (in no particular order).
struct Registration {
    explicit Registration(BindFunction bind);
    BindFunction bind;
    const Registration *next;
};

}  // namespace quire
