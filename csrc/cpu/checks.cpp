// The words for arguments that are refused; out of line, so that a check costs a comparison.
#include "checks.hpp"

#include <stdexcept>
#include <string>

namespace quire {

void Arguments::refuse(const char *what) const { throw std::invalid_argument(std::string(function_) + ": " + what); }

void Arguments::refuse_number(const char *name, int64_t value, int64_t least, int64_t most) const {
    throw std::invalid_argument(std::string(function_) + ": " + name + " is " + std::to_string(value) +
                                ", not from " + std::to_string(least) + " to " + std::to_string(most));
}

void Arguments::refuse_not_finite(const char *name) const {
    throw std::invalid_argument(std::string(function_) + ": " + name + " is not finite");
}

void Arguments::refuse_negative(const char *name) const {
    throw std::invalid_argument(std::string(function_) + ": " + name + " is negative");
}

void Arguments::refuse_size(const char *name) const {
    throw std::invalid_argument(std::string(function_) + ": the size of " + name +
                                " is negative, or more than an address space holds");
}

void Arguments::refuse_address(const char *name, uintptr_t address, int64_t size) const {
    throw std::invalid_argument(std::string(function_) + ": the address " + std::to_string(address) + " of " + name +
                                " is null, or no multiple of " + std::to_string(size));
}

void Arguments::refuse_overlap() const {
    throw std::invalid_argument(std::string(function_) + ": what is written overlaps with what is read");
}

}  // namespace quire
