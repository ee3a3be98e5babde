// From the last layer to the next token: logits, the largest of them over all SMs, the draw, and word to the host.
#pragma once
#include "merge.cuh"
#include "sampling.cuh"

// A candidate word: | ordered logit : 32 | ~id : 20 | stop : 1 | token epoch : 11 |, so that the largest word is the largest
// logit and, among equals, the lowest id.
static_assert(VOCAB < 1 << 20, "ids have 20 bits");
constexpr u64 CANDIDATE_TAG = 0x7ff, CANDIDATE_STOP = 0x800;

__device__ __forceinline__ u64 candidate(float logit, int id) {
    return u64(ordered(logit)) << 32 | u64(~u32(id) & 0xfffff) << 12;
}
__device__ __forceinline__ int candidate_id(u64 word) { return int(~u32(word >> 12) & 0xfffff); }

__device__ __forceinline__ u64 warp_largest(u64 v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) {
        const u64 other = __shfl_xor_sync(ALL_LANES, v, o);
        v = other > v ? other : v;
    }
    return v;
}

struct Largest {
    u64 word;
    bool stop;  // the first SM was asked to end the reply
};

// Whether the host wants the reply to end; for the first warp, behind which the producer may look again.
__device__ __forceinline__ bool asked_to_stop(const Shared& s) { return *const_cast<const volatile u32*>(&s.stop_asked); }

// One warp speaks and listens for its SM: publishes its best candidate in words[SM] and returns the largest of all SMs',
// after which what they stored before is visible. tag: of the step. stop: of the first SM, see asked_to_stop.
__device__ __forceinline__ Largest largest_of_all(u64* words, u64 best, u64 tag, bool stop_asked) {
    const int sm = blockIdx.x, lane = threadIdx.x % 32;
    if (lane == 0) {
        __threadfence();  // logits, and keys and values for the bulk copies of the next token
        store_word64(words + sm, best | (sm == 0 && stop_asked ? CANDIDATE_STOP : 0) | tag);
    }
    // Every lane's loads are under way at once: one after the other, each is a trip to the L2 cache.
    constexpr int LOADS = (SMS + 31) / 32;
    u64 w[LOADS], largest = 0;
    Watchdog watchdog;
    while (true) {
        bool ready = true;
#pragma unroll
        for (int i = 0; i < LOADS; i++) w[i] = load_word64(words + min(lane + 32 * i, SMS - 1));
#pragma unroll
        for (int i = 0; i < LOADS; i++) ready &= (w[i] & CANDIDATE_TAG) == tag;
        if (ready) break;
        watchdog.tick(WAIT_TOKEN);
    }
    const u64 stop = w[0] & CANDIDATE_STOP;  // lane 0's has the first SM's
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        const u64 mine = w[i] & ~(CANDIDATE_TAG | CANDIDATE_STOP);
        largest = mine > largest ? mine : largest;
    }
    largest = warp_largest(largest);
    if (lane == 0) __threadfence();
    return {largest, stop != 0};
}

// The repeat penalty's window, as counts over this SM's rows of the head.
struct Window {
    __device__ static void add(const Context& c, int id, int by) {
        const int row = id - c.tiles.first[Head::INDEX] * TILE_ROWS;
        if (row >= 0 && row < c.tiles.count[Head::INDEX] * TILE_ROWS) atomicAdd(&c.s.seen[row], u32(by));
    }
    __device__ static void open(const Context& c) {
        for (int i = threadIdx.x; i < SEEN_ROWS; i += CONSUMERS) c.s.seen[i] = 0;
        c.sync();
        for (int i = threadIdx.x; i < c.p.window_count; i += CONSUMERS) add(c, __ldg(c.p.window_ids + i), 1);
        c.sync();
    }
    // After produced token `index`; one thread.
    __device__ static void slide(const Context& c, int index, int token) {
        add(c, token, 1);
        const int leaving = c.p.window_count + index - c.p.window;
        if (leaving < 0) return;
        add(c, leaving < c.p.window_count ? __ldg(c.p.window_ids + leaving)
                                          : int(load_word(reinterpret_cast<u32*>(c.p.ids) + leaving - c.p.window_count)),
            -1);
    }
};

