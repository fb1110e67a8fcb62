/* Operations wait in a queue; whoever has time runs the first one: the group's thread, or a caller of pl_wait.
 *
 * A caller that waits at once saves the hand-over to the thread. When the other ranks are not there soon,
 * it leaves the operation, begun, to the thread, and can look at signals meanwhile. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "group.h"

static const double CALLER_PATIENCE_S = 0.002;

int pl_abi(void)
{
    return PL_ABI;
}

size_t pl_board_bytes(int size)
{
    return sizeof(pl_board) + (size_t)size * sizeof(pl_seat);
}

/* ---- forked children --------------------------------------------------------------------------------------
 * A DataLoader worker must neither keep a dead rank's sockets open, nor its memory. The mappings are not
 * inherited (MADV_DONTFORK); descriptors are closed here. */

static pthread_mutex_t open_groups_lock = PTHREAD_MUTEX_INITIALIZER;
static pl_group *open_groups;
static pthread_once_t fork_handlers_once = PTHREAD_ONCE_INIT;

static void before_fork(void)
{
    pthread_mutex_lock(&open_groups_lock);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&open_groups_lock);
}

static void after_fork_in_child(void)
{
    for (pl_group *group = open_groups; group; group = group->next_open) {
        atomic_store(&group->forked, true);
        for (int i = 0; i < group->n_fds; i++)
            close(group->fds[i]);
    }
    open_groups = NULL;
    pthread_mutex_unlock(&open_groups_lock);
}

static void install_fork_handlers(void)
{
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

static void list_as_open(pl_group *group)
{
    pthread_once(&fork_handlers_once, install_fork_handlers);
    pthread_mutex_lock(&open_groups_lock);
    group->next_open = open_groups;
    open_groups = group;
    pthread_mutex_unlock(&open_groups_lock);
}

static void unlist(pl_group *group)
{
    pthread_mutex_lock(&open_groups_lock);
    for (pl_group **link = &open_groups; *link; link = &(*link)->next_open)
        if (*link == group) {
            *link = group->next_open;
            break;
        }
    pthread_mutex_unlock(&open_groups_lock);
}

/* ---- groups ----------------------------------------------------------------------------------------------- */

static void let_go(pl_group *group)
{
    if (atomic_fetch_sub(&group->holders, 1) > 1)
        return;
    pthread_cond_destroy(&group->changed);
    pthread_mutex_destroy(&group->lock);
    free(atomic_load(&group->spare));
    free(group->sockets);
    free(group->fds);
    free(group);
}

static int *copy_of(const int *values, int n)
{
    int *copy = malloc((size_t)(n ? n : 1) * sizeof *copy);
    if (copy && n)
        memcpy(copy, values, (size_t)n * sizeof *copy);
    return copy;
}

pl_group *pl_open(int rank, int size, void *board, void *const *arenas, size_t arena_bytes, size_t stage_bytes,
                  const int *sockets, const int *fds, int n_fds, int spins, int helpers)
{
    pl_group *group = calloc(1, sizeof *group + (size_t)size * sizeof group->arenas[0]);
    if (!group)
        return NULL;
    group->rank = rank;
    group->size = size;
    group->board = board;
    group->arena_bytes = arena_bytes;
    group->stage_bytes = stage_bytes;
    group->spins = group->budget = spins;
    group->sockets = copy_of(sockets, size);
    group->fds = copy_of(fds, n_fds);
    group->n_fds = n_fds;
    atomic_store(&group->holders, 1);
    pthread_mutex_init(&group->lock, NULL);
    pthread_cond_init(&group->changed, NULL);
    if (!group->sockets || !group->fds) {
        let_go(group);
        return NULL;
    }
    memcpy(group->arenas, arenas, (size_t)size * sizeof group->arenas[0]);
    group->helpers = pl_hire(helpers);
    list_as_open(group);
    return group;
}

/* ---- operations ------------------------------------------------------------------------------------------- */

/* Memory for one, not cleared. */
static pl_op *take_op(pl_group *group)
{
    pl_op *op = atomic_exchange(&group->spare, NULL);
    return op ? op : malloc(sizeof *op + (size_t)group->size * (sizeof op->calls[0] + sizeof op->culprits[0]));
}

static void put_back(pl_group *group, pl_op *op)
{
    pl_op *none = NULL;
    if (!atomic_compare_exchange_strong(&group->spare, &none, op))
        free(op);
}

static void drop(pl_op *op)
{
    if (atomic_fetch_sub(&op->holders, 1) > 1)
        return;
    pl_group *group = op->group;
    put_back(group, op);
    let_go(group);
}

static void complete(pl_group *group, pl_op *op, int status)
{
    if (status == PL_LOST || status == PL_TIMED_OUT)
        for (int r = 0; r < group->size; r++)
            op->culprits[r] = atomic_load(&pl_seat_of(group, r)->culprit);
    atomic_store(&op->status, (uint32_t)status);
    if (atomic_load(&op->sleepers))
        pl_wake_all(&op->status, false);
    drop(op);
}

/* Runs the first operation of the queue, unless somebody is at it. Returns whether one was completed.
 * None begins in a group that is being closed: this rank has come to the meeting of the one that was cut off, and
 * would be counted there in another's place. */
static bool run_first(pl_group *group, double patience_s)
{
    pthread_mutex_lock(&group->lock);
    pl_op *op = group->head;
    if (group->running || !op || atomic_load(&group->closing)) {
        pthread_mutex_unlock(&group->lock);
        return false;
    }
    group->running = true;
    pthread_mutex_unlock(&group->lock);

    const int status = pl_execute(group, op, patience_s);

    pthread_mutex_lock(&group->lock);
    group->running = false;
    if (status != PL_PENDING) {
        group->head = op->next;
        complete(group, op, status);
    }
    if (group->head || atomic_load(&group->closing))
        pthread_cond_broadcast(&group->changed);
    pthread_mutex_unlock(&group->lock);
    return status != PL_PENDING;
}

static void *run_all(void *argument)
{
    pl_group *group = argument;
    while (true) {
        pthread_mutex_lock(&group->lock);
        while (!atomic_load(&group->closing) && (group->running || !group->head))
            pthread_cond_wait(&group->changed, &group->lock);
        const bool over = atomic_load(&group->closing);
        pthread_mutex_unlock(&group->lock);
        if (over)
            return NULL;
        run_first(group, -1);
    }
}

bool pl_start_thread(pthread_t *thread, void *(*run)(void *), void *argument)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const bool started = pthread_create(thread, NULL, run, argument) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return started;
}

