// A fixed team of threads that run one function together, phase by phase.
//
// The caller is member 0. Between phases members meet at a barrier: a bounded spin, then sleep. Inside a phase each
// member works through its own contiguous share of the items, so that weights stream, and then helps whoever is
// behind: a thread that lost its core delays a phase by one item, not by its whole share. When the system keeps taking
// cores away the team shrinks for a while (see `adapt`).
#pragma once

#include <atomic>
#include <pthread.h>
#include <stdint.h>
#include <sys/types.h>

#include "park.h"

namespace flint {

constexpr int kMaxThreads = 128;
constexpr int kCacheLine = 64;
constexpr int kLinesBeforeBarrier = 64;  // as many as a core can have under way, twice

class Team;

// What a member reads first in the next phase. Memory is idle while members wait for one another; asking for the first
// weights of the next phase in that time costs nothing.
class Ahead {
  public:
    Ahead() = default;
    Ahead(const uint8_t* first, size_t bytes) : next_(first), end_(first + bytes) {}
    bool empty() const { return next_ >= end_; }
    void fetch(int lines) {
        for (; lines > 0 && next_ < end_; --lines, next_ += kCacheLine) __builtin_prefetch(next_);
    }

  private:
    const uint8_t* next_ = nullptr;
    const uint8_t* end_ = nullptr;
};

// One member's view of the running job.
class Member {
  public:
    int id() const { return id_; }
    int count() const { return count_; }
    bool leads() const { return id_ == 0; }

    // Calls work(item) once for every item in [0, items), spread over the members, and returns when all are done.
    // Every member must call it with the same `items`.
    template <class Work>
    void share(int items, Work&& work, Ahead ahead = Ahead());

    // The same for work on several items at a time: work(indices, count) with count <= kWidth. Each member's share is cut
    // into kWidth runs that advance together, so that it reads kWidth long streams.
    template <int kWidth, class Work>
    void share_runs(int items, Work&& work, Ahead ahead = Ahead());

    // The first of the `items` of a share that are this member's own.
    int first_item(int items) const { return static_cast<int>(static_cast<int64_t>(items) * id_ / count_); }

    void barrier(Ahead ahead = Ahead());

  private:
    friend class Team;
    Team* team_ = nullptr;
    int id_ = 0;
    int count_ = 1;
    uint32_t phase_ = 0;
};

class Team {
  public:
    typedef void (*Job)(void* context, Member& member);

    // Threads start at the first run, and again after a fork (a child inherits the memory but no threads).
    explicit Team(int size);
    ~Team();
    Team(const Team&) = delete;

    int size() const { return size_; }
    int active() const { return active_; }

    // Runs job on all active members and returns when they have finished. One caller at a time. steady: the job is one of
    // many alike whose members have equal work, so that waiting for one another means that others took the cores.
    void run(Job job, void* context, bool steady = false);

    // Ends the threads; a later run starts them again.
    void stop();

  private:
    friend class Member;

    struct alignas(kCacheLine) Share {
        std::atomic<int32_t> next{0};
    };
    struct Helper {
        Team* team;
        int id;
        pthread_t thread;
        uint32_t seen;  // the ticket current when the thread was made
    };

    static void* helper_main(void* argument);
    void start();
    void publish(int count);
    void adapt(int64_t elapsed_ns);
    void work_as(int id, int count);

    const int size_;
    int started_ = 0;  // helpers running
    pid_t owner_ = 0;  // the process they run in
    Helper helpers_[kMaxThreads];

    Job job_ = nullptr;
    void* context_ = nullptr;

    // Ticket of the current job: sequence number << 8 | members taking part (0: exit).
    alignas(kCacheLine) std::atomic<uint32_t> ticket_{0};
    alignas(kCacheLine) std::atomic<uint32_t> waiting_helpers_{0};
    alignas(kCacheLine) std::atomic<int32_t> arrived_{0};
    alignas(kCacheLine) std::atomic<uint32_t> generation_{0};
    alignas(kCacheLine) std::atomic<uint32_t> sleepers_{0};
    alignas(kCacheLine) std::atomic<int64_t> stalled_ns_{0};  // time slept at barriers, all members, this job
    Share shares_[2][kMaxThreads];  // of the current and the next phase

    // Contention control, only touched by member 0.
    int active_;
    int64_t window_ns_ = 0, window_stalled_ns_ = 0;
    int64_t retry_at_ns_ = 0, back_off_ns_ = 0;
};

template <class Work>
void Member::share(int items, Work&& work, Ahead ahead) {
    share_runs<1>(items, [&](const int* item, int) { work(*item); }, ahead);
}

template <int kWidth, class Work>
void Member::share_runs(int items, Work&& work, Ahead ahead) {
    Team::Share* shares = team_->shares_[phase_ & 1];
    for (int turn = 0; turn < count_; ++turn) {
        const int owner = id_ + turn < count_ ? id_ + turn : id_ + turn - count_;
        const int first = static_cast<int>(static_cast<int64_t>(items) * owner / count_);
        const int end = static_cast<int>(static_cast<int64_t>(items) * (owner + 1) / count_);
        const int run = (end - first) / kWidth;  // steps of full width; the items that are left make one more
        const int steps = run + (run * kWidth < end - first ? 1 : 0);
        std::atomic<int32_t>& next = shares[owner].next;
        while (next.load(std::memory_order_relaxed) < steps) {
            const int step = next.fetch_add(1, std::memory_order_relaxed);
            if (step >= steps) break;
            int indices[kWidth] = {};
            int count = kWidth;
            if (step < run) {
                for (int i = 0; i < kWidth; ++i) indices[i] = first + i * run + step;
            } else {
                count = end - first - run * kWidth;
                for (int i = 0; i < count; ++i) indices[i] = first + run * kWidth + i;
            }
            work(static_cast<const int*>(indices), count);
        }
        if (turn == 0 && count_ > 1) ahead.fetch(kLinesBeforeBarrier);
    }
    barrier(ahead);
}

}  // namespace flint
