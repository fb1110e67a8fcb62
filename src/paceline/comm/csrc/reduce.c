#include "reduce.h"

#include <string.h>

/* Loops are compiled once per instruction set; the loader picks the widest that the processor has.
 * All versions round alike (no contraction to fused multiply-add), so results are equal on every processor. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(PL_NO_CLONES)
#define VECTOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VECTOR
#endif

enum { BLOCK = 2048 }; /* elements: a block of accumulators stays in the first-level cache */

typedef union {
    float f32[BLOCK];
    double f64[BLOCK];
    int64_t words[BLOCK];
} block __attribute__((aligned(64)));

typedef void load_fn(void *acc, const void *src, double factor, size_t n);
typedef void divide_fn(void *acc, double by, size_t n);
typedef void store_fn(void *dst, const void *acc, size_t n);

/* ---- one definition per element type ----------------------------------------------------------------- */

#define FOLD(NAME, T, WIDE, EXPRESSION)                                                     \
    VECTOR static void NAME(void *restrict accv, const void *restrict srcv, double factor, size_t n) \
    {                                                                                       \
        T *restrict acc = accv;                                                             \
        const T *restrict src = srcv;                                                       \
        const WIDE f = (WIDE)factor;                                                        \
        (void)f;                                                                            \
        for (size_t i = 0; i < n; i++) {                                                    \
            const T a = acc[i], x = src[i];                                                 \
            (void)a;                                                                        \
            acc[i] = (T)(EXPRESSION);                                                       \
        }                                                                                   \
    }

#define DIVIDE(NAME, T, EXPRESSION)                              \
    VECTOR static void NAME(void *accv, double by, size_t n)     \
    {                                                            \
        T *acc = accv;                                           \
        const T d = (T)by;                                       \
        for (size_t i = 0; i < n; i++)                           \
            acc[i] = (T)(EXPRESSION);                            \
    }