/* With the lock held. */
static bool start_thread(pl_group *group)
{
    group->has_thread = group->has_thread || pl_start_thread(&group->thread, run_all, group);
    return group->has_thread;
}

static int64_t place_of(const pl_group *group, const void *in)
{
    const uintptr_t begin = (uintptr_t)group->arenas[group->rank], at = (uintptr_t)in;
    return in && at >= begin && at < begin + group->arena_bytes ? (int64_t)(at - begin) : PL_NOWHERE;
}

static void describe(pl_group *group, pl_op *op, const pl_call *call, const void *in, void *out, double timeout_s)
{
    memset(op, 0, sizeof *op);
    op->group = group;
    op->call = *call;
    op->call.place = place_of(group, in);
    op->in = in;
    op->out = out;
    op->timeout_s = timeout_s;
    op->culprits = (uint8_t *)&op->calls[group->size];
    memset(op->culprits, 0, (size_t)group->size);
    atomic_store(&op->status, PL_PENDING);
    atomic_store(&op->holders, 2);
}

/* Appends an operation to the queue; 0 or an errno. */
static int enqueue(pl_group *group, pl_op *op)
{
    pthread_mutex_lock(&group->lock);
    const int refusal = atomic_load(&group->closing) ? ESHUTDOWN : start_thread(group) ? 0 : EAGAIN;
    if (!refusal) {
        atomic_fetch_add(&group->holders, 1);
        op->number = ++group->submitted;
        if (group->head)
            group->tail->next = op;
        else
            group->head = op;
        group->tail = op;
    }
    pthread_mutex_unlock(&group->lock);
    return refusal;
}

