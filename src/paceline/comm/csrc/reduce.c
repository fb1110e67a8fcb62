#include "reduce.h"

#include <stdbool.h>
#include <string.h>

/* Loops are compiled once per instruction set; the loader picks the widest that the processor has.
 * All versions round alike (no contraction to fused multiply-add), so results are equal on every processor. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(PL_NO_CLONES)
#define VECTOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VECTOR
#endif

/* Buffers are the same or do not overlap: no element depends on another one. */
#define ELEMENTWISE _Pragma("GCC ivdep")

enum { BLOCK = 2048 }; /* elements, at most: a block of accumulators stays in the first-level cache */

typedef union {
    float f32[BLOCK];
    double f64[BLOCK];
    int64_t words[BLOCK];
} block __attribute__((aligned(64)));

/* dst[i] = a[i] (op) b[i] * factor. dst may be a or b: element i is read before it is written. */
typedef void fold_fn(void *dst, const void *a, const void *b, double factor, size_t n);
typedef void scale_fn(void *dst, const void *src, double by, size_t n);
typedef void convert_fn(void *dst, const void *src, size_t n);

/* ---- one definition per element type ----------------------------------------------------------------- */

#define FOLD(NAME, T, WIDE, EXPRESSION)                                                          \
    VECTOR static void NAME(void *dstv, const void *av, const void *bv, double factor, size_t n) \
    {                                                                                            \
        T *dst = dstv;                                                                           \
        const T *left = av, *right = bv;                                                         \
        const WIDE f = (WIDE)factor;                                                             \
        (void)f;                                                                                 \
        ELEMENTWISE                                                                              \
        for (size_t i = 0; i < n; i++) {                                                         \
            const T a = left[i], x = right[i];                                                   \
            dst[i] = (T)(EXPRESSION);                                                            \
        }                                                                                        \
    }

#define SCALE(NAME, T, WIDE, EXPRESSION)                                                \
    VECTOR static void NAME(void *dstv, const void *srcv, double by, size_t n)          \
    {                                                                                   \
        T *dst = dstv;                                                                  \
        const T *src = srcv;                                                            \
        const WIDE f = (WIDE)by;                                                        \
        ELEMENTWISE                                                                     \
        for (size_t i = 0; i < n; i++) {                                                \
            const T x = src[i];                                                         \
            dst[i] = (T)(EXPRESSION);                                                   \
        }                                                                               \
    }

