// Sockets between ranks; see links.hpp. The system's order of bytes is sent: hosts of one group are alike.
#include "links.hpp"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>

#include "gathering.hpp"

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0  // Python ignores the signal, too
#endif

namespace quire {

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t READ_BYTES = 64 << 10;
// Of a message: an exchange of rows may have one for each row, and is sent in several.
constexpr size_t MOST_EXTENTS = 4096;
constexpr int SLICE_MS = 20;
// As in gathering.cpp: a process that was stopped itself has not waited.
constexpr double MOST_COUNTED_S = 0.1;

struct Header {
    uint32_t kind, value;
    uint64_t num_extents, num_bytes;  // the extents follow, and then their bytes
};

// Reads exactly as many bytes as are wanted, many small ones with one call of the system.
class Reader {
   public:
    Reader(int fileno, std::atomic<uint64_t> &num_beats) : fileno_(fileno), num_beats_(num_beats), buffer_(READ_BYTES) {}

    void read(void *to, size_t num_bytes) {
        char *at = static_cast<char *>(to);
        while (num_bytes > 0) {
            if (begin_ == end_ && num_bytes >= READ_BYTES) {
                const size_t found = some(at, num_bytes);
                at += found;
                num_bytes -= found;
                continue;
            }
            if (begin_ == end_) {
                begin_ = 0;
                end_ = some(buffer_.data(), READ_BYTES);
            }
            const size_t taken = num_bytes < end_ - begin_ ? num_bytes : end_ - begin_;
            std::memcpy(at, buffer_.data() + begin_, taken);
            begin_ += taken;
            at += taken;
            num_bytes -= taken;
        }
    }

   private:
    size_t some(char *to, size_t num_bytes) {
        for (;;) {
            const ssize_t found = ::recv(fileno_, to, num_bytes, 0);
            if (found > 0) {
                num_beats_.fetch_add(1, std::memory_order_relaxed);
                return static_cast<size_t>(found);
            }
            if (found == 0 || errno != EINTR) throw std::runtime_error("the connection has ended");
        }
    }

    const int fileno_;
    std::atomic<uint64_t> &num_beats_;
    std::vector<char> buffer_;
    size_t begin_ = 0, end_ = 0;
};

}  // namespace

