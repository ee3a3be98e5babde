// Starting, waking, meeting and shrinking the team.
#include "team.h"

#include <unistd.h>

namespace flint {

namespace {

// About 20-60 us of pauses (65 cycles each on Zen 3, 140 on Skylake): several times a phase of a small model, so that
// members who are merely a little late never sleep, and short enough to hand the core to a thread that needs it.
constexpr int kBarrierSpins = 1500;
// Between jobs, about the time that Python takes between two steps.
constexpr int kIdleSpins = 4000;

constexpr int64_t kMs = 1000000;
constexpr int64_t kWindow = 120 * kMs;

}  // namespace

Team::Team(int size) : size_(size < 1 ? 1 : size > kMaxThreads ? kMaxThreads : size), active_(size_) {}

Team::~Team() { stop(); }

void Team::start() {
    const pid_t self = getpid();
    if (owner_ != self) {  // the first run, or the first one in a forked child: whatever the parent's threads held is void
        owner_ = self;
        started_ = 0;
        arrived_.store(0);
        sleepers_.store(0);
        waiting_helpers_.store(0);
        generation_.store(0);
        for (auto& set : shares_) {
            for (Share& share : set) share.next.store(0);
        }
    }
    while (started_ < size_ - 1) {
        Helper& helper = helpers_[started_];
        helper.team = this;
        helper.id = started_ + 1;
        helper.seen = ticket_.load();
        if (pthread_create(&helper.thread, nullptr, helper_main, &helper) != 0) break;  // fewer threads, still right
        ++started_;
    }
    if (active_ > started_ + 1) active_ = started_ + 1;
}

void Team::stop() {
    if (started_ > 0 && owner_ == getpid()) {
        publish(0);
        for (int i = 0; i < started_; ++i) pthread_join(helpers_[i].thread, nullptr);
    }
    started_ = 0;
}

void Team::publish(int count) {
    const uint32_t sequence = (ticket_.load(std::memory_order_relaxed) >> 8) + 1;
    ticket_.store(sequence << 8 | static_cast<uint32_t>(count), std::memory_order_seq_cst);
    if (waiting_helpers_.load(std::memory_order_seq_cst) != 0) unpark_all(&ticket_);
}

void Team::run(Job job, void* context, bool steady) {
    if (owner_ != getpid() || started_ < size_ - 1) start();
    const int64_t begin = now_ns();
    if (active_ < size_ && active_ < started_ + 1 && begin >= retry_at_ns_) active_ = started_ + 1;
    job_ = job;
    context_ = context;
    stalled_ns_.store(0, std::memory_order_relaxed);
    if (active_ > 1) publish(active_);
    work_as(0, active_);
    if (steady && size_ > 1) adapt(now_ns() - begin);
}

void Team::work_as(int id, int count) {
    Member member;
    member.team_ = this;
    member.id_ = id;
    member.count_ = count;
    job_(context_, member);
    member.barrier();  // nobody is inside job_ any more, and both sets of counters are clean for the next one
}

void* Team::helper_main(void* argument) {
    Helper* const helper = static_cast<Helper*>(argument);
    Team* const team = helper->team;
    uint32_t seen = helper->seen;
    for (;;) {
        uint32_t ticket = team->ticket_.load(std::memory_order_acquire);
        for (int spins = 0; ticket == seen && spins < kIdleSpins; ++spins) {
            spin_pause();
            ticket = team->ticket_.load(std::memory_order_acquire);
        }
        while (ticket == seen) {
            team->waiting_helpers_.fetch_add(1, std::memory_order_seq_cst);
            if (team->ticket_.load(std::memory_order_seq_cst) == seen) park(&team->ticket_, seen);
            team->waiting_helpers_.fetch_sub(1, std::memory_order_seq_cst);
            ticket = team->ticket_.load(std::memory_order_acquire);
        }
        seen = ticket;
        const int count = static_cast<int>(ticket & 0xff);
        if (count == 0) return nullptr;
        if (helper->id < count) team->work_as(helper->id, count);
    }
}

void Member::barrier(Ahead ahead) {
    Team& team = *team_;
    const uint32_t generation = team.generation_.load(std::memory_order_relaxed);
    // The next phase's counters were last touched in the previous phase, which everybody has left.
    ++phase_;
    team.shares_[phase_ & 1][id_].next.store(0, std::memory_order_relaxed);
    if (count_ == 1) return;
    if (team.arrived_.fetch_add(1, std::memory_order_acq_rel) == count_ - 1) {
        team.arrived_.store(0, std::memory_order_relaxed);
        team.generation_.store(generation + 1, std::memory_order_seq_cst);
        if (team.sleepers_.load(std::memory_order_seq_cst) != 0) unpark_all(&team.generation_);
        return;
    }
    for (int spins = 0; spins < kBarrierSpins; ++spins) {
        if (team.generation_.load(std::memory_order_acquire) != generation) return;
        ahead.empty() ? spin_pause() : ahead.fetch(4);
    }
    const int64_t begin = now_ns();
    team.sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (team.generation_.load(std::memory_order_seq_cst) == generation) park(&team.generation_, generation);
    team.sleepers_.fetch_sub(1, std::memory_order_relaxed);
    team.stalled_ns_.fetch_add(now_ns() - begin, std::memory_order_relaxed);
}

// A member that must sleep at a barrier waits for one that lost its core. Where that costs more than the core brings, a
// smaller team is faster: when a quarter of the members' time was slept away over kWindow, one member rests, for 0.25 s
// at first and up to 4 s while the trouble lasts. A single lost time slice (3 to 25 ms) is not trouble.
void Team::adapt(int64_t elapsed_ns) {
    const int64_t now = now_ns();
    window_ns_ += elapsed_ns * active_;
    window_stalled_ns_ += stalled_ns_.load(std::memory_order_relaxed);
    if (window_ns_ < kWindow * active_) return;
    if (active_ > 1 && window_stalled_ns_ * 4 > window_ns_) {
        back_off_ns_ = back_off_ns_ == 0 ? 250 * kMs : back_off_ns_ < 2000 * kMs ? back_off_ns_ * 2 : 4000 * kMs;
        retry_at_ns_ = now + back_off_ns_;
        --active_;
    } else if (active_ == started_ + 1) {
        back_off_ns_ = 0;
    }
    window_ns_ = window_stalled_ns_ = 0;
}

}  // namespace flint
