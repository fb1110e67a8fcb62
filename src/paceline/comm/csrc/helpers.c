/* One reduction is cut into parts, which whoever is free takes: a helper that gets no core holds up one at most.
 * Elements do not depend on each other, so it makes no difference to the result who reduces which. */
#include "helpers.h"

#include <stdlib.h>

#include "group.h"

/* Bytes of every source that are reduced between two looks for more work: some ten times as long as it takes
 * to wake a thread. */
#ifndef PL_PART_BYTES
#define PL_PART_BYTES (256 << 10)
#endif

typedef struct {
    int type, reduction;
    const void *const *sources;
    const double *factors;
    int n_sources;
    void *const *destinations;
    int n_destinations;
    size_t n;
} reduction;

struct pl_helpers {
    pthread_mutex_t lock;
    pthread_cond_t changed;   /* there are parts to take, or the helpers may go */
    pthread_cond_t all_done;
    const reduction *job;
    size_t part;              /* elements of one */
    size_t next, unfinished;  /* parts */
    size_t parts;
    bool over;
    int wanted, running;
    pthread_t threads[];
};

pl_helpers *pl_hire(int n)
{
    pl_helpers *helpers = n > 0 ? calloc(1, sizeof *helpers + (size_t)n * sizeof helpers->threads[0]) : NULL;
    if (!helpers)
        return NULL;
    helpers->wanted = n;
    pthread_mutex_init(&helpers->lock, NULL);
    pthread_cond_init(&helpers->changed, NULL);
    pthread_cond_init(&helpers->all_done, NULL);
    return helpers;
}

static void reduce_part(const reduction *job, size_t begin, size_t n)
{
    const void *sources[job->n_sources];
    void *destinations[job->n_destinations];
    const size_t at = begin * pl_size_of(job->type);
    for (int s = 0; s < job->n_sources; s++)
        sources[s] = (const char *)job->sources[s] + at;
    for (int d = 0; d < job->n_destinations; d++)
        destinations[d] = (char *)job->destinations[d] + at;
    pl_combine(job->type, job->reduction, sources, job->factors, job->n_sources, destinations,
               job->n_destinations, n);
}

/* With the lock held, which it lets go of while it reduces. */
static void take_parts(pl_helpers *helpers)
{
    while (helpers->next < helpers->parts) {
        const reduction *job = helpers->job;
        const size_t begin = helpers->next++ * helpers->part, left = job->n - begin;
        const size_t n = left < helpers->part ? left : helpers->part;
        pthread_mutex_unlock(&helpers->lock);
        reduce_part(job, begin, n);
        pthread_mutex_lock(&helpers->lock);
        if (--helpers->unfinished == 0)
            pthread_cond_signal(&helpers->all_done);
    }
}

static void *help(void *argument)
{
    pl_helpers *helpers = argument;
    pthread_mutex_lock(&helpers->lock);
    while (!helpers->over) {
        take_parts(helpers);
        pthread_cond_wait(&helpers->changed, &helpers->lock);
    }
    pthread_mutex_unlock(&helpers->lock);
    return NULL;
}

/* As many as are wanted, or as the system lets be; the calling thread is there in any case. */
static void start_helpers(pl_helpers *helpers)
{
    while (helpers->running < helpers->wanted
           && pl_start_thread(&helpers->threads[helpers->running], help, helpers))
        helpers->running++;
    helpers->wanted = helpers->running;
}

void pl_combine_together(pl_helpers *helpers, int type, int operation, const void *const *sources,
                         const double *factors, int n_sources, void *const *destinations, int n_destinations,
                         size_t n)
{
    const size_t part = PL_PART_BYTES / pl_size_of(type);
    if (!helpers || n <= part) {
        pl_combine(type, operation, sources, factors, n_sources, destinations, n_destinations, n);
        return;
    }
    start_helpers(helpers);
    const reduction job = {type, operation, sources, factors, n_sources, destinations, n_destinations, n};
    pthread_mutex_lock(&helpers->lock);
    helpers->job = &job;
    helpers->part = part;
    helpers->next = 0;
    helpers->parts = helpers->unfinished = (n + part - 1) / part;
    pthread_cond_broadcast(&helpers->changed);
    take_parts(helpers);
    while (helpers->unfinished)
        pthread_cond_wait(&helpers->all_done, &helpers->lock);
    pthread_mutex_unlock(&helpers->lock);
}

void pl_dismiss(pl_helpers *helpers)
{
    if (!helpers)
        return;
    pthread_mutex_lock(&helpers->lock);
    helpers->over = true;
    pthread_cond_broadcast(&helpers->changed);
    pthread_mutex_unlock(&helpers->lock);
    for (int i = 0; i < helpers->running; i++)
        pthread_join(helpers->threads[i], NULL);
    pthread_cond_destroy(&helpers->all_done);
    pthread_cond_destroy(&helpers->changed);
    pthread_mutex_destroy(&helpers->lock);
    free(helpers);
}
