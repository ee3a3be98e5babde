// Speculation inside the loop: drafts by prompt lookup, one pass over all columns to verify them, as many tokens a step as
// the target agrees with. No host round trip, and no hop beyond those that choosing a token takes anyway.
//
//     step:  column      0        1        2       ...      the history: | prompt ......... | produced ....... newest |
//            fed      newest   draft 1  draft 2    ...
//            choice     a        b        c        ...      kept: a, and b if a is draft 1, and c if b is draft 2, ...
//
// Every SM keeps the history up to date and looks up the same draft in it, so drafts never travel. A draft is what
// followed the longest earlier occurrence of the history's end, the latest among equals (Saxena 2023): the rule of
// engine/drafting/ngram.py, except that any number of occurrences is compared and that a short match, too, may fill all
// columns, which cost the same with a draft or without one.
//
// The choice after a column is single pass' own: the largest logit, or the draw with the index that the token would have
// there. So the output is single pass', token by token, and a rejected column leaves nothing behind: its keys and values
// lie where the next step writes.
#pragma once
#include "head.cuh"

static_assert(MOST_MATCH == 32, "a warp loads the end of the history");
constexpr int LOADS_AT_ONCE = 8;  // of a comparison; a second round of loads costs as much as all of the first

// A host entry: | match : 12 | id : 20 |, | tokens of the same step still to come : 4 | accepted : 4 | drafted : 4 |
// 1 + index : 20 |, the clock. match: tokens in common where the step's drafts were found; 0: a drafter learned them.
__device__ __forceinline__ u32 host_entry(int index, int drafted, int accepted, int left) {
    return u32(index + 1) | u32(drafted) << 20 | u32(accepted) << 24 | u32(left) << 28;
}

// What each step of the loop begins with: nothing is in flight.
struct Speculation {
    const Parameters& p;
    Shared& s;
    const int sm = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    __device__ __forceinline__ const u32* history() const { return reinterpret_cast<const u32*>(p.ids); }
    __device__ __forceinline__ int known() const { return p.draw_index + s.step.produced; }
    // Whether a learned drafter follows the tokens, and drafts where the lookup does not.
    __device__ __forceinline__ bool learned() const {
#ifdef DRAFTER
        return p.learned;
#else
        return false;
#endif
    }
    __device__ __forceinline__ int most_drafts() const {  // of the next step
        return max(0, min(min(p.most_drafts, COLUMNS - 1), p.max_tokens - s.step.produced - 1));
    }
    // The next step's keys may be fetched: what other SMs stored is visible, also to the copy engine. One thread.
    __device__ __forceinline__ void let_producer_go_on() const {
        fence_for_copies();
        barrier_arrive(&s.ring.go);
    }

    // Tokens in common, walking back, of the whole history and of the history up to and with `end`.
    __device__ __forceinline__ int match(int end) const {
        for (int length = 0; length < MOST_MATCH; length += LOADS_AT_ONCE) {
            u32 w[LOADS_AT_ONCE];
#pragma unroll
            for (int i = 0; i < LOADS_AT_ONCE; i++) w[i] = load_word(history() + max(end - length - i, 0));
#pragma unroll
            for (int i = 0; i < LOADS_AT_ONCE; i++)
                if (end - length - i < 0 || w[i] != s.suffix[length + i]) return length + i;
        }
        return MOST_MATCH;
    }

