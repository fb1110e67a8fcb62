/* Where the time of an all-reduce in place goes, without Python: float32, sum, ranks as processes.
 *
 *   timing ranks bytes [rounds]
 *
 * A round lasts from when its first rank begins until its last one is through; printed is the quickest one.
 *
 *   all-reduce  as callers get it
 *   meetings    its two, without data
 *   reducing    every rank reduces its slice into all tensors, and meets nobody
 *   bound       every rank reads and writes as many bytes, all of its own tensor
 *   at work     of all cores' time in the all-reduce rounds, what ranks used; the rest they slept or waited for
 *               each other to get a core */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../../src/paceline/comm/csrc/reduce.h"
#include "../../src/paceline/comm/csrc/shm.h"

enum { MOST_RANKS = 64, STAGE = 512 << 10, PAGE = 4096, ROUND_NS = 4000000 };
enum { ALL_REDUCE, MEETINGS, REDUCING, BOUND, CONTENDERS };

typedef struct {
    double began, ended, used;
} span;

static int rank, n_ranks;
static size_t count;
static char *arenas[MOST_RANKS];
static pl_group *group;
static const size_t tensor_at = (size_t)PL_STAGE_TURNS * STAGE;

static double seconds(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static float *tensor_of(int r)
{
    return (float *)(void *)(arenas[r] + tensor_at);
}

static void run(const pl_call *call, void *tensor)
{
    pl_op *op = pl_run(group, call, tensor, tensor, 60);
    if (op == PL_REFUSED)
        exit(1);
    while (op && pl_wait(op, 1) == PL_PENDING)
        ;
    if (op)
        pl_op_free(op);
}

static void meet(void)
{
    const pl_call barrier = {.kind = PL_BARRIER, .type = PL_U8, .factor = 1};
    run(&barrier, NULL);
}

static void reduce_own_slice(void)
{
    const size_t begin = count / (size_t)n_ranks * (size_t)rank, n = count / (size_t)n_ranks;
    void *tensors[MOST_RANKS];
    double factors[MOST_RANKS];
    for (int r = 0; r < n_ranks; r++) {
        tensors[r] = tensor_of(r) + begin;
        factors[r] = 1;
    }
    pl_combine(PL_F32, PL_SUM, (const void *const *)tensors, factors, n_ranks, tensors, n_ranks, n);
}

static void once(int contender)
{
    const pl_call sum = {.kind = PL_ALL_REDUCE, .type = PL_F32, .count = (int64_t)count, .factor = 1};
    float *own = tensor_of(rank);
    switch (contender) {
    case ALL_REDUCE: run(&sum, own); return;
    case MEETINGS: meet(); meet(); return;
    case REDUCING: reduce_own_slice(); return;
    default:
        for (size_t i = 0; i < count; i++)
            own[i] = -own[i];
        __asm__ volatile("" ::: "memory");
    }
}

static span timed(int contender, int repeats)
{
    once(contender);
    meet();
    const double used = seconds(CLOCK_PROCESS_CPUTIME_ID), began = seconds(CLOCK_MONOTONIC);
    for (int i = 0; i < repeats; i++)
        once(contender);
    return (span){began, seconds(CLOCK_MONOTONIC), seconds(CLOCK_PROCESS_CPUTIME_ID) - used};
}

/* Seconds of one run, and how much of all cores' time was used meanwhile. */
static double lasted(const span *spans, int repeats, double *busy)
{
    span all = spans[0];
    for (int r = 1; r < n_ranks; r++) {
        all.began = spans[r].began < all.began ? spans[r].began : all.began;
        all.ended = spans[r].ended > all.ended ? spans[r].ended : all.ended;
        all.used += spans[r].used;
    }
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    *busy = all.used / (all.ended - all.began) / (double)(cores < n_ranks ? cores : n_ranks);
    return (all.ended - all.began) / repeats;
}

int main(int argc, char **argv)
{
    if (argc < 3 || (n_ranks = atoi(argv[1])) < 1 || n_ranks > MOST_RANKS)
        return fprintf(stderr, "timing ranks bytes [rounds]\n"), 2;
    const size_t bytes = (size_t)atoll(argv[2]), odd = 37 * PAGE;
    const size_t arena_bytes = (tensor_at + bytes) / PAGE * PAGE + 2 * PAGE + odd;
    const int rounds = argc > 3 ? atoi(argv[3]) : 50;
    count = bytes / sizeof(float);
    int files[MOST_RANKS], sockets[MOST_RANKS];
    span *spans = mmap(NULL, MOST_RANKS * sizeof *spans, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    void *board = mmap(NULL, pl_board_bytes(n_ranks), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (int r = 0; r < n_ranks; r++) {
        files[r] = memfd_create("timing", 0);
        sockets[r] = -1;
        if (ftruncate(files[r], (off_t)arena_bytes) || pl_reserve(files[r], 0, arena_bytes))
            return perror("memory"), 1;
    }
    while (rank < n_ranks - 1 && fork())
        rank++;
    for (int r = 0; r < n_ranks; r++)
        arenas[r] = pl_map(files[r], arena_bytes);
    const int spins = n_ranks <= sysconf(_SC_NPROCESSORS_ONLN) ? 2000 : 20;
    group = pl_open(rank, n_ranks, board, (void *const *)arenas, arena_bytes, STAGE, sockets, NULL, 0, spins, 0);

    double best[CONTENDERS], busy = 0;
    for (int contender = 0; contender < CONTENDERS; contender++)
        best[contender] = 1e9;
    for (int round = -1; round < rounds; round++) /* the first one says how often to run each */
        for (int contender = 0; contender < CONTENDERS; contender++) {
            const int like = contender == MEETINGS ? MEETINGS : ALL_REDUCE;
            const int fitting = round < 0 ? 1 : (int)(ROUND_NS * 1e-9 / best[like]), repeats = fitting > 1 ? fitting : 1;
            spans[rank] = timed(contender, repeats);
            meet();
            double busy_now;
            const double one = lasted(spans, repeats, &busy_now);
            if (contender == ALL_REDUCE && one < best[contender])
                busy = busy_now;
            best[contender] = one < best[contender] ? one : best[contender];
            meet();
        }
    if (rank == n_ranks - 1) {
        printf("%d ranks, %zu bytes, us: all-reduce %.2f, meetings %.2f, reducing %.2f, bound %.2f (%.0f%%); at work %.0f%%\n",
               n_ranks, bytes, best[ALL_REDUCE] * 1e6, best[MEETINGS] * 1e6, best[REDUCING] * 1e6, best[BOUND] * 1e6,
               100 * best[BOUND] / best[ALL_REDUCE], 100 * busy);
        while (wait(NULL) > 0)
            ;
    }
    pl_close(group);
    pl_free(group);
    return 0;
}
