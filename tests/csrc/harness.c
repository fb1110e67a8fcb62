/* Runs the kernel with threads as ranks, so that sanitizers see all of them.
 *
 *   harness [ranks] [collectives] [seed]
 *
 * Random collectives, sizes, types and places, each result compared with plain loops; submitted in bursts
 * and one by one, waited for in and out of order. Then what must fail: calls that differ, a rank that does
 * not come, one that is gone, a group closed with work in flight. */
#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../../src/paceline/comm/csrc/reduce.h"
#include "../../src/paceline/comm/csrc/shm.h"

enum { MOST_RANKS = 16, STAGE = 8192, ARENA = 1 << 20, LARGEST = 9000, BURST = 4 };

static int n_ranks = 4, n_collectives = 400;
static unsigned first_seed = 1;
static void *board;
static char *arenas[MOST_RANKS];
static int ends[MOST_RANKS][MOST_RANKS]; /* ends[a][b]: a's end of its connection with b */
static pthread_barrier_t together;

#define CHECK(condition, ...)                                              \
    do {                                                                   \
        if (!(condition)) {                                                \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            fprintf(stderr, __VA_ARGS__);                                  \
            fputc('\n', stderr);                                           \
            exit(1);                                                       \
        }                                                                  \
    } while (0)

static unsigned next_random(unsigned *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

/* What rank `rank` puts in element i of collective `number`: small whole numbers, exact in every type. */
static int value_of(int rank, int number, size_t i)
{
    return (int)((rank * 7u + (unsigned)number * 3u + i) % 4u);
}

static void put(int type, void *at, size_t i, double value)
{
    switch (type) {
    case PL_F32: ((float *)at)[i] = (float)value; return;
    case PL_F64: ((double *)at)[i] = value; return;
    case PL_I32: ((int32_t *)at)[i] = (int32_t)value; return;
    case PL_U8: ((uint8_t *)at)[i] = (uint8_t)value; return;
    case PL_I64: ((int64_t *)at)[i] = (int64_t)value; return;
    case PL_BF16: {
        float wide = (float)value;
        uint32_t bits;
        memcpy(&bits, &wide, 4);
        ((uint16_t *)at)[i] = (uint16_t)(bits >> 16);
        return;
    }
    }
}

static double got(int type, const void *at, size_t i)
{
    switch (type) {
    case PL_F32: return ((const float *)at)[i];
    case PL_F64: return ((const double *)at)[i];
    case PL_I32: return ((const int32_t *)at)[i];
    case PL_U8: return ((const uint8_t *)at)[i];
    case PL_I64: return (double)((const int64_t *)at)[i];
    default: {
        uint32_t bits = (uint32_t)((const uint16_t *)at)[i] << 16;
        float wide;
        memcpy(&wide, &bits, 4);
        return wide;
    }
    }
}

static double reduced(int reduction, int number, size_t i)
{
    double all = value_of(0, number, i);
    for (int r = 1; r < n_ranks; r++) {
        const double x = value_of(r, number, i);
        all = reduction == PL_SUM ? all + x : reduction == PL_PRODUCT ? all * x : reduction == PL_MIN ? fmin(all, x) : fmax(all, x);
    }
    return all;
}

typedef struct {
    pl_call call;
    pl_op *op;
    char *in, *out;
    void *owned_in, *owned_out;
    int number;
} task;

static size_t parts(int kind, bool out)
{
    if (kind == PL_BARRIER || kind == PL_ELSEWHERE)
        return 0;
    if (out)
        return kind == PL_ALL_GATHER || kind == PL_ALL_TO_ALL ? (size_t)n_ranks : 1;
    return kind == PL_REDUCE_SCATTER || kind == PL_ALL_TO_ALL ? (size_t)n_ranks : 1;
}

/* The same on all ranks but for the place, which is each rank's own affair. */
static void prepare(task *t, int rank, int number, unsigned *shared, unsigned *own, size_t *used)
{
    static const int types[] = {PL_F32, PL_F64, PL_I32, PL_U8, PL_I64, PL_BF16};
    static const int reductions[] = {PL_SUM, PL_PRODUCT, PL_MIN, PL_MAX};
    memset(t, 0, sizeof *t);
    t->number = number;
    t->call.kind = (int)(next_random(shared) % 8);
    t->call.type = t->call.label = types[next_random(shared) % 6];
    t->call.reduction = reductions[next_random(shared) % 4];
    t->call.root = (int)(next_random(shared) % (unsigned)n_ranks);
    t->call.count = t->call.kind == PL_BARRIER ? 0 : next_random(shared) % LARGEST;
    if (next_random(shared) % 2)
        t->call.count %= 64;
    t->call.factor = 1;
    t->call.place = PL_NOWHERE;
    const size_t element = pl_size_of(t->call.type), count = (size_t)t->call.count;
    const size_t in_bytes = parts(t->call.kind, false) * count * element;
    const size_t out_bytes = parts(t->call.kind, true) * count * element;
    if (next_random(own) % 2 && *used + in_bytes + 64 <= ARENA) {
        t->call.place = (int64_t)*used;
        t->in = arenas[rank] + *used;
        *used += (in_bytes + 63) / 64 * 64;
    } else
        t->in = t->owned_in = malloc(in_bytes + 1);
    const bool in_place = t->call.kind == PL_ALL_REDUCE || t->call.kind == PL_REDUCE || t->call.kind == PL_BROADCAST;
    t->out = in_place ? t->in : (t->owned_out = malloc(out_bytes + 1));
    for (size_t i = 0; i < parts(t->call.kind, false) * count; i++)
        put(t->call.type, t->in, i, value_of(rank, number, i));
}

static void verify(const task *t, int rank)
{
    const size_t count = (size_t)t->call.count;
    for (size_t i = 0; i < parts(t->call.kind, true) * count; i++) {
        double want;
        switch (t->call.kind) {
        case PL_ALL_REDUCE: want = reduced(t->call.reduction, t->number, i); break;
        case PL_REDUCE:
            want = rank == t->call.root ? reduced(t->call.reduction, t->number, i) : value_of(rank, t->number, i);
            break;
        case PL_BROADCAST: want = value_of(t->call.root, t->number, i); break;
        case PL_ALL_GATHER: want = value_of((int)(i / count), t->number, i % count); break;
        case PL_REDUCE_SCATTER: want = reduced(t->call.reduction, t->number, i + (size_t)rank * count); break;
        default: want = value_of((int)(i / count), t->number, i % count + (size_t)rank * count);
        }
        const double is = got(t->call.type, t->out, i);
        CHECK(is == want, "rank %d, collective %d of kind %d, type %d, count %zu, element %zu: %g, not %g", rank,
              t->number, t->call.kind, t->call.type, count, i, is, want);
    }
}

static int finish(pl_op *op)
{
    int status;
    while ((status = pl_wait(op, 0.05)) == PL_PENDING)
        ;
    return status;
}

static pl_group *join(int rank)
{
    void *mapped[MOST_RANKS];
    for (int r = 0; r < n_ranks; r++)
        mapped[r] = arenas[r];
    pl_group *group = pl_open(rank, n_ranks, board, mapped, ARENA, STAGE, ends[rank], NULL, 0, rank % 2 ? 100 : 0,
                              rank % 3);
    CHECK(group, "rank %d", rank);
    return group;
}

static void leave(pl_group *group)
{
    pl_close(group);
    pl_free(group);
}

enum { LATER, AT_ONCE, BY_CALLER };

/* NULL when it is done already. */
static pl_op *begin(pl_group *group, const task *t, unsigned how)
{
    pl_op *op = NULL;
    if (how != BY_CALLER)
        op = pl_submit(group, &t->call, t->in, t->out, 60, how == AT_ONCE);
    else if (!(op = pl_run(group, &t->call, t->in, t->out, 60)))
        return NULL;
    CHECK(op && op != PL_REFUSED, "collective %d", t->number);
    return op;
}

static void *random_collectives(void *argument)
{
    const int rank = (int)(intptr_t)argument;
    unsigned shared = first_seed, own = first_seed * 31u + (unsigned)rank;
    pl_group *group = join(rank);
    for (int number = 0; number < n_collectives;) {
        task burst[BURST];
        const int n = 1 + (int)(next_random(&shared) % BURST);
        size_t used = PL_STAGE_TURNS * STAGE;
        for (int i = 0; i < n; i++) {
            prepare(&burst[i], rank, number++, &shared, &own, &used);
            burst[i].op = begin(group, &burst[i], next_random(&own) % 3);
        }
        const bool backwards = next_random(&own) % 2;
        for (int k = 0; k < n; k++) {
            task *t = &burst[backwards ? n - 1 - k : k];
            const int status = t->op ? finish(t->op) : PL_OK;
            CHECK(status == PL_OK, "rank %d, collective %d: status %d", rank, t->number, status);
            verify(t, rank);
            if (t->op)
                pl_op_free(t->op);
            free(t->owned_in);
            free(t->owned_out);
        }
    }
    leave(group);
    return NULL;
}

static void *different_calls(void *argument)
{
    const int rank = (int)(intptr_t)argument;
    pl_group *group = join(rank);
    float value = 1;
    pl_call call = {.kind = PL_ALL_REDUCE, .type = PL_F32, .count = 1, .place = PL_NOWHERE, .factor = 1};
    call.root = rank == n_ranks - 1; /* the last rank means another one */
    pl_op *op = pl_submit(group, &call, &value, &value, 60, 1);
    CHECK(finish(op) == PL_MISMATCH, "rank %d", rank);
    pl_call said[MOST_RANKS];
    pl_calls(op, said);
    CHECK(said[n_ranks - 1].root == 1 && said[0].root == 0, "rank %d", rank);
    pl_op_free(op);
    call.root = 0;
    op = pl_submit(group, &call, &value, &value, 60, 0);
    CHECK(finish(op) == PL_OK && value == (float)n_ranks, "rank %d: %g", rank, (double)value);
    pl_op_free(op);
    leave(group);
    return NULL;
}

/* The last rank does not come; with or without its end of the connections closed. */
static bool last_is_gone;

static void *one_missing(void *argument)
{
    const int rank = (int)(intptr_t)argument;
    pl_group *group = join(rank);
    if (rank < n_ranks - 1) {
        const pl_call call = {.kind = PL_BARRIER, .type = PL_U8, .place = PL_NOWHERE, .factor = 1};
        pl_op *op = pl_submit(group, &call, NULL, NULL, last_is_gone ? 60 : 0.2, rank % 2);
        const int status = finish(op);
        CHECK(status == (last_is_gone ? PL_LOST : PL_TIMED_OUT), "rank %d: status %d", rank, status);
        uint8_t culprits[MOST_RANKS];
        pl_culprits(op, culprits);
        for (int r = 0; r < n_ranks; r++)
            CHECK(culprits[r] == (r == n_ranks - 1), "rank %d blames %d: %d", rank, r, culprits[r]);
        pl_op_free(op);
        op = pl_submit(group, &call, NULL, NULL, 60, 0);
        CHECK(finish(op) == status, "rank %d: a group that failed goes on", rank);
        pl_op_free(op);
    } else if (last_is_gone)
        for (int r = 0; r < rank; r++)
            shutdown(ends[rank][r], SHUT_RDWR);
    pthread_barrier_wait(&together);
    leave(group);
    return NULL;
}

static void *wait_until_closed(void *op)
{
    CHECK(finish(op) == PL_CLOSED, "%d", pl_status_of(op));
    return NULL;
}

/* Another thread waits for an operation while its group is closed, and keeps both longer than that. */
static void *closed_in_flight(void *argument)
{
    const int rank = (int)(intptr_t)argument;
    pl_group *group = join(rank);
    if (rank == 0) {
        const pl_call call = {.kind = PL_BARRIER, .type = PL_U8, .place = PL_NOWHERE, .factor = 1};
        pl_op *first = pl_submit(group, &call, NULL, NULL, 60, 1), *second = pl_submit(group, &call, NULL, NULL, 60, 1);
        pthread_t waiter;
        pthread_create(&waiter, NULL, wait_until_closed, second);
        pl_close(group);
        CHECK(pl_run(group, &call, NULL, NULL, 60) == PL_REFUSED, "a group that was closed goes on");
        pl_free(group);
        CHECK(finish(first) == PL_CLOSED, "%d", pl_status_of(first));
        pthread_join(waiter, NULL);
        pl_op_free(first);
        pl_op_free(second);
        return NULL;
    }
    leave(group);
    return NULL;
}

static void with_all_ranks(const char *name, void *(*run)(void *))
{
    pthread_t threads[MOST_RANKS];
    for (int a = 0; a < n_ranks; a++)
        for (int b = a + 1; b < n_ranks; b++) {
            int pair[2];
            CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "socketpair");
            ends[a][b] = pair[0];
            ends[b][a] = pair[1];
        }
    memset(board, 0, pl_board_bytes(n_ranks));
    pthread_barrier_init(&together, NULL, (unsigned)n_ranks);
    for (int r = 0; r < n_ranks; r++)
        pthread_create(&threads[r], NULL, run, (void *)(intptr_t)r);
    for (int r = 0; r < n_ranks; r++)
        pthread_join(threads[r], NULL);
    pthread_barrier_destroy(&together);
    for (int a = 0; a < n_ranks; a++)
        for (int b = 0; b < n_ranks; b++)
            if (a != b)
                close(ends[a][b]);
    printf("%s: fine\n", name);
}

int main(int argc, char **argv)
{
    n_ranks = argc > 1 ? atoi(argv[1]) : n_ranks;
    n_collectives = argc > 2 ? atoi(argv[2]) : n_collectives;
    first_seed = argc > 3 ? (unsigned)atoi(argv[3]) : first_seed;
    CHECK(n_ranks >= 1 && n_ranks <= MOST_RANKS, "1 to %d ranks", MOST_RANKS);
    board = aligned_alloc(64, (pl_board_bytes(n_ranks) + 63) / 64 * 64);
    for (int r = 0; r < n_ranks; r++) {
        arenas[r] = aligned_alloc(4096, ARENA);
        ends[r][r] = -1;
    }
    with_all_ranks("random collectives", random_collectives);
    if (n_ranks > 1) {
        with_all_ranks("different calls", different_calls);
        last_is_gone = false;
        with_all_ranks("a rank that does not come", one_missing);
        last_is_gone = true;
        with_all_ranks("a rank that is gone", one_missing);
        with_all_ranks("closed in flight", closed_in_flight);
    }
    for (int r = 0; r < n_ranks; r++)
        free(arenas[r]);
    free(board);
    return 0;
}
