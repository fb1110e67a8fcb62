/* Arithmetic on blocks: independent of ranks, waiting and memory's owners. */
#ifndef PACELINE_REDUCE_H
#define PACELINE_REDUCE_H

#include "shm.h"

/* Bytes of one element as it lies in tensors. */
size_t pl_size_of(int type);

/* dst[k][i] = (reduction over all sources, in their order)[i] for i < n.
 * factors are used by PL_PREMUL_SUM alone. A destination may be a source; distinct buffers do not overlap. */
void pl_combine(int type, int reduction, const void *const *sources, const double *factors, int n_sources,
                void *const *destinations, int n_destinations, size_t n);

#endif
