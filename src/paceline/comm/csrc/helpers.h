/* Threads that reduce along with their rank, where the host has cores that no rank uses. */
#ifndef PACELINE_HELPERS_H
#define PACELINE_HELPERS_H

#include "reduce.h"

typedef struct pl_helpers pl_helpers;

/* n threads, which start when there is something to help with; NULL when memory is out, or n is 0. */
pl_helpers *pl_hire(int n);

/* Ends them; not while pl_combine_together runs. */
void pl_dismiss(pl_helpers *helpers);

/* Does what pl_combine does, bit for bit, in the calling thread and the helpers; in that thread alone where there
 * are none, or it is too little. One call at a time. */
void pl_combine_together(pl_helpers *helpers, int type, int reduction, const void *const *sources,
                         const double *factors, int n_sources, void *const *destinations, int n_destinations,
                         size_t n);

#endif
