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

class Team;

// One member's view of the running job.
class Member {
  public:
    int id() const { return id_; }
    int count() const { return count_; }
    bool leads() const { return id_ == 0; }

    // Calls work(item) once for every item in [0, items), spread over the members, and returns when all are done.
    // Every member must call it with the same `items`. ahead() runs between a member's own work and the wait.
    template <class Work, class Ahead>
    void share(int items, Work&& work, Ahead&& ahead);
    template <class Work>
    void share(int items, Work&& work) {
        share(items, work, [] {});
    }

    void barrier();

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

    // Runs job on all active members and returns when they have finished. One caller at a time.
    void run(Job job, void* context);

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

template <class Work, class Ahead>
void Member::share(int items, Work&& work, Ahead&& ahead) {
    if (count_ == 1) {
        for (int item = 0; item < items; ++item) work(item);
        return;
    }
    Team::Share* shares = team_->shares_[phase_ & 1];
    for (int turn = 0; turn < count_; ++turn) {
        const int owner = id_ + turn < count_ ? id_ + turn : id_ + turn - count_;
        const int first = static_cast<int>(static_cast<int64_t>(items) * owner / count_);
        const int end = static_cast<int>(static_cast<int64_t>(items) * (owner + 1) / count_);
        std::atomic<int32_t>& next = shares[owner].next;
        while (next.load(std::memory_order_relaxed) < end - first) {
            const int item = first + next.fetch_add(1, std::memory_order_relaxed);
            if (item >= end) break;
            work(item);
        }
        if (turn == 0) ahead();
    }
    barrier();
}

}  // namespace flint
