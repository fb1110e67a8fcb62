/* The collectives: how data moves between meetings.
 *
 * One meeting opens every collective: each rank publishes its call, and goes on only if all calls agree.
 * Then, by size and by where the tensors lie:
 *
 *   eager    at most PL_EAGER_BYTES: the data came along with the call, each rank computes all it needs
 *            and is done; nobody waits for the readers, because slots take turns. What is to be reduced
 *            and lies in an arena comes along up to PL_TINY_BYTES: beyond, a meeting more costs less
 *   direct   all tensors lie in arenas: each rank reduces its slice over all ranks' tensors and writes
 *            the result into all of them
 *   staged   in pieces, each through every rank's staging area: copy in piece k + 1 while the others
 *            finish piece k. PL_STAGE_TURNS areas make one meeting per piece enough: a rank writes area
 *            k + 1 after a meeting to which all came done with piece k - 2, its last user.
 *
 * Reductions run in the order of ranks, so that results are equal on all ranks and in every run.
 *
 * count is the number of elements of: the tensor (all-reduce, reduce, broadcast), one rank's part
 * (all-gather's input, reduce-scatter's output, one of all-to-all's parts), nothing (barrier, elsewhere).
 */
#include "shm.h"

#include <string.h>

#include "group.h"
#include "helpers.h"
#include "reduce.h"

typedef struct {
    size_t begin, end; /* elements */
} range;

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Part r of n elements; parts begin on cache lines, so that no two ranks write to one. */
static range slice_of(const pl_group *group, int rank, size_t n, size_t element)
{
    const size_t per_line = PL_LINE / element;
    const size_t lines = (n + per_line - 1) / per_line;
    const size_t size = (size_t)group->size, r = (size_t)rank;
    return (range){least(n, lines * r / size * per_line), least(n, lines * (r + 1) / size * per_line)};
}

static const pl_call *call_of(const pl_group *group, const pl_op *op, int rank)
{
    return &pl_seat_of(group, rank)->calls[op->turn];
}

/* ---- where things lie ---------------------------------------------------------------------------------- */

/* How many parts of count elements a rank's input has. */
static size_t parts_in(const pl_group *group, const pl_call *call)
{
    switch (call->kind) {
    case PL_BARRIER:
    case PL_ELSEWHERE: return 0;
    case PL_REDUCE_SCATTER:
    case PL_ALL_TO_ALL: return (size_t)group->size;
    default: return 1;
    }
}

static size_t bytes_in(const pl_group *group, const pl_call *call)
{
    return parts_in(group, call) * (size_t)call->count * pl_size_of(call->type);
}

static bool reduces_whole(const pl_call *call)
{
    return call->kind == PL_ALL_REDUCE || call->kind == PL_REDUCE;
}

/* Whether a rank's data comes along with its call. */
static bool comes_along(const pl_group *group, const pl_call *call)
{
    const bool stays = reduces_whole(call) && call->place != PL_NOWHERE;
    return bytes_in(group, call) <= (stays ? PL_TINY_BYTES : PL_EAGER_BYTES);
}

/* Whether that of all ranks did. */
static bool is_eager(const pl_group *group, const pl_op *op)
{
    for (int r = 0; r < group->size; r++)
        if (!comes_along(group, call_of(group, op, r)))
            return false;
    return true;
}

static bool in_arena(const pl_group *group, const pl_op *op, int rank)
{
    return group->size == 1 || call_of(group, op, rank)->place != PL_NOWHERE;
}

static char *tensor_of(const pl_group *group, const pl_op *op, int rank)
{
    if (rank == group->rank)
        return (char *)(uintptr_t)op->in;
    return group->arenas[rank] + call_of(group, op, rank)->place;
}

static char *stage_of(const pl_group *group, int rank, size_t piece)
{
    return group->arenas[rank] + piece % PL_STAGE_TURNS * group->stage_bytes;
}

/* Whether all that others read lies in arenas, so that nothing needs to be staged. */
static bool is_direct(const pl_group *group, const pl_op *op)
{
    if (op->call.kind == PL_BROADCAST)
        return in_arena(group, op, op->call.root);
    for (int r = 0; r < group->size; r++)
        if (!in_arena(group, op, r))
            return false;
    return true;
}

/* Elements of one part that fit a staging area together with those of the other parts. */
static size_t staged_length(const pl_group *group, const pl_call *call)
{
    return group->stage_bytes / parts_in(group, call) / PL_LINE * PL_LINE / pl_size_of(call->type);
}

/* Where element `offset` of part `part` of a rank's input can be read, for the piece that begins there. */
static const char *source(const pl_group *group, const pl_op *op, int rank, size_t part, size_t piece,
                          size_t offset, size_t length)
{
    const size_t element = pl_size_of(op->call.type);
    if (comes_along(group, call_of(group, op, rank)))
        return (const char *)pl_seat_of(group, rank)->eager[op->turn]
               + (part * (size_t)op->call.count + offset) * element;
    if (rank == group->rank || in_arena(group, op, rank))
        return tensor_of(group, op, rank) + (part * (size_t)op->call.count + offset) * element;
    return stage_of(group, rank, piece) + part * length * element;
}