// Logits of this SM's rows. Returns the thread's best candidate, of its column (finish_tiles).
__device__ __forceinline__ u64 run_head(Context& c, Profile& profile, u32 layers) {
    u64 best = 0;
    const Epoch epoch(layers);
    float* const factor = c.s.factor[NORM_HEAD];
    const u32* const hop = c.copy();
    run_phase<Head>(
        c, profile, 20, epoch, [] {},
        [&](int) {
            stage_packets<Head, true>(c, hop + HOP_HIDDEN, hop + HOP_HIDDEN_SQUARES, factor, epoch, 0, WAIT_HIDDEN);
        },
        [&](int tile, Place place, float2 sums) {
#pragma unroll
            for (int upper = 0; upper < 2; upper++) {
                const int row_in_sm = tile * TILE_ROWS + c.lane / 4 + upper * 8, column = place.column;
                const int row = c.tiles.first[Head::INDEX] * TILE_ROWS + row_in_sm;
                if (place.replica != upper % REPLICAS || row >= VOCAB) continue;
                float logit = (upper ? sums.y : sums.x) * factor[column] * (1.0f / LOGITS_SCALING);
                if (c.p.mode != STEP) {
                    if (c.p.repeat_penalty != 1.0f && c.s.seen[row_in_sm])
                        logit = logit > 0.0f ? logit / c.p.repeat_penalty : logit * c.p.repeat_penalty;
                    const u64 mine = candidate(logit, row);
                    best = mine > best ? mine : best;
                }
                if (c.p.logits && (COLUMNS == 1 || column <= c.s.step.drafted))
                    c.p.logits[size_t(column) * VOCAB + row] = logit;
            }
        });
    return best;
}

// All SMs agree on the next token. Returns it, and whether it is the last one.
__device__ __forceinline__ int choose(Context& c, Profile& profile, u64 best, int index, bool& last) {
    const Parameters& p = c.p;
    u64* const words = reinterpret_cast<u64*>(p.scratch + HOP_CANDIDATES);
    const u64 tag = u64(index + 1) & CANDIDATE_TAG;
    best = warp_largest(best);
    if (c.lane == 0) c.s.best[c.warp] = best;
    c.sync();
    if (c.warp == 0) {
        best = warp_largest(c.lane < WARPS ? c.s.best[c.lane] : 0);
        const Largest all = largest_of_all(words, best, tag, c.lane == 0 && asked_to_stop(c.s));
        if (c.lane == 0) {
            c.s.token = candidate_id(all.word);
            c.s.top = from_ordered(u32(all.word >> 32));
            c.s.asked_to_end = all.stop;
        }
    }
    c.sync();
    if (p.mode == SAMPLE) {
        u64* const chosen = reinterpret_cast<u64*>(p.scratch + HOP_TOKEN);
        if (c.sm == 0) {
            const int token = draw_token(&p, &c.s, c.s.top, philox(u32(p.draw_index + index), p.seed), p.logits);
            if (threadIdx.x == 0) store_word64(chosen, tag << 32 | u32(token));
        }
        if (threadIdx.x == 0) {
            Watchdog watchdog;
            u64 w;
            while (((w = load_word64(chosen)) >> 32) != tag) watchdog.tick(WAIT_TOKEN);
            c.s.token = int(u32(w));
        }
        c.sync();
    }
    const int token = c.s.token;
    last = c.s.asked_to_end || index + 1 >= p.max_tokens;
    for (int i = 0; i < p.stop_count; i++) last |= __ldg(p.stop_ids + i) == token;
    if (threadIdx.x == 0) {
        if (p.repeat_penalty != 1.0f) Window::slide(c, index, token);
        c.s.stop = last;
        // The next token's keys may be fetched: what other SMs stored is visible, also to the copy engine.
        fence_for_copies();
        barrier_arrive(&c.s.ring.go);
    }
    if (c.sm == 0 && threadIdx.x == 32) {
        store_word(reinterpret_cast<u32*>(p.ids) + index, u32(token));
        const u64 now = nanoseconds();
        store_for_host(p.host_tokens + index, u32(token), u32(index + 1), u32(now), u32(now >> 32));
    }
    profile.stamp(25);
    return token;
}
