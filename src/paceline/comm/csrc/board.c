#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "group.h"

/* Between two looks at the deadline and at the peers. */
static const double LOOK_S = 0.05;

enum { FEWEST_SPINS = 20, YIELDS = 20 };

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

struct timespec pl_after(double seconds)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const double bounded = seconds < 1e9 ? seconds : 1e9;
    const int64_t nanoseconds = now.tv_nsec + (int64_t)(bounded * 1e9);
    return (struct timespec){now.tv_sec + nanoseconds / 1000000000, nanoseconds % 1000000000};
}

double pl_seconds_until(const struct timespec *when)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)(when->tv_sec - now.tv_sec) + (double)(when->tv_nsec - now.tv_nsec) * 1e-9;
}

void pl_sleep_on(_Atomic uint32_t *word, uint32_t seen, double seconds, bool across_processes)
{
    if (seconds <= 0)
        return;
    const double bounded = seconds < 3600 ? seconds : 3600;
    const struct timespec limit = {(time_t)bounded, (long)((bounded - (double)(time_t)bounded) * 1e9)};
    const int operation = across_processes ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE;
    syscall(SYS_futex, (uint32_t *)word, operation, seen, &limit, NULL, 0);
}

void pl_wake_all(_Atomic uint32_t *word, bool across_processes)
{
    syscall(SYS_futex, (uint32_t *)word, across_processes ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE, 1 << 30, NULL, NULL, 0);
}

void pl_arrive(pl_group *group)
{
    pl_board *board = group->board;
    const uint32_t phase = ++group->phase;
    atomic_store_explicit(&pl_seat_of(group, group->rank)->phase, phase, memory_order_relaxed);
    if (atomic_fetch_add(&board->arrived, 1) + 1 < (uint32_t)group->size)
        return;
    atomic_store_explicit(&board->arrived, 0, memory_order_relaxed);
    atomic_store(&board->epoch, phase);
    if (atomic_load(&board->sleepers))
        pl_wake_all(&board->epoch, true);
}

static bool all_came(const pl_group *group)
{
    return (int32_t)(atomic_load(&group->board->epoch) - group->phase) >= 0;
}

/* How this rank's last meeting stands. A group that failed stays failed: the counts no longer mean anything
 * from the meeting on that somebody gave up, though the late ones may still bring them to their full number. */
static int standing(const pl_group *group)
{
    const pl_board *board = group->board;
    const uint32_t failure = atomic_load_explicit(&board->failure, memory_order_acquire);
    if (failure && (int32_t)(group->phase - atomic_load(&board->failed_phase)) >= 0)
        return (int)failure;
    return all_came(group) ? PL_OK : PL_PENDING;
}

/* The first rank to give up names the culprits; all others repeat what it said. */
static int give_up(pl_group *group, int status, const bool *culprits)
{
    pl_board *board = group->board;
    uint32_t nobody = 0;
    if (atomic_compare_exchange_strong(&board->accused, &nobody, 1)) {
        for (int r = 0; r < group->size; r++)
            atomic_store(&pl_seat_of(group, r)->culprit, culprits[r]);
        atomic_store(&board->failed_phase, group->phase);
        atomic_store(&board->failure, (uint32_t)status);
        pl_wake_all(&board->epoch, true);
        return status;
    }
    const struct timespec enough = pl_after(1.0); /* it may die in between */
    while (!atomic_load(&board->failure) && pl_seconds_until(&enough) > 0)
        relax();
    return atomic_load(&board->failure) ? (int)atomic_load(&board->failure) : status;
}

/* Whether processes of other ranks are gone: their ends of the sockets closed. */
static bool find_lost(const pl_group *group, bool *lost)
{
    struct pollfd polled[group->size];
    for (int r = 0; r < group->size; r++)
        polled[r] = (struct pollfd){.fd = group->sockets[r], .events = POLLRDHUP};
    bool any = false;
    if (poll(polled, (nfds_t)group->size, 0) <= 0)
        return false;
    for (int r = 0; r < group->size; r++) {
        lost[r] = polled[r].fd >= 0 && polled[r].revents;
        any |= lost[r];
    }
    return any;
}

static int look_around(pl_group *group, const struct timespec *deadline)
{
    bool culprits[group->size];
    for (int r = 0; r < group->size; r++)
        culprits[r] = false;
    const bool lost = find_lost(group, culprits);
    const int status = standing(group);
    if (status != PL_PENDING)
        return status;
    if (lost)
        return give_up(group, PL_LOST, culprits);
    if (pl_seconds_until(deadline) > 0)
        return PL_PENDING;
    for (int r = 0; r < group->size; r++)
        culprits[r] = (int32_t)(atomic_load(&pl_seat_of(group, r)->phase) - group->phase) < 0;
    return give_up(group, PL_TIMED_OUT, culprits);
}

/* Spins for about as long as was of use lately. Where others compete for the cores, spinning only keeps the
 * rank that is waited for from running, so the budget shrinks with every time in vain; now and then the full
 * one is tried again. Then others may have the core a few times: where ranks outnumber cores, one of them is
 * often the rank that is waited for, and comes sooner than a sleeper would be woken. */
static int spin(pl_group *group)
{
    const bool trial = ++group->meetings % 32 == 0;
    const int limit = trial ? group->spins : group->budget;
    for (int i = 0; i < limit; i++) {
        const int status = standing(group);
        if (status != PL_PENDING) {
            const int twice = 2 * i + FEWEST_SPINS, wanted = twice < group->spins ? twice : group->spins;
            group->budget = wanted > group->budget ? wanted : group->budget - (group->budget - wanted) / 16;
            return status;
        }
        relax();
    }
    if (!trial)
        group->budget -= (group->budget - FEWEST_SPINS) / 4;
    for (int i = 0; i < YIELDS; i++) {
        sched_yield();
        const int status = standing(group);
        if (status != PL_PENDING)
            return status;
    }
    return PL_PENDING;
}

int pl_meet(pl_group *group, const struct timespec *deadline, double patience_s)
{
    pl_board *board = group->board;
    const int soon = spin(group);
    if (soon != PL_PENDING)
        return soon;
    const struct timespec patience = pl_after(patience_s < 0 ? 0 : patience_s);
    while (true) {
        const uint32_t epoch = atomic_load(&board->epoch);
        const int now = standing(group);
        if (now != PL_PENDING)
            return now;
        if (atomic_load(&group->closing))
            return PL_CLOSED;
        double nap = pl_seconds_until(deadline);
        nap = nap < LOOK_S ? nap : LOOK_S;
        if (patience_s >= 0) {
            const double left = pl_seconds_until(&patience);
            if (left <= 0)
                return PL_PENDING;
            nap = nap < left ? nap : left;
        }
        atomic_fetch_add(&board->sleepers, 1);
        /* A failure raised between the look above and here is seen one nap later. */
        pl_sleep_on(&board->epoch, epoch, nap, true);
        atomic_fetch_sub(&board->sleepers, 1);
        const int status = look_around(group, deadline);
        if (status != PL_PENDING)
            return status;
    }
}