/* A NaN on any rank is the result on all, whatever the order of the ranks. */
#define FLOATING(NAME, T)                                        \
    SCALE(NAME##_scaled, T, T, x * f)                            \
    SCALE(NAME##_divided, T, T, x / f)                           \
    FOLD(NAME##_sum, T, T, a + x)                                \
    FOLD(NAME##_product, T, T, a * x)                            \
    FOLD(NAME##_min, T, T, (x < a) | (x != x) ? x : a)           \
    FOLD(NAME##_max, T, T, (x > a) | (x != x) ? x : a)           \
    FOLD(NAME##_sum_scaled, T, T, a + x * f)

#define WHOLE(NAME, T, U)                                        \
    SCALE(NAME##_scaled, T, double, x * f)                       \
    SCALE(NAME##_divided, T, T, x / f)                           \
    FOLD(NAME##_sum, T, double, (U)a + (U)x)                     \
    FOLD(NAME##_product, T, double, (U)a * (U)x)                 \
    FOLD(NAME##_min, T, double, x < a ? x : a)                   \
    FOLD(NAME##_max, T, double, x > a ? x : a)                   \
    FOLD(NAME##_band, T, double, a & x)                          \
    FOLD(NAME##_bor, T, double, a | x)                           \
    FOLD(NAME##_bxor, T, double, a ^ x)                          \
    FOLD(NAME##_sum_scaled, T, double, (U)a + (U)(T)(x * f))

FLOATING(f32, float)
FLOATING(f64, double)
WHOLE(i8, int8_t, uint32_t)
WHOLE(u8, uint8_t, uint32_t)
WHOLE(i16, int16_t, uint32_t)
WHOLE(u16, uint16_t, uint32_t)
WHOLE(i32, int32_t, uint32_t)
WHOLE(u32, uint32_t, uint32_t)
WHOLE(i64, int64_t, uint64_t)
WHOLE(u64, uint64_t, uint64_t)

/* ---- 16-bit floats: widened exactly, added in 32 bits, rounded once to nearest even ------------------- */

static inline uint32_t bits_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static inline float float_of(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

VECTOR static void widen_bf16(void *restrict dstv, const void *restrict srcv, size_t n)
{
    float *restrict dst = dstv;
    const uint16_t *restrict src = srcv;
    for (size_t i = 0; i < n; i++)
        dst[i] = float_of((uint32_t)src[i] << 16);
}

VECTOR static void narrow_bf16(void *restrict dstv, const void *restrict srcv, size_t n)
{
    uint16_t *restrict dst = dstv;
    const float *restrict src = srcv;
    for (size_t i = 0; i < n; i++) {
        const uint32_t u = bits_of(src[i]);
        const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
        const uint32_t nan = (u >> 16) | 0x40u;
        dst[i] = (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
    }
}

VECTOR static void widen_f16(void *restrict dstv, const void *restrict srcv, size_t n)
{
    float *restrict dst = dstv;
    const uint16_t *restrict src = srcv;
    const float rebias = float_of((254u - 15u) << 23); /* 2^112: also brings subnormals to their place */
    for (size_t i = 0; i < n; i++) {
        const uint32_t magnitude = (src[i] & 0x7fffu);
        const uint32_t sign = (uint32_t)(src[i] & 0x8000u) << 16;
        const uint32_t finite = bits_of(float_of(magnitude << 13) * rebias);
        const uint32_t special = 0x7f800000u | (magnitude << 13);
        dst[i] = float_of(sign | (magnitude >= 0x7c00u ? special : finite));
    }
}

VECTOR static void narrow_f16(void *restrict dstv, const void *restrict srcv, size_t n)
{
    uint16_t *restrict dst = dstv;
    const float *restrict src = srcv;
    const uint32_t subnormal_magic = ((127u - 15u) + (23u - 10u) + 1u) << 23;
    for (size_t i = 0; i < n; i++) {
        const uint32_t all = bits_of(src[i]);
        const uint32_t sign = (all >> 16) & 0x8000u;
        const uint32_t u = all & 0x7fffffffu;
        const uint32_t special = u > 0x7f800000u ? 0x7e00u : 0x7c00u;
        const uint32_t subnormal = bits_of(float_of(u) + float_of(subnormal_magic)) - subnormal_magic;
        const uint32_t normal = (u + 0xc8000fffu + ((u >> 13) & 1u)) >> 13;
        const uint32_t finite = u < (113u << 23) ? subnormal : normal;
        dst[i] = (uint16_t)(sign | (u >= ((127u + 16u) << 23) ? special : finite));
    }
}

/* ---- bool: sums saturate, as torch's do --------------------------------------------------------------- */

FOLD(bool_or, uint8_t, uint8_t, (a != 0) | (x != 0))
FOLD(bool_and, uint8_t, uint8_t, (a != 0) & (x != 0))
FOLD(bool_xor, uint8_t, uint8_t, (a != 0) ^ (x != 0))

/* ---- tables -------------------------------------------------------------------------------------------- */

typedef struct {
    size_t bytes;
    bool floating;
    convert_fn *widen, *narrow; /* NULL where it is computed with as it lies */
    scale_fn *scaled, *divided; /* divided may be NULL: an average is what the fold says */
    fold_fn *fold[PL_PREMUL_SUM + 1];
} element;

#define FLOAT_FOLDS(NAME)                                                                      \
    {                                                                                          \
        [PL_SUM] = NAME##_sum, [PL_AVG] = NAME##_sum, [PL_PRODUCT] = NAME##_product,           \
        [PL_MIN] = NAME##_min, [PL_MAX] = NAME##_max, [PL_PREMUL_SUM] = NAME##_sum_scaled      \
    }

#define WHOLE_ELEMENT(NAME, BYTES)                                                             \
    {                                                                                          \
        BYTES, false, NULL, NULL, NAME##_scaled, NAME##_divided,                               \
            {[PL_SUM] = NAME##_sum, [PL_AVG] = NAME##_sum, [PL_PRODUCT] = NAME##_product,      \
             [PL_MIN] = NAME##_min, [PL_MAX] = NAME##_max, [PL_BAND] = NAME##_band,            \
             [PL_BOR] = NAME##_bor, [PL_BXOR] = NAME##_bxor, [PL_PREMUL_SUM] = NAME##_sum_scaled} \
    }

static const element ELEMENTS[PL_TYPES] = {
    [PL_F32] = {4, true, NULL, NULL, f32_scaled, f32_divided, FLOAT_FOLDS(f32)},
    [PL_F64] = {8, true, NULL, NULL, f64_scaled, f64_divided, FLOAT_FOLDS(f64)},
    [PL_BF16] = {2, true, widen_bf16, narrow_bf16, f32_scaled, f32_divided, FLOAT_FOLDS(f32)},
    [PL_F16] = {2, true, widen_f16, narrow_f16, f32_scaled, f32_divided, FLOAT_FOLDS(f32)},
    [PL_I8] = WHOLE_ELEMENT(i8, 1),
    [PL_U8] = WHOLE_ELEMENT(u8, 1),
    [PL_I16] = WHOLE_ELEMENT(i16, 2),
    [PL_U16] = WHOLE_ELEMENT(u16, 2),
    [PL_I32] = WHOLE_ELEMENT(i32, 4),
    [PL_U32] = WHOLE_ELEMENT(u32, 4),
    [PL_I64] = WHOLE_ELEMENT(i64, 8),
    [PL_U64] = WHOLE_ELEMENT(u64, 8),
    [PL_BOOL] = {1, false, NULL, NULL, u8_scaled, NULL,
                 {[PL_SUM] = bool_or, [PL_AVG] = bool_and, [PL_PRODUCT] = bool_and, [PL_MIN] = bool_and,
                  [PL_MAX] = bool_or, [PL_BAND] = bool_and, [PL_BOR] = bool_or, [PL_BXOR] = bool_xor,
                  [PL_PREMUL_SUM] = bool_or}},
};

size_t pl_size_of(int type)
{
    return ELEMENTS[type].bytes;
}

/* A block of one rank's input as it is computed with: where it lies, or widened into `room`. */
static const void *widened(const element *e, const void *source, block *room, size_t n)
{
    if (!e->widen)
        return source;
    e->widen(room, source, n);
    return room;
}

static void average(const element *e, void *sum, int n_sources, size_t n)
{
    if (e->floating && (n_sources & (n_sources - 1)) == 0) /* exact as well, and much quicker */
        e->scaled(sum, sum, 1.0 / n_sources, n);
    else
        e->divided(sum, sum, n_sources, n);
}

/* The last fold may write to `result`, which may be a source: by then it was read. */
static void reduce_block(const element *e, int reduction, const char *const *sources, const double *factors,
                         int n_sources, size_t at, void *result, size_t n)
{
    block sum, room;
    void *const last = e->narrow ? (void *)&sum : result;
    const void *so_far = widened(e, sources[0] + at, &sum, n);
    if (reduction == PL_PREMUL_SUM) {
        e->scaled(&sum, so_far, factors[0], n);
        so_far = &sum;
    }
    for (int r = 1; r < n_sources; r++) {
        void *to = r < n_sources - 1 ? (void *)&sum : last;
        e->fold[reduction](to, so_far, widened(e, sources[r] + at, &room, n), factors[r], n);
        so_far = to;
    }
    if (reduction == PL_AVG && e->divided && n_sources > 1)
        average(e, last, n_sources, n);
    if (e->narrow)
        e->narrow(result, so_far, n);
    else if (so_far != result) /* there is one source only */
        memcpy(result, so_far, n * e->bytes);
}

/* Elements that are reduced before the next ones are looked at. All sources' have to stay in the first-level
 * cache until the result is written over them; and out of memory several streams come quicker the sooner
 * each goes on. Short blocks cost calls instead. (Measured on a Zen core, float32, 4 and 8 sources out of memory:
 * 1.6 times as quick as blocks of full length.) */
static size_t block_length(int n_sources)
{
    return n_sources <= 2 ? BLOCK : n_sources <= 4 ? BLOCK / 4 : BLOCK / 16;
}

void pl_combine(int type, int reduction, const void *const *sources, const double *factors, int n_sources,
                void *const *destinations, int n_destinations, size_t n)
{
    const element *e = &ELEMENTS[type];
    if (n_sources == 1 && n_destinations == 1 && sources[0] == destinations[0] && reduction != PL_PREMUL_SUM)
        return; /* a rank that is alone */
    const size_t length = block_length(n_sources);
    for (size_t begin = 0; begin < n; begin += length) {
        const size_t count = n - begin < length ? n - begin : length, at = begin * e->bytes;
        void *first = (char *)destinations[0] + at;
        reduce_block(e, reduction, (const char *const *)sources, factors, n_sources, at, first, count);
        for (int d = 1; d < n_destinations; d++)
            memcpy((char *)destinations[d] + at, first, count * e->bytes);
    }
}
