// Sleeping until a 32-bit word changes, and saying "I am spinning" to the core.
#pragma once

#include <atomic>
#include <stdint.h>
#include <time.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace flint {

static inline void spin_pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb");  // yield is a no-op on most cores; isb waits about as long as x86's pause
#endif
}

static inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

// Returns once *word != expected, after a wake, or spuriously, or after timeout_ns (< 0: no limit).
static inline void park(const std::atomic<uint32_t>* word, uint32_t expected, int64_t timeout_ns = -1) {
#if defined(__linux__)
    timespec limit = {static_cast<time_t>(timeout_ns / 1000000000), static_cast<long>(timeout_ns % 1000000000)};
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, timeout_ns < 0 ? nullptr : &limit, nullptr, 0);
#else
    // No portable wait-on-address: poll, a millisecond at most between looks.
    const timespec nap = {0, timeout_ns >= 0 && timeout_ns < 1000000 ? static_cast<long>(timeout_ns) : 1000000};
    if (word->load(std::memory_order_acquire) == expected) nanosleep(&nap, nullptr);
#endif
}

static inline void unpark_all(const std::atomic<uint32_t>* word) {
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

}  // namespace flint
