/* What the files of the kernel share: the board that all ranks map, one rank's view of it, an operation. */
#ifndef PACELINE_GROUP_H
#define PACELINE_GROUP_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <time.h>

#include "helpers.h"
#include "shm.h"

#define PL_LINE 64 /* bytes of a cache line: what different ranks write lies in different ones */

/* A rank's place on the board. calls and eager take turns by the parity of the operation's number: a rank
 * comes to operation n + 2 only after all ranks came to n + 1, and so were done reading n. */
typedef struct {
    _Alignas(PL_LINE) _Atomic uint32_t phase;  /* meetings this rank came to */
    _Atomic uint8_t culprit;
    _Alignas(PL_LINE) pl_call calls[2];
    _Alignas(PL_LINE) unsigned char eager[2][PL_EAGER_BYTES];
} pl_seat;

typedef struct {
    _Alignas(PL_LINE) _Atomic uint32_t epoch;   /* meetings that all ranks came to; waited on */
    _Alignas(PL_LINE) _Atomic uint32_t arrived; /* ranks that came to the next one */
    _Alignas(PL_LINE) _Atomic uint32_t sleepers;
    _Alignas(PL_LINE) _Atomic uint32_t accused; /* taken by the first rank that gives up */
    _Atomic uint32_t failed_phase;              /* the meeting at which it did */
    _Atomic uint32_t failure;                   /* a pl_status, once that rank has named the culprits */
    pl_seat seats[];
} pl_board;

struct pl_op {
    pl_group *group;           /* lives as long as its operations */
    pl_call call;
    const void *in;
    void *out;
    double timeout_s;
    uint64_t number;
    bool begun;                /* published and arrived */
    struct timespec deadline;  /* set when begun */
    int turn;                  /* parity of number */
    _Atomic uint32_t status;   /* waited on */
    _Atomic int sleepers;
    _Atomic int holders;       /* the queue and the caller */
    pl_op *next;
    uint8_t *culprits;         /* behind calls */
    pl_call calls[];           /* of all ranks, after a mismatch */
};

struct pl_group {
    int rank, size;
    int spins, budget; /* most that are tried before sleeping, and what is of use now */
    unsigned meetings;
    pl_board *board;
    size_t arena_bytes, stage_bytes;
    _Atomic bool forked;       /* in a child of the process that opened it */
    uint32_t phase;
    _Atomic int holders;       /* whoever opened it, and its operations */
    _Atomic bool closing;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pl_op *head, *tail;
    _Atomic(pl_op *) spare;    /* the memory of an operation that is over, for the next one */
    bool running, has_thread;
    pthread_t thread;
    pl_helpers *helpers;       /* of whoever runs an operation; NULL where it is alone */
    uint64_t submitted;
    int *fds;                  /* closed in forked children */
    int n_fds;
    pl_group *next_open;
    int *sockets;
    char *arenas[];
};

static inline pl_seat *pl_seat_of(const pl_group *group, int rank)
{
    return &group->board->seats[rank];
}

/* board.c: meetings, and what is done about ranks that do not come. */
void pl_arrive(pl_group *group);

/* Waits until all ranks came to the meeting this rank came to last. patience_s < 0: until the deadline. */
int pl_meet(pl_group *group, const struct timespec *deadline, double patience_s);

struct timespec pl_after(double seconds);
double pl_seconds_until(const struct timespec *when);
void pl_sleep_on(_Atomic uint32_t *word, uint32_t seen, double seconds, bool across_processes);
void pl_wake_all(_Atomic uint32_t *word, bool across_processes);

/* queue.c: starts a thread; signals are for the threads of the program. */
bool pl_start_thread(pthread_t *thread, void *(*run)(void *), void *argument);

/* shm.c: runs an operation; PL_PENDING when the other ranks did not come within patience_s. */
int pl_execute(pl_group *group, pl_op *op, double patience_s);

#endif
