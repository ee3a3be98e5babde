// How fast this machine reads memory, measured the way decoding reads it: each thread its share, in kStreams places at a time,
// huge pages.
#include <stdlib.h>
#include <string.h>

#include "flint_cpu.h"

using namespace flint;

namespace {

constexpr int kPieceBytes = 1 << 20;

struct ReadJob {
    const Isa* isa;
    const uint8_t* data;
    int pieces;
    uint64_t checksum[kMaxThreads];
};

void read_job(void* context, Member& member) {
    ReadJob& job = *static_cast<ReadJob*>(context);
    uint64_t sum = 0;
    member.share_runs<kStreams>(job.pieces, [&](const int* pieces, int count) {
        const uint8_t* streams[kStreams];
        for (int i = 0; i < kStreams; ++i) {
            streams[i] = job.data + static_cast<size_t>(pieces[i < count ? i : 0]) * kPieceBytes;
        }
        sum ^= job.isa->read(streams, kPieceBytes);
    });
    job.checksum[member.id()] = sum;  // keeps the reads from being optimised away
}

void touch_job(void* context, Member& member) {
    ReadJob& job = *static_cast<ReadJob*>(context);
    member.share(job.pieces, [&](int piece) {
        memset(const_cast<uint8_t*>(job.data) + static_cast<size_t>(piece) * kPieceBytes, piece + 1, kPieceBytes);
    });
}

}  // namespace

double flint_bandwidth(int threads, size_t bytes, int rounds, const char* isa_name) {
    const Isa* isa = select_isa(isa_name);
    if (!isa || threads < 1 || threads > kMaxThreads || rounds < 1) return 0.0;
    // Whole steps only, so that every byte is read once.
    const int pieces = static_cast<int>(bytes / kPieceBytes) / (kStreams * threads) * kStreams * threads;
    Arena arena;
    if (pieces < 1 || !arena.reserve(bytes, true)) return 0.0;
    ReadJob job{isa, static_cast<const uint8_t*>(arena.take(bytes)), pieces, {}};
    Team team(threads);
    team.run(touch_job, &job);
    int64_t best = INT64_MAX;
    for (int round = 0; round < rounds; ++round) {
        const int64_t begin = now_ns();
        team.run(read_job, &job);
        const int64_t elapsed = now_ns() - begin;
        if (elapsed < best) best = elapsed;
    }
    return static_cast<double>(pieces) * kPieceBytes / (1e-9 * best);
}