/* A NaN on any rank is the result on all, whatever the order of the ranks. */
#define FLOATING(NAME, T)                                        \
    FOLD(NAME##_first_scaled, T, T, x * f)                       \
    FOLD(NAME##_sum, T, T, a + x)                                \
    FOLD(NAME##_product, T, T, a * x)                            \
    FOLD(NAME##_min, T, T, (x < a) | (x != x) ? x : a)           \
    FOLD(NAME##_max, T, T, (x > a) | (x != x) ? x : a)           \
    FOLD(NAME##_sum_scaled, T, T, a + x * f)                     \
    DIVIDE(NAME##_divide, T, acc[i] / d)

#define WHOLE(NAME, T, U)                                        \
    FOLD(NAME##_first_scaled, T, double, x * f)                  \
    FOLD(NAME##_sum, T, double, (U)a + (U)x)                     \
    FOLD(NAME##_product, T, double, (U)a * (U)x)                 \
    FOLD(NAME##_min, T, double, x < a ? x : a)                   \
    FOLD(NAME##_max, T, double, x > a ? x : a)                   \
    FOLD(NAME##_band, T, double, a & x)                          \
    FOLD(NAME##_bor, T, double, a | x)                           \
    FOLD(NAME##_bxor, T, double, a ^ x)                          \
    FOLD(NAME##_sum_scaled, T, double, (U)a + (U)(T)(x * f))     \
    DIVIDE(NAME##_divide, T, acc[i] / d)

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

VECTOR static void widen_bf16(float *restrict dst, const uint16_t *restrict src, size_t n)
{
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

VECTOR static void widen_f16(float *restrict dst, const uint16_t *restrict src, size_t n)
{
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

#define HALF_FOLD(HALF, NAME)                                                       \
    static void HALF##_##NAME(void *acc, const void *src, double factor, size_t n)  \
    {                                                                               \
        float wide[BLOCK] __attribute__((aligned(64)));                             \
        widen_##HALF(wide, src, n);                                                 \
        f32_##NAME(acc, wide, factor, n);                                           \
    }

#define HALF(NAME)                                                                  \
    static void NAME##_first(void *acc, const void *src, double factor, size_t n)   \
    {                                                                               \
        (void)factor;                                                               \
        widen_##NAME(acc, src, n);                                                  \
    }                                                                               \
    HALF_FOLD(NAME, first_scaled)                                                   \
    HALF_FOLD(NAME, sum)                                                            \
    HALF_FOLD(NAME, product)                                                        \
    HALF_FOLD(NAME, min)                                                            \
    HALF_FOLD(NAME, max)                                                            \
    HALF_FOLD(NAME, sum_scaled)

HALF(bf16)
HALF(f16)

/* ---- bool: sums saturate, as torch's do --------------------------------------------------------------- */

FOLD(bool_or, uint8_t, uint8_t, (a != 0) | (x != 0))
FOLD(bool_and, uint8_t, uint8_t, (a != 0) & (x != 0))
FOLD(bool_xor, uint8_t, uint8_t, (a != 0) ^ (x != 0))

static void keep(void *acc, double by, size_t n)
{
    (void)acc, (void)by, (void)n;
}

/* ---- tables -------------------------------------------------------------------------------------------- */

#define COPIES(NAME, BYTES)                                                       \
    static void NAME##_load(void *acc, const void *src, double factor, size_t n)  \
    {                                                                             \
        (void)factor;                                                             \
        memcpy(acc, src, n * (BYTES));                                            \
    }                                                                             \
    static void NAME##_store(void *dst, const void *acc, size_t n)                \
    {                                                                             \
        memcpy(dst, acc, n * (BYTES));                                            \
    }

COPIES(copy1, 1)
COPIES(copy2, 2)
COPIES(copy4, 4)
COPIES(copy8, 8)

typedef struct {
    size_t bytes;
    load_fn *first, *first_scaled;
    load_fn *fold[PL_PREMUL_SUM + 1];
    divide_fn *divide;
    store_fn *store;
} element;

#define FLOAT_FOLDS(NAME)                                                                      \
    {                                                                                          \
        [PL_SUM] = NAME##_sum, [PL_AVG] = NAME##_sum, [PL_PRODUCT] = NAME##_product,           \
        [PL_MIN] = NAME##_min, [PL_MAX] = NAME##_max, [PL_PREMUL_SUM] = NAME##_sum_scaled      \
    }

#define WHOLE_ELEMENT(NAME, COPY, BYTES)                                                       \
    {                                                                                          \
        BYTES, COPY##_load, NAME##_first_scaled,                                               \
            {[PL_SUM] = NAME##_sum, [PL_AVG] = NAME##_sum, [PL_PRODUCT] = NAME##_product,      \
             [PL_MIN] = NAME##_min, [PL_MAX] = NAME##_max, [PL_BAND] = NAME##_band,            \
             [PL_BOR] = NAME##_bor, [PL_BXOR] = NAME##_bxor, [PL_PREMUL_SUM] = NAME##_sum_scaled}, \
            NAME##_divide, COPY##_store                                                        \
    }

static const element ELEMENTS[PL_TYPES] = {
    [PL_F32] = {4, copy4_load, f32_first_scaled, FLOAT_FOLDS(f32), f32_divide, copy4_store},
    [PL_F64] = {8, copy8_load, f64_first_scaled, FLOAT_FOLDS(f64), f64_divide, copy8_store},
    [PL_BF16] = {2, bf16_first, bf16_first_scaled, FLOAT_FOLDS(bf16), f32_divide, narrow_bf16},
    [PL_F16] = {2, f16_first, f16_first_scaled, FLOAT_FOLDS(f16), f32_divide, narrow_f16},
    [PL_I8] = WHOLE_ELEMENT(i8, copy1, 1),
    [PL_U8] = WHOLE_ELEMENT(u8, copy1, 1),
    [PL_I16] = WHOLE_ELEMENT(i16, copy2, 2),
    [PL_U16] = WHOLE_ELEMENT(u16, copy2, 2),
    [PL_I32] = WHOLE_ELEMENT(i32, copy4, 4),
    [PL_U32] = WHOLE_ELEMENT(u32, copy4, 4),
    [PL_I64] = WHOLE_ELEMENT(i64, copy8, 8),
    [PL_U64] = WHOLE_ELEMENT(u64, copy8, 8),
    [PL_BOOL] = {1, copy1_load, u8_first_scaled,
                 {[PL_SUM] = bool_or, [PL_AVG] = bool_and, [PL_PRODUCT] = bool_and, [PL_MIN] = bool_and,
                  [PL_MAX] = bool_or, [PL_BAND] = bool_and, [PL_BOR] = bool_or, [PL_BXOR] = bool_xor,
                  [PL_PREMUL_SUM] = bool_or},
                 keep, copy1_store},
};

size_t pl_size_of(int type)
{
    return ELEMENTS[type].bytes;
}

void pl_combine(int type, int reduction, const void *const *sources, const double *factors, int n_sources,
                void *const *destinations, int n_destinations, size_t n)
{
    const element *e = &ELEMENTS[type];
    load_fn *first = reduction == PL_PREMUL_SUM ? e->first_scaled : e->first;
    load_fn *fold = e->fold[reduction];
    block acc;
    for (size_t begin = 0; begin < n; begin += BLOCK) {
        const size_t count = n - begin < BLOCK ? n - begin : BLOCK;
        const size_t at = begin * e->bytes;
        first(&acc, (const char *)sources[0] + at, factors[0], count);
        for (int r = 1; r < n_sources; r++)
            fold(&acc, (const char *)sources[r] + at, factors[r], count);
        if (reduction == PL_AVG)
            e->divide(&acc, n_sources, count);
        for (int d = 0; d < n_destinations; d++)
            e->store((char *)destinations[d] + at, &acc, count);
    }
}
