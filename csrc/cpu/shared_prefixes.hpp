// Which decoding sequences of a batch begin with the same blocks: several answers to one prompt, beams, requests behind one
// long instruction. One task reads such keys for all of them (as in Juravsky et al., "Hydragen", 2024, but in the order of
// additions that each row has when it is alone).
#pragma once

#include <vector>

#include "attention.hpp"

namespace quire {

struct SharedPrefix {
    std::vector<Member> members;  // two or more
    int64_t end;                  // of what they share, in positions: a multiple of TILE, and no member's context ends before it
};

// Groups of up to `max_members` sequences, each in one of them at most: runs in the order of their tables, so divided that the
// number of tiles that need not be read is as large as it can be. No sequence from which a window hides keys.
std::vector<SharedPrefix> find_shared_prefixes(const AttentionProblem &problem, const Sequences &sequences,
                                               int64_t max_members);

}  // namespace quire