    // Sets the next step's tokens: the newest one, its drafts, and the newest again in columns that nobody will look at.
    __device__ __forceinline__ void propose() const {
        const int count = known();
        if (warp == 0) s.suffix[lane] = load_word(history() + max(count - 1 - lane, 0));
        sync_consumers();
        const u32 newest = s.suffix[0];
        int length = 0, end = 0;
        // Four ends at a time, the latest ones first; the last token itself is no earlier occurrence.
        for (int group = (count - 2) / 4 - int(threadIdx.x); group >= 0 && length < MOST_MATCH; group -= CONSUMERS) {
            const uint4 four = load_words4(history() + group * 4);
            const u32 ids[4] = {four.x, four.y, four.z, four.w};
#pragma unroll 1
            for (int i = 3; i >= 0; i--) {
                const u32 id = i == 3 ? ids[3] : i == 2 ? ids[2] : i == 1 ? ids[1] : ids[0];
                if (group * 4 + i > count - 2 || id != newest) continue;
                const int found = match(group * 4 + i);
                if (found > length) length = found, end = group * 4 + i;
            }
        }
        const u64 best = warp_largest(u64(length) << 32 | u32(end));
        if (lane == 0) s.best[warp] = best;
        sync_consumers();
        if (warp == 0) {
            const u64 longest = warp_largest(lane < WARPS ? s.best[lane] : 0);
            const int start = int(u32(longest)) + 1;
            const int limit = most_drafts();
            int drafted = int(longest >> 32) >= max(p.least_match, 1) ? limit : 0;
            u32 token = newest;
            // Past the end the copy reads itself, as LZ77's does.
            if (lane > 0 && lane <= drafted) token = load_word(history() + start + (lane - 1) % (count - start));
#ifdef FORCED_ACCEPTANCE
            drafted = learned() ? 0 : limit;
#endif
            if (lane < COLUMNS) s.step.tokens[lane] = int(token);
            if (lane == 0) s.step.drafted = drafted, s.step.match = int(longest >> 32);
        }
        sync_consumers();
    }

    // All SMs agree on the largest logit of each column that holds a token. best: this thread's candidate, of its column. A
    // warp speaks, and listens, for one column.
    __device__ __forceinline__ void agree(u64 best, int columns, u64 tag) const {
#pragma unroll
        for (int o = SIDE; o < 32; o <<= 1) {
            const u64 other = __shfl_xor_sync(ALL_LANES, best, o);
            best = other > best ? other : best;
        }
        if (lane < SIDE) s.best[warp * SIDE + lane] = best;
        sync_consumers();
        if (warp < columns) {
            const int of = lane * TURNS + warp / SIDE;  // a warp that had this column
            best = warp_largest(of < WARPS ? s.best[of * SIDE + warp % SIDE] : 0);
            const Largest all = largest_of_all(p.candidates + warp * SMS, best, tag, threadIdx.x == 0 && asked_to_stop(s));
            if (lane == 0) {
                s.step.choice[warp] = candidate_id(all.word);
                s.step.top[warp] = from_ordered(u32(all.word >> 32));
                if (warp == 0) s.asked_to_end = all.stop;
            }
        }
        sync_consumers();
    }

    // Each column's draw on an SM of its own: it is the one that single pass would make, if its drafts hold.
    __device__ __forceinline__ void draw(int columns, u64 tag) const {
        u64* const drawn = p.candidates + COLUMNS * SMS;
        for (int column = sm; column < columns; column += SMS) {
            const u32 random = philox(u32(known() + column), p.seed);
            const int token = draw_token(&p, &s, s.step.top[column], random, p.logits + size_t(column) * VOCAB);
            if (threadIdx.x == 0) store_word64(drawn + column, tag << 32 | u32(token));
        }
        if (int(threadIdx.x) < columns) {
            Watchdog watchdog;
            u64 w;
            while (((w = load_word64(drawn + threadIdx.x)) >> 32) != tag) watchdog.tick(WAIT_TOKEN);
            s.step.choice[threadIdx.x] = int(u32(w));
        }
        sync_consumers();
    }

