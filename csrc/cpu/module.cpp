// The extension module: calls every function registered through bindings.hpp, and owns nothing else.
//
// To add a file of kernels, put it next to this one and register a bind function as bindings.hpp shows; code that
// should exist once per instruction set goes to csrc/cpu/isa/ and is reached through the table in dispatch.hpp.
#include "bindings.hpp"

namespace quire {

static const Registration *first_registration = nullptr;  // constant-initialised, so valid before any Registration runs

Registration::Registration(BindFunction bind) : bind(bind), next(first_registration) { first_registration = this; }

}  // namespace quire

NB_MODULE(_native, m) {
    m.doc() = "Native CPU kernels. Private: use quire.kernels.cpu, which checks what it passes.";
    for (const quire::Registration *entry = quire::first_registration; entry != nullptr; entry = entry->next) {
        entry->bind(m);
    }
}
