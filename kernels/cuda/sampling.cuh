// Turns one row of logits into a token, exactly in the order of engine/sampling.py, on one SM.
//
// Weights are 40-bit fixed point, so that sums do not depend on their order: the same seed gives the same token in every
// run. What top-k and top-p keep is described by a border: every id with a larger logit, and of those with the border's
// own logit the `quota` lowest ids. Borders are found by radix selection, 8 bits at a time.
#pragma once
#include "context.cuh"

constexpr float WEIGHT_ONE = 1099511627776.0f;  // 2^40

struct Border {
    u32 key = 0;  // an ordered() logit; 0 keeps all
    u32 quota = ~0u;
};

struct Sampler {
    const Parameters& p;
    Shared& s;
    float top, scale;  // the largest logit; log2(e) / temperature
    const float* logits;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    __device__ __forceinline__ void sync() const { sync_consumers(); }

    __device__ __forceinline__ u64 weight(u32 key) const {
        return u64(exp2_fast((from_ordered(key) - top) * scale) * WEIGHT_ONE);
    }
    __device__ __forceinline__ u32 key(int id) const {
        return ordered(__uint_as_float(load_word(reinterpret_cast<const u32*>(logits) + id)));
    }

    // Calls `visit(key)` for ids [begin, end) shared over `threads` threads, four loads in flight each.
    template <class Visit>
    __device__ __forceinline__ void each(int begin, int end, int thread, int threads, Visit visit) const {
        for (int i = begin + thread; i < end; i += 4 * threads) {
            u32 k[4];
#pragma unroll
            for (int j = 0; j < 4; j++) k[j] = i + j * threads < end ? key(i + j * threads) : 0;
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (i + j * threads < end) visit(k[j]);
        }
    }

    // The border below which the kept count (or the kept weight) first reaches `want`; within `within`.
    template <bool WEIGHTS>
    __device__ __noinline__ Border select(u64 want, Border within) {
        u32 prefix = 0;
        for (int shift = 24; shift >= 0; shift -= 8) {
            for (int i = threadIdx.x; i < 256; i += CONSUMERS) s.histogram[i] = 0;
            sync();
            const u32 above = shift == 24 ? 0u : ~0u << (shift + 8);
            each(0, VOCAB, threadIdx.x, CONSUMERS, [&](u32 k) {
                if (k > within.key && ((k ^ prefix) & above) == 0)
                    atomicAdd(&s.histogram[k >> shift & 255], WEIGHTS ? weight(k) : 1ull);
            });
            // Of the ids at the enclosing border only `quota` count, whichever they are.
            if (threadIdx.x == 0 && within.key && ((within.key ^ prefix) & above) == 0)
                atomicAdd(&s.histogram[within.key >> shift & 255],
                          within.quota * (WEIGHTS ? weight(within.key) : 1ull));
            sync();
            if (warp == 0) {  // the bin, from the top, in which the running sum reaches `want`
                u64 own = 0;
                for (int i = 0; i < 8; i++) own += s.histogram[255 - lane * 8 - i];
                u64 sum = own;
                for (int o = 1; o < 32; o <<= 1) {
                    const u64 other = __shfl_up_sync(ALL_LANES, sum, o);
                    if (lane >= o) sum += other;
                }
                const u32 reached = __ballot_sync(ALL_LANES, sum >= want);
                if (lane == (reached ? __ffs(reached) - 1 : 31)) {
                    u64 before = sum - own;
                    int bin = 255 - lane * 8;
                    for (int i = 0; i < 7 && before + s.histogram[bin] < want; i++) before += s.histogram[bin--];
                    s.scratch[0] = bin;
                    s.mass[0] = before;
                }
            }
            sync();
            prefix |= u32(s.scratch[0]) << shift;
            want -= min(want, s.mass[0]);
            sync();
        }
        Border border;
        border.key = prefix;
        border.quota = u32(want);
        if constexpr (WEIGHTS) {
            const u64 each_weight = weight(prefix);
            border.quota = each_weight ? u32(max(1ull, (want + each_weight - 1) / each_weight)) : ~0u;
        }
        if (prefix == within.key) border.quota = min(border.quota, within.quota);
        return border;
    }

    // Weight of the kept ids of [begin, end), of which `rank` ids at the border came before; one warp. Counts border ids.
    __device__ __forceinline__ u64 kept(int begin, int end, const Border& border, u64 least, u32& at_border) const {
        u64 sum = 0;
        u32 equal = 0;
        each(begin, end, lane, 32, [&](u32 k) {
            const u64 w = weight(k);
            if (k > border.key && w >= least) sum += w;
            equal += k == border.key;
        });
        for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(ALL_LANES, sum, o);
        at_border = __reduce_add_sync(ALL_LANES, equal);
        return sum;
    }

