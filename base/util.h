/* Cleanup by attribute, ownership transfer, small arithmetic helpers. */
#ifndef COVEY_BASE_UTIL_H
#define COVEY_BASE_UTIL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

#define _cleanup_(f) __attribute__((cleanup(f)))

/* Defines x_freep for `void x_free(struct x *)`, for use as _cleanup_(x_freep). */
#define DEFINE_CLEANUP(type, free_function)                                                        \
    static inline void free_function##p(type **p)                                                  \
    {                                                                                              \
        if (*p)                                                                                    \
            free_function(*p);                                                                     \
    }

static inline void freep(void *p)
{
    free(*(void **)p);
}

static inline void closep(const int *fd)
{
    if (*fd >= 0)
        (void)close(*fd);
}

/* Hands the pointer over and leaves NULL behind. */
#define TAKE(p)                                                                                    \
    __extension__({                                                                                \
        __typeof__(p) *take_p_ = &(p);                                                             \
        __typeof__(p) take_v_ = *take_p_;                                                          \
        *take_p_ = NULL;                                                                           \
        take_v_;                                                                                   \
    })

#define ARRAY_LEN(a) (sizeof(a) / sizeof((a)[0]))

#define MIN_OF(a, b) ((a) < (b) ? (a) : (b))
#define MAX_OF(a, b) ((a) > (b) ? (a) : (b))

/* True on overflow; *ret is then unspecified. */
#define mul_overflows(a, b, ret) __builtin_mul_overflow((a), (b), (ret))
#define add_overflows(a, b, ret) __builtin_add_overflow((a), (b), (ret))

#endif