    // Keeps the choices up to the first that is not its draft, or that ends the reply. The first warp calls this.
    __device__ __forceinline__ void accept() const {
        const int drafted = s.step.drafted;
        const int choice = s.step.choice[min(lane, drafted)];
        bool ends = false;
        for (int i = 0; i < p.stop_count; i++) ends |= __ldg(p.stop_ids + i) == choice;
        const u32 differ = __ballot_sync(ALL_LANES, lane >= drafted || choice != s.step.tokens[min(lane + 1, drafted)]);
        int accepted = __ffs(differ) - 1;
#ifdef FORCED_ACCEPTANCE
        const int sixteenths = p.forced_sixteenths, steps = s.step.count;
        accepted = min(drafted, (steps + 1) * sixteenths / 16 - steps * sixteenths / 16);
#endif
        const u32 ending = __ballot_sync(ALL_LANES, lane <= accepted && ends);
        const int kept = ending ? __ffs(ending) : accepted + 1;
        accepted = min(accepted, kept);
        const int produced = s.step.produced, at = known();
        // Each SM writes the history that it will read; all of them write the same.
        if (lane < kept) store_word(reinterpret_cast<u32*>(p.ids) + at + lane, u32(choice));
        const u64 now = __shfl_sync(ALL_LANES, nanoseconds(), 0);  // one step, one stamp
        if (sm == 0 && lane < kept)
            store_for_host(p.host_tokens + produced + lane, u32(choice) | u32(s.step.match) << 20,
                           host_entry(produced + lane, drafted, accepted, kept - 1 - lane), u32(now), u32(now >> 32));
        __syncwarp();
        if (lane == 0) {
            s.step.produced = produced + kept;
            s.step.position += kept;
            s.step.count++;
            s.stop = s.asked_to_end || ending || produced + kept >= p.max_tokens;
#ifdef DRAFTER
            s.draft.kept = kept;
#endif
            if (!learned()) let_producer_go_on();
        }
    }
};

#ifdef DRAFTER
// What a learned drafter reads of this SM's rows in every step; all consumers.
__device__ __forceinline__ void open_drafter(const Parameters& p, Shared& s) {
    const SmTiles& tiles = s.draft.tiles;
    for (int i = threadIdx.x; i < tiles.count[DHead::INDEX] * TILE_ROWS; i += CONSUMERS)
        s.draft.target_ids[i] = __ldg(p.draft_ids + min(tiles.first[DHead::INDEX] * TILE_ROWS + i, D_VOCAB - 1));
    for (int norm = 0; norm <= NORM_FINAL; norm++)
        for (int i = threadIdx.x; i < owned_rows(tiles); i += CONSUMERS)
            s.draft.norm_weight[norm][i] = __ldg(p.draft_norms + norm * HIDDEN + owned_row(tiles, i));
}
#endif

// Before the first step, or the only one, whose tokens are given; all consumers.
__device__ __noinline__ void begin_steps(const Parameters* p, Shared* s) {
    if (threadIdx.x == 0) {
        s->step.position = p->position, s->step.produced = s->step.count = 0;
        s->step.drafted = p->columns - 1;
    }
    if (threadIdx.x < COLUMNS) s->step.tokens[threadIdx.x] = p->tokens[threadIdx.x];
#ifdef DRAFTER
    if (p->learned) open_drafter(*p, *s);
#endif
    sync_consumers();
    if (p->mode != STEP) Speculation{*p, *s}.propose();
}

// After a pass over s->step's tokens: what is kept of them, and the next step's. Returns whether that was the last one.
// Out of line: it must not cost the layers registers.
__device__ __noinline__ bool end_step(const Parameters* p, Shared* s, u64 best) {
    static_assert(WARPS % COLUMNS == 0, "a warp's candidates are of one column");
    const Speculation speculation{*p, *s};
    const int columns = s->step.drafted + 1;
    const u64 tag = u64(s->step.count + 1) & CANDIDATE_TAG;
    speculation.agree(best, columns, tag);
    if (p->mode == SAMPLE) speculation.draw(columns, tag);
    if (threadIdx.x < 32) speculation.accept();
    sync_consumers();
    if (!s->stop) speculation.propose();
#ifdef DRAFTER
    if (p->learned && threadIdx.x == 0) {
        // At least once, so that the drafter has seen every token that the target has.
        s->draft.passes = s->stop || s->step.drafted > 0 ? 1 : max(1, speculation.most_drafts());
        speculation.let_producer_go_on();
    }
    sync_consumers();
#endif
    return s->stop;
}
