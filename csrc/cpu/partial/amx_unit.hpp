// Work for the unit that can be done little by little, between other things.
#pragma once

#include "amx_attention.hpp"
#include "amx_tiles.hpp"

namespace quire::QUIRE_ISA {

constexpr int64_t LINE = 64;  // bytes: a row of a tile
constexpr int64_t TILE_BYTES = 16 * LINE;

// One or two tiles of rows times one or two tiles of the other side, over `num_steps` times 32 numbers: what the unit does with
// one set of sums.
struct Job {
    const char *left, *right;       // of the right side, two neighbouring tiles
    int64_t second_left, stride;    // bytes to the second tile of rows; from a row to the next
    int64_t left_step, right_step;  // bytes
    int64_t num_steps;
    float *sums;
    int64_t row;  // of the sums, elements
    bool adds;    // to what is there; else the sums begin with zero
    bool is_tall, is_wide;
};

// The unit's jobs, one after the other, in portions of two products that take turns with rows of the softmax. Where one works
// and then the other for a microsecond each, both lose up to a third of their speed (docs/lab/attention-cpu.md).
// What a job has made is stored when the next one begins: a store that waits for products is in the way of all behind it.
class Unit {
   public:
    Job &add() { return jobs_[num_jobs_++]; }
    int num_portions() const {
        int64_t count = 0;
        for (int j = 0; j < num_jobs_; ++j) count += 2 * jobs_[j].num_steps;
        return static_cast<int>(count);
    }
    QINLINE_MEMBER void advance() {
        if (now_ < num_jobs_) is_half_done_ ? do_second_half() : do_first_half();
    }
    void finish() {
        while (now_ < num_jobs_) advance();
        if (now_ > 0) store_sums(jobs_[now_ - 1]);
        now_ = num_jobs_ = 0;
    }

   private:
    static constexpr int LEFT = 4, RIGHT = 6;  // tiles; the sums are 2 t + p

    QINLINE_MEMBER void do_first_half() {
        const Job &job = jobs_[now_];
        if (step_ == 0) {
            if (now_ > 0) store_sums(jobs_[now_ - 1]);
            begin_sums(job);
        }
        const char *left = job.left + step_ * job.left_step;
        load_tile<LEFT>(left, job.stride);
        stream_tile<RIGHT>(job.right + step_ * job.right_step, LINE);
        add_pairs<0, LEFT, RIGHT>();
        if (job.is_tall) {
            load_tile<LEFT + 1>(left + job.second_left, job.stride);
            add_pairs<2, LEFT + 1, RIGHT>();
        }
        is_half_done_ = true;
    }
    QINLINE_MEMBER void do_second_half() {
        const Job &job = jobs_[now_];
        if (job.is_wide) {
            stream_tile<RIGHT + 1>(job.right + step_ * job.right_step + TILE_BYTES, LINE);
            add_pairs<1, LEFT, RIGHT + 1>();
            if (job.is_tall) add_pairs<3, LEFT + 1, RIGHT + 1>();
        }
        is_half_done_ = false;
        if (++step_ == job.num_steps) step_ = 0, ++now_;
    }
    QINLINE_MEMBER void begin_sums(const Job &job) const {
        if (!job.adds) return zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
        const int64_t stride = job.row * int64_t{sizeof(float)};
        load_tile<0>(job.sums, stride);
        if (job.is_wide) load_tile<1>(job.sums + 16, stride);
        if (!job.is_tall) return;
        load_tile<2>(job.sums + ROWS * job.row, stride);
        if (job.is_wide) load_tile<3>(job.sums + ROWS * job.row + 16, stride);
    }
    QINLINE_MEMBER void store_sums(const Job &job) const {
        const int64_t stride = job.row * int64_t{sizeof(float)};
        store_tile<0>(job.sums, stride);
        if (job.is_wide) store_tile<1>(job.sums + 16, stride);
        if (!job.is_tall) return;
        store_tile<2>(job.sums + ROWS * job.row, stride);
        if (job.is_wide) store_tile<3>(job.sums + ROWS * job.row + 16, stride);
    }

    Job jobs_[TILE / PAIRED + MAX_HEAD_SIZE / PAIRED];
    int num_jobs_ = 0, now_ = 0;
    int64_t step_ = 0;
    bool is_half_done_ = false;
};

}  // namespace quire::QUIRE_ISA