/* What of n elements of a part no other rank reads, as this one takes it from its tensor. */
static range own_share(const pl_group *group, const pl_call *call, size_t part, size_t n)
{
    const bool mine = part == (size_t)group->rank;
    switch (call->kind) {
    case PL_ALL_REDUCE:
    case PL_REDUCE: return slice_of(group, group->rank, n, pl_size_of(call->type));
    case PL_REDUCE_SCATTER:
    case PL_ALL_TO_ALL: return (range){0, mine ? n : 0};
    default: return (range){0, 0};
    }
}

/* Hands a piece of this rank's tensor to the others. */
static void copy_in(const pl_group *group, const pl_op *op, size_t piece, size_t offset, size_t length)
{
    const size_t element = pl_size_of(op->call.type), count = (size_t)op->call.count;
    if (op->call.place != PL_NOWHERE || offset >= count)
        return;
    if (op->call.kind == PL_BROADCAST && op->call.root != group->rank)
        return;
    const size_t n = least(length, count - offset);
    for (size_t part = 0; part < parts_in(group, &op->call); part++) {
        const range kept = own_share(group, &op->call, part, n);
        char *to = stage_of(group, group->rank, piece) + part * length * element;
        const char *from = (const char *)op->in + (part * count + offset) * element;
        memcpy(to, from, kept.begin * element);
        memcpy(to + kept.end * element, from + kept.end * element, (n - kept.end) * element);
    }
}

/* ---- what a rank does with a piece ---------------------------------------------------------------------- */

static void combine(const pl_group *group, const pl_op *op, const char *const *from, char *const *to, int n_to,
                    size_t n)
{
    double factors[group->size];
    for (int r = 0; r < group->size; r++)
        factors[r] = call_of(group, op, r)->factor;
    pl_combine_together(group->helpers, op->call.type, op->call.reduction, (const void *const *)from, factors,
                        group->size, (void *const *)to, n_to, n);
}

/* Everything a rank takes out of one piece, when it needs no result that another rank computes. */
static void take(const pl_group *group, const pl_op *op, size_t piece, size_t offset, size_t length)
{
    const pl_call *call = &op->call;
    const size_t element = pl_size_of(call->type), count = (size_t)call->count;
    const size_t n = least(length, count - offset), size = (size_t)group->size;
    char *out = (char *)op->out + offset * element;
    const char *from[size];
    if (n == 0)
        return;
    switch (call->kind) {
    case PL_REDUCE:
        if (call->root != group->rank)
            return;
        /* fall through */
    case PL_ALL_REDUCE:
        for (size_t r = 0; r < size; r++)
            from[r] = source(group, op, (int)r, 0, piece, offset, length);
        combine(group, op, from, &out, 1, n);
        return;
    case PL_REDUCE_SCATTER:
        for (size_t r = 0; r < size; r++)
            from[r] = source(group, op, (int)r, (size_t)group->rank, piece, offset, length);
        combine(group, op, from, &out, 1, n);
        return;
    case PL_BROADCAST:
        if (call->root != group->rank)
            memcpy(out, source(group, op, call->root, 0, piece, offset, length), n * element);
        return;
    case PL_ALL_GATHER:
    case PL_ALL_TO_ALL:
        for (size_t r = 0; r < size; r++) {
            const size_t part = call->kind == PL_ALL_TO_ALL ? (size_t)group->rank : 0;
            char *to = out + r * count * element;
            const char *at = source(group, op, (int)r, part, piece, offset, length);
            if (to != at)
                memcpy(to, at, n * element);
        }
        return;
    }
}

static bool keeps_result(const pl_group *group, const pl_call *call)
{
    return call->kind == PL_ALL_REDUCE || call->root == group->rank;
}

/* Reduces this rank's slice of one piece, into its tensor and, for the others, into its staging area. */
static void reduce_slice(const pl_group *group, const pl_op *op, size_t piece, size_t offset, size_t length)
{
    const size_t element = pl_size_of(op->call.type);
    const range mine = slice_of(group, group->rank, least(length, (size_t)op->call.count - offset), element);
    const char *from[group->size];
    for (int r = 0; r < group->size; r++)
        from[r] = source(group, op, r, 0, piece, offset, length) + mine.begin * element;
    char *to[2];
    int n_to = 0;
    if (keeps_result(group, &op->call))
        to[n_to++] = (char *)op->out + (offset + mine.begin) * element;
    if (op->call.kind == PL_ALL_REDUCE || op->call.root != group->rank)
        to[n_to++] = stage_of(group, group->rank, piece) + mine.begin * element;
    combine(group, op, from, to, n_to, mine.end - mine.begin);
}

