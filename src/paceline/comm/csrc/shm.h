/* Collectives between the ranks of one host over memory they all map.
 *
 * Nothing here knows Python, torch, sockets' addresses or how memory came to be shared:
 * the caller maps one board for all ranks and one arena per rank, and hands over addresses.
 *
 *   pl_open        join the ranks that share the board
 *   pl_submit      queue a collective; collectives of one rank run in the order of submission
 *   pl_wait        wait a while for one; runs it in the calling thread when nobody else does
 *   pl_op_free     let go of it
 *   pl_run         all three at once, for callers that wait anyway; pl_run_prepared for those that do so often
 *   pl_close       leave: what is in flight fails, and so does what is submitted later
 *   pl_free        let go of the group
 *
 * A call is described by pl_call, which all ranks publish and compare before memory moves.
 */
#ifndef PACELINE_SHM_H
#define PACELINE_SHM_H

#include <stddef.h>
#include <stdint.h>

#define PL_ABI 7

enum { PL_STAGE_TURNS = 3, PL_EAGER_BYTES = 8192, PL_TINY_BYTES = 1024, PL_NOWHERE = -1 };

enum pl_kind {
    PL_BARRIER,
    PL_ALL_REDUCE,
    PL_REDUCE,
    PL_BROADCAST,
    PL_ALL_GATHER,
    PL_REDUCE_SCATTER,
    PL_ALL_TO_ALL,
    PL_ELSEWHERE, /* moves nothing: ranks compare calls that they then carry out by other means */
};

enum pl_reduction { PL_SUM, PL_AVG, PL_PRODUCT, PL_MIN, PL_MAX, PL_BAND, PL_BOR, PL_BXOR, PL_PREMUL_SUM };

/* How elements are added. Collectives that only copy take any element size as PL_U8 with bytes as count. */
enum pl_type {
    PL_F32, PL_F64, PL_BF16, PL_F16,
    PL_I8, PL_U8, PL_I16, PL_U16, PL_I32, PL_U32, PL_I64, PL_U64, PL_BOOL,
    PL_TYPES
};

enum pl_status {
    PL_OK,
    PL_PENDING,      /* not done yet */
    PL_TIMED_OUT,    /* ranks did not come before the timeout: the culprits */
    PL_LOST,         /* processes of ranks ended: the culprits */
    PL_MISMATCH,     /* ranks made different calls: pl_calls says which; the group goes on */
    PL_CLOSED,       /* the group was closed meanwhile */
    PL_FORKED,       /* the group belongs to the parent of this process */
};

/* One rank's call. What must be equal on all ranks comes first. */
typedef struct {
    int32_t kind;
    int32_t reduction;
    int32_t type;       /* pl_type */
    int32_t label;      /* the caller's own code for the dtype: compared, and kept for messages */
    int32_t root;
    int32_t detail;     /* PL_ELSEWHERE: the caller's own code for the collective */
    int64_t count;      /* elements of the larger side divided by ranks, or of the whole tensor: see shm.c */
    int64_t place;      /* offset of the input in the rank's arena, or PL_NOWHERE: filled in here */
    double factor;      /* PL_PREMUL_SUM: what this rank's input is multiplied by */
} pl_call;

typedef struct pl_group pl_group;
typedef struct pl_op pl_op;

int pl_abi(void);

/* Bytes of the board for so many ranks; its memory starts out zeroed. */
size_t pl_board_bytes(int size);

/* arenas[r]: where rank r's arena is mapped here, this rank's with arena_bytes; its first PL_STAGE_TURNS * stage_bytes are the staging area.
 * sockets[r]: a connected socket that breaks when rank r's process ends, or -1.
 * fds, n_fds: descriptors to close in forked children.
 * spins: most looks at the other ranks before this one sleeps. helpers: threads that reduce along with it.
 * Returns NULL when memory is out. */
pl_group *pl_open(int rank, int size, void *board, void *const *arenas, size_t arena_bytes, size_t stage_bytes,
                  const int *sockets, const int *fds, int n_fds, int spins, int helpers);

/* Ends the group's thread; what is in flight fails with PL_CLOSED, also where another thread waits for it.
 * After it nobody touches the mapped memory, which is the caller's. */
void pl_close(pl_group *group);

/* Lets go of a group that was closed; operations that are left may still be waited for and freed. */
void pl_free(pl_group *group);

/* in and out may be the same, and are the caller's until the collective is done.
 * begin_now: whether to begin without waiting for pl_wait.
 * NULL, and errno, when memory or threads are out, the group was closed (ESHUTDOWN), or is that of the parent of
 * this process (ECHILD). */
pl_op *pl_submit(pl_group *group, const pl_call *call, const void *in, void *out, double timeout_s, int begin_now);

/* Waits up to patience_s seconds; PL_PENDING when the collective is not done by then. */
int pl_wait(pl_op *op, double patience_s);

/* Runs a collective and waits up to PL_RUN_PATIENCE_S. NULL when it is done by then, and nothing is left to free;
 * else the operation, or PL_REFUSED where pl_submit gives NULL. */
#define PL_REFUSED ((pl_op *)UINTPTR_MAX)
#define PL_RUN_PATIENCE_S 0.1
pl_op *pl_run(pl_group *group, const pl_call *call, const void *in, void *out, double timeout_s);

/* A collective in place that is run often. */
typedef struct {
    pl_group *group;
    double timeout_s;
    pl_call call;
} pl_prepared;

/* As pl_run, with fewer arguments: handing them over takes Python longer than the ranks take to meet. */
pl_op *pl_run_prepared(const pl_prepared *prepared, void *tensor);

int pl_status_of(const pl_op *op);
uint64_t pl_number_of(const pl_op *op);

/* After a failure: one byte per rank, 1 for those it is put down to. */
void pl_culprits(const pl_op *op, uint8_t *by_rank);

/* After PL_MISMATCH: what each rank called. */
void pl_calls(const pl_op *op, pl_call *by_rank);

void pl_op_free(pl_op *op);

/* Maps a shared file without handing it to forked children; NULL with errno set on failure. */
void *pl_map(int fd, size_t bytes);
int pl_unmap(void *address, size_t bytes);

/* Takes pages for a range of the file now, or gives them back; 0 or an errno. */
int pl_reserve(int fd, size_t offset, size_t bytes);
int pl_release(int fd, size_t offset, size_t bytes);

#endif