Links::Links(GroupState *state, int64_t num_bytes, double silence_s, const std::vector<std::pair<int, int>> &peers)
    : state_(state), num_bytes_(num_bytes), silence_s_(silence_s) {
    for (const auto &[rank, fileno] : peers) {
        peers_.push_back(std::make_unique<Peer>());
        peers_.back()->rank = rank;
        peers_.back()->fileno = fileno;
    }
    // Signals are for the threads of Python.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (auto &peer : peers_) {
        peer->receiver = std::thread([this, &peer = *peer] { receive(peer); });
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Links::~Links() {
    shut();
    for (auto &peer : peers_) peer->receiver.join();
    for (auto &peer : peers_) ::close(peer->fileno);
}

void Links::shut() {
    is_over_.store(true);
    for (auto &peer : peers_) ::shutdown(peer->fileno, SHUT_RDWR);
}

// ---- sending ----

void Links::send(Kind kind, uint32_t value, const std::vector<Extent> &extents, int rank) {
    const char *const memory = reinterpret_cast<const char *>(state_);
    for (size_t first = 0; first == 0 || first < extents.size(); first += MOST_EXTENTS) {
        const size_t count = extents.size() - first < MOST_EXTENTS ? extents.size() - first : MOST_EXTENTS;
        const Extent *const chosen = extents.data() + first;
        const bool is_last = first + count == extents.size();
        uint64_t num_bytes = 0;
        for (size_t i = 0; i < count; ++i) num_bytes += chosen[i].count * chosen[i].num_bytes;
        const Header header{static_cast<uint32_t>(is_last ? kind : Kind::data), value, count, num_bytes};
        message_.resize(sizeof(Header) + count * sizeof(Extent) + num_bytes);
        char *to = message_.data();
        std::memcpy(to, &header, sizeof(Header));
        to += sizeof(Header);
        if (count > 0) std::memcpy(to, chosen, count * sizeof(Extent));
        to += count * sizeof(Extent);
        for (size_t i = 0; i < count; ++i) {
            for (int64_t row = 0; row < chosen[i].count; ++row, to += chosen[i].num_bytes) {
                std::memcpy(to, memory + chosen[i].first + row * chosen[i].stride, chosen[i].num_bytes);
            }
        }
        for (auto &peer : peers_) {
            if (rank >= 0 && peer->rank != rank) continue;
            const std::lock_guard<std::mutex> lock(peer->sending);
            write(*peer, peer->rest.data(), peer->rest.size());
            peer->rest.clear();
            write(*peer, message_.data(), message_.size());
        }
    }
}

void Links::beat() {
    const Header header{static_cast<uint32_t>(Kind::beat), 0, 0, 0};
    const char *const bytes = reinterpret_cast<const char *>(&header);
    for (auto &peer : peers_) {
        const std::unique_lock<std::mutex> lock(peer->sending, std::try_to_lock);
        if (!lock.owns_lock()) continue;  // what is being sent is a sign, too
        if (peer->rest.empty()) peer->rest.assign(bytes, bytes + sizeof(header));
        const ssize_t sent = write_some(*peer, peer->rest.data(), peer->rest.size());
        if (sent == 0 && peer->rest.size() == sizeof(header)) {
            peer->rest.clear();  // there is more than one to be taken off
        } else if (sent > 0) {
            peer->rest.erase(peer->rest.begin(), peer->rest.begin() + sent);
        }
    }
}

// Send what is taken at once; 0 where nothing is, -1 where the connection is over.
ssize_t Links::write_some(Peer &peer, const char *from, size_t num_bytes) {
    for (;;) {
        const ssize_t sent = ::send(peer.fileno, from, num_bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent >= 0) return sent;
        if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
        if (errno != EINTR) return -1;
    }
}

void Links::write(Peer &peer, const char *from, size_t num_bytes) {
    double silent_s = 0.0;
    for (auto last = Clock::now(); num_bytes > 0;) {
        const ssize_t sent = is_over_.load() ? -1 : write_some(peer, from, num_bytes);
        if (sent < 0) {
            state_->ranks[peer.rank].is_lost.store(1);
            throw std::runtime_error("a rank of the group is gone");
        }
        from += sent;
        num_bytes -= sent;
        if (sent > 0) {
            silent_s = 0.0;
            last = Clock::now();
            continue;
        }
        pollfd waiting{peer.fileno, POLLOUT, 0};
        ::poll(&waiting, 1, SLICE_MS);
        const auto now = Clock::now();
        const double elapsed_s = std::chrono::duration<double>(now - last).count();
        silent_s += elapsed_s < MOST_COUNTED_S ? elapsed_s : MOST_COUNTED_S;
        last = now;
        if (silent_s > silence_s_) {
            state_->ranks[peer.rank].is_lost.store(1);
            shut();
            throw std::runtime_error("rank " + std::to_string(peer.rank) + " takes nothing for " +
                                     std::to_string(static_cast<int>(silent_s)) + " s");
        }
    }
}

// ---- receiving ----

void Links::receive(Peer &peer) {
    try {
        take(peer);
    } catch (const std::exception &) {
        state_->ranks[peer.rank].is_lost.store(1);
    }
}

// Take what a rank sends, until its connection ends or it sends what none does: always throws.
void Links::take(Peer &peer) {
    char *const memory = reinterpret_cast<char *>(state_);
    Reader reader(peer.fileno, state_->ranks[peer.rank].num_beats);
    std::vector<Extent> extents;
    for (;;) {
        Header header;
        reader.read(&header, sizeof(header));
        const auto kind = static_cast<Kind>(header.kind);
        if (kind > Kind::done || header.num_extents > MOST_EXTENTS || (kind == Kind::posted && peer.rank != 0)) {
            throw std::runtime_error("a message that no rank sends");
        }
        extents.resize(header.num_extents);
        if (!extents.empty()) reader.read(extents.data(), extents.size() * sizeof(Extent));
        for (const Extent &each : extents) {
            // Nothing but buffers and commands is written to, and what is multiplied is bounded before.
            const bool is_small = each.first >= 0 && each.stride >= 0 && each.count >= 0 && each.num_bytes >= 0 &&
                                  each.first <= num_bytes_ && each.stride <= num_bytes_ && each.count <= num_bytes_ &&
                                  each.num_bytes <= num_bytes_;
            if (!is_small || each.first < static_cast<int64_t>(sizeof(GroupState)) ||
                (each.count > 0 && each.first + (each.count - 1) * each.stride + each.num_bytes > num_bytes_)) {
                throw std::runtime_error("a message for places outside the memory");
            }
        }
        for (const Extent &each : extents) {
            for (int64_t row = 0; row < each.count; ++row) {
                reader.read(memory + each.first + row * each.stride, each.num_bytes);
            }
        }
        if (Counter *const counter = counter_of(kind, peer.rank)) advance(*counter, header.value);
    }
}

Counter *Links::counter_of(Kind kind, int rank) {
    switch (kind) {
        case Kind::arrived:
            return &state_->ranks[rank].arrived;
        case Kind::posted:
            return &state_->posted;
        case Kind::done:
            return &state_->ranks[rank].done;
        default:
            return nullptr;
    }
}

}  // namespace quire