static void copy_out(const pl_group *group, const pl_op *op, size_t piece, size_t offset, size_t length)
{
    const size_t element = pl_size_of(op->call.type);
    const size_t n = least(length, (size_t)op->call.count - offset);
    if (!keeps_result(group, &op->call))
        return;
    for (int r = 0; r < group->size; r++) {
        if (r == group->rank)
            continue;
        const range part = slice_of(group, r, n, element);
        memcpy((char *)op->out + (offset + part.begin) * element,
               stage_of(group, r, piece) + part.begin * element, (part.end - part.begin) * element);
    }
}

/* ---- the three ways ------------------------------------------------------------------------------------- */

static int meet_again(pl_group *group, const pl_op *op)
{
    pl_arrive(group);
    return pl_meet(group, &op->deadline, -1);
}

/* All-reduce and reduce of tensors that all lie in arenas. */
static int reduce_in_place(pl_group *group, pl_op *op)
{
    const size_t element = pl_size_of(op->call.type);
    const range mine = slice_of(group, group->rank, (size_t)op->call.count, element);
    const char *from[group->size];
    char *to[group->size];
    int n_to = 0;
    for (int r = 0; r < group->size; r++) {
        char *tensor = tensor_of(group, op, r) + mine.begin * element;
        from[r] = tensor;
        if (op->call.kind == PL_ALL_REDUCE || op->call.root == r)
            to[n_to++] = tensor;
    }
    combine(group, op, from, to, n_to, mine.end - mine.begin);
    return meet_again(group, op);
}

/* All-reduce and reduce where a tensor lies elsewhere: slices are reduced by one rank and copied by all. */
static int reduce_staged(pl_group *group, pl_op *op, size_t length)
{
    const size_t count = (size_t)op->call.count, pieces = (count + length - 1) / length;
    for (size_t k = 0; k <= pieces; k++) {
        if (k > 0) /* all reduced piece k - 1 before they came */
            copy_out(group, op, k - 1, (k - 1) * length, length);
        if (k < pieces)
            reduce_slice(group, op, k, k * length, length);
        if (k + 1 < pieces)
            copy_in(group, op, k + 1, (k + 1) * length, length);
        const int status = meet_again(group, op);
        if (status)
            return status;
    }
    return PL_OK;
}

/* Collectives in which each rank takes what it needs itself. The last meeting says all have read. */
static int exchange(pl_group *group, pl_op *op, size_t length)
{
    const size_t count = (size_t)op->call.count, pieces = (count + length - 1) / length;
    for (size_t k = 0; k < pieces; k++) {
        take(group, op, k, k * length, length);
        copy_in(group, op, k + 1, (k + 1) * length, length);
        const int status = meet_again(group, op);
        if (status)
            return status;
    }
    return PL_OK;
}

static void begin(pl_group *group, pl_op *op)
{
    pl_seat *seat = pl_seat_of(group, group->rank);
    op->turn = (int)(op->number & 1);
    op->deadline = pl_after(op->timeout_s);
    seat->calls[op->turn] = op->call;
    if (comes_along(group, &op->call)) {
        if (op->in)
            memcpy(seat->eager[op->turn], op->in, bytes_in(group, &op->call));
    } else if (group->size > 1)
        copy_in(group, op, 0, 0, staged_length(group, &op->call));
    op->begun = true;
    pl_arrive(group);
}

static bool calls_agree(const pl_group *group, const pl_op *op)
{
    for (int r = 0; r < group->size; r++) {
        const pl_call *theirs = call_of(group, op, r), *mine = &op->call;
        if (theirs->kind != mine->kind || theirs->reduction != mine->reduction || theirs->label != mine->label
            || theirs->type != mine->type || theirs->root != mine->root || theirs->count != mine->count
            || theirs->detail != mine->detail)
            return false;
    }
    return true;
}

int pl_execute(pl_group *group, pl_op *op, double patience_s)
{
    if (!op->begun)
        begin(group, op);
    const int status = pl_meet(group, &op->deadline, patience_s);
    if (status)
        return status;
    if (!calls_agree(group, op)) {
        for (int r = 0; r < group->size; r++)
            op->calls[r] = *call_of(group, op, r);
        return PL_MISMATCH;
    }
    const pl_call *call = &op->call;
    if (is_eager(group, op)) {
        take(group, op, 0, 0, (size_t)call->count);
        return PL_OK;
    }
    const bool direct = is_direct(group, op);
    const bool reduces = reduces_whole(call);
    if (reduces && direct)
        return reduce_in_place(group, op);
    const size_t length = direct ? (size_t)call->count : staged_length(group, call);
    return reduces ? reduce_staged(group, op, length) : exchange(group, op, length);
}