static pl_op *submit(pl_group *group, const pl_call *call, const void *in, void *out, double timeout_s)
{
    if (atomic_load(&group->forked)) {
        errno = ECHILD;
        return NULL;
    }
    pl_op *op = take_op(group);
    if (!op)
        return NULL;
    describe(group, op, call, in, out, timeout_s);
    errno = enqueue(group, op);
    if (errno) {
        put_back(group, op);
        return NULL;
    }
    return op;
}

pl_op *pl_submit(pl_group *group, const pl_call *call, const void *in, void *out, double timeout_s, int begin_now)
{
    pl_op *op = submit(group, call, in, out, timeout_s);
    if (op && begin_now)
        pthread_cond_signal(&group->changed);
    return op;
}

int pl_wait(pl_op *op, double patience_s)
{
    pl_group *group = op->group;
    const struct timespec until = pl_after(patience_s);
    while (atomic_load(&op->status) == PL_PENDING) {
        if (atomic_load(&group->forked))
            return PL_FORKED;
        const double left = pl_seconds_until(&until);
        if (left <= 0)
            break;
        if (run_first(group, left < CALLER_PATIENCE_S ? left : CALLER_PATIENCE_S))
            continue;
        atomic_fetch_add(&op->sleepers, 1);
        pl_sleep_on(&op->status, PL_PENDING, left, false);
        atomic_fetch_sub(&op->sleepers, 1);
    }
    return (int)atomic_load(&op->status);
}

pl_op *pl_run(pl_group *group, const pl_call *call, const void *in, void *out, double timeout_s)
{
    pl_op *op = submit(group, call, in, out, timeout_s);
    if (!op)
        return PL_REFUSED;
    if (pl_wait(op, PL_RUN_PATIENCE_S) != PL_OK)
        return op;
    drop(op);
    return NULL;
}

pl_op *pl_run_prepared(const pl_prepared *prepared, void *tensor)
{
    return pl_run(prepared->group, &prepared->call, tensor, tensor, prepared->timeout_s);
}

int pl_status_of(const pl_op *op)
{
    return (int)atomic_load(&op->status);
}

uint64_t pl_number_of(const pl_op *op)
{
    return op->number;
}

void pl_culprits(const pl_op *op, uint8_t *by_rank)
{
    memcpy(by_rank, op->culprits, (size_t)op->group->size);
}

void pl_calls(const pl_op *op, pl_call *by_rank)
{
    memcpy(by_rank, op->calls, (size_t)op->group->size * sizeof *by_rank);
}

void pl_op_free(pl_op *op)
{
    drop(op);
}

void pl_close(pl_group *group)
{
    if (atomic_load(&group->forked))
        return; /* a forked child: neither thread nor memory are its own */
    unlist(group);
    pthread_mutex_lock(&group->lock);
    atomic_store(&group->closing, true);
    pthread_cond_broadcast(&group->changed);
    const bool has_thread = group->has_thread;
    pthread_mutex_unlock(&group->lock);
    if (has_thread)
        pthread_join(group->thread, NULL);
    pthread_mutex_lock(&group->lock);
    while (group->running)
        pthread_cond_wait(&group->changed, &group->lock);
    pl_op *op = group->head;
    group->head = NULL;
    pl_helpers *helpers = group->helpers;
    group->helpers = NULL;
    pthread_mutex_unlock(&group->lock);
    pl_dismiss(helpers);
    while (op) {
        pl_op *next = op->next;
        complete(group, op, PL_CLOSED);
        op = next;
    }
}

void pl_free(pl_group *group)
{
    if (!atomic_load(&group->forked))
        let_go(group);
}

/* ---- memory ----------------------------------------------------------------------------------------------- */

void *pl_map(int fd, size_t bytes)
{
    void *address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (address == MAP_FAILED)
        return NULL;
    madvise(address, bytes, MADV_DONTFORK);
    madvise(address, bytes, MADV_DONTDUMP);
    madvise(address, bytes, MADV_HUGEPAGE); /* where the host allows them for shared memory */
    return address;
}

int pl_unmap(void *address, size_t bytes)
{
    return munmap(address, bytes) ? errno : 0;
}

int pl_reserve(int fd, size_t offset, size_t bytes)
{
    return fallocate(fd, 0, (off_t)offset, (off_t)bytes) ? errno : 0;
}

int pl_release(int fd, size_t offset, size_t bytes)
{
    return fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)bytes) ? errno : 0;
}