    // Splits [begin, end) over the warps and finds the one in which the running weight passes the target. First call:
    // the target is u * all. Narrows begin, end, target and rank (border ids before begin).
    __device__ __noinline__ void narrow(int& begin, int& end, u64& target, u32& rank, const Border& border, u64 least,
                                        u32 random, bool whole) {
        const int each_warp = (end - begin + WARPS - 1) / WARPS;
        const int from = min(end, begin + warp * each_warp), to = min(end, from + each_warp);
        u32 equal;
        const u64 sum = kept(from, to, border, least, equal);
        if (lane == 0) s.mass[warp] = sum, s.count[warp] = equal;
        sync();
        if (threadIdx.x == 0) {
            const u64 border_weight = weight(border.key) >= least ? weight(border.key) : 0;
            u64 all = 0, before = 0;
            u32 seen = rank;
            for (int w = 0; w < WARPS; w++) {
                const u32 room = border.quota > seen ? border.quota - seen : 0;
                s.mass[w] += min(room, s.count[w]) * border_weight;
                seen += s.count[w];
                all += s.mass[w];
            }
            if (whole) {  // (random + 1/2) / 2^32 of all
                const u64 twice = 2ull * random + 1;
                target = (__umul64hi(all, twice) << 31) | ((all * twice) >> 33);
            }
            int w = 0;
            seen = rank;
            while (w < WARPS - 1 && before + s.mass[w] <= target) {
                before += s.mass[w];
                seen += s.count[w++];
            }
            s.scratch[0] = w;
            s.scratch[1] = int(seen);
            s.histogram[0] = target - before;
        }
        sync();
        const int w = s.scratch[0];
        rank = u32(s.scratch[1]);
        target = s.histogram[0];
        const int start = min(end, begin + w * each_warp);
        end = min(end, start + each_warp);
        begin = start;
        sync();
    }

    __device__ __forceinline__ int draw(u32 random) {
        Border border;
        if (p.top_k > 0 && p.top_k < VOCAB) border = select<false>(p.top_k, border);
        if (p.top_p < 1.0f) {
            u32 equal;
            const int each_warp = (VOCAB + WARPS - 1) / WARPS;
            const u64 sum = kept(min(VOCAB, warp * each_warp), min(VOCAB, (warp + 1) * each_warp), border, 0, equal);
            if (lane == 0) s.mass[warp] = sum;
            sync();
            u64 all = border.key ? border.quota * weight(border.key) : 0;
            for (int w = 0; w < WARPS; w++) all += s.mass[w];
            sync();
            // top_p as 32-bit fixed point; at least the largest weight is kept.
            const u64 share = u64(double(p.top_p) * 4294967296.0);
            const u64 want = (__umul64hi(all, share) << 32) | ((all * share) >> 32);
            border = select<true>(max(want, 1ull), border);
        }
        const u64 least = u64(p.min_p * WEIGHT_ONE);
        int begin = 0, end = VOCAB;
        u64 target = 0;
        u32 rank = 0;
        narrow(begin, end, target, rank, border, least, random, true);
        narrow(begin, end, target, rank, border, least, random, false);
        int token = begin;
        if (warp == 0) {  // a few hundred ids are left
            u64 before = 0;
            u32 seen = rank;
            bool found = false;
            int last = begin;
            for (int base = begin; base < end && !found; base += 32) {
                const int id = base + lane;
                const u32 k = id < end ? key(id) : 0;
                const bool equal = id < end && k == border.key;
                const u32 equals = __ballot_sync(ALL_LANES, equal);
                const u32 place = seen + __popc(equals & ((1u << lane) - 1));
                u64 w = id < end ? weight(k) : 0;
                if (w < least || !(k > border.key || (equal && place < border.quota))) w = 0;
                u64 sum = w;
                for (int o = 1; o < 32; o <<= 1) {
                    const u64 other = __shfl_up_sync(ALL_LANES, sum, o);
                    if (lane >= o) sum += other;
                }
                const u32 kept_ids = __ballot_sync(ALL_LANES, w > 0);
                if (kept_ids) last = base + 31 - __clz(kept_ids);
                const u32 passed = __ballot_sync(ALL_LANES, w > 0 && before + sum > target);
                found = passed != 0;
                if (found) last = base + __ffs(passed) - 1;
                before += __shfl_sync(ALL_LANES, sum, 31);
                seen += __popc(equals);
            }
            token = last;
        }
        return token;
    }
};

// All consumer threads call this; thread 0 gets the token. Out of line: it must not cost the decode loop registers.
__device__ __noinline__ int draw_token(const Parameters* p, Shared* s, float top, u32 random, const float* logits) {
    Sampler sampler{*p, *s, top, LOG2_E / p->temperature, logits};
    return sampler.draw(random);
}

// First output word of Philox4x32-10 with counter (n, 0, 0, 0) (Salmon et al., SC 2011).
__device__ __forceinline__ u32 philox(u32 n, u64 seed) {
    u32 c0 = n, c1 = 0, c2 = 0, c3 = 0, k0 = u32(seed), k1 = u32(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const u64 a = u64(c0) * 0xD2511F53u, b = u64(c2) * 0xCD9E8D57u;
        c0 = u32(b >> 32) ^ c1 ^ k0, c1 = u32(b);
        c2 = u32(a >> 32) ^ c3 ^ k1, c3 = u32(a);
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return c0;
}
