/* The one failure type, and plain sentences that go with it.
 *
 * Every function that can fail returns `enum err`; results come last as `ret_x` and stay untouched
 * on failure. A sentence for a person goes into a `struct err_text` that the caller owns. Outcomes
 * that a caller is expected to handle are named per module, not here. */
#ifndef COVEY_BASE_ERR_H
#define COVEY_BASE_ERR_H

#include <stddef.h>

enum err {
    ERR_OK = 0,
    ERR_NO_MEMORY,   /* an allocation failed */
    ERR_INVALID,     /* the caller or a person gave something that makes no sense */
    ERR_LIMIT,       /* a named maximum would be exceeded */
    ERR_CORRUPT,     /* bytes from outside break their own format */
    ERR_UNSUPPORTED, /* well formed, but not something we can do */
    ERR_NOT_FOUND,
    ERR_EXISTS,
    ERR_IO,        /* the system refused: errno says more */
    ERR_AGAIN,     /* nothing to read or no room to write just now */
    ERR_CLOSED,    /* the other end is gone */
    ERR_DENIED,    /* authentication or permission */
    ERR_TIMEOUT,   /* a deadline passed */
    ERR_BUSY,      /* a bounded queue or table is full for now */
    ERR_NO_FIT,    /* not enough memory on the nodes that could take part */
    ERR_STALE,     /* an epoch, term or attempt that is over */
    ERR_CANCELLED, /* the one who asked no longer wants it */
    ERR_N
};

/* A word for logs and JSON, such as "no_fit". Never NULL. */
const char *err_name(enum err e);

/* A sentence for a person: what failed, where, and what to do next. Always NUL-terminated. */
enum { ERR_TEXT_MAX = 384 };
struct err_text {
    char text[ERR_TEXT_MAX];
};

/* Formats the sentence (when `t` is not NULL) and returns `e`, so that a failure is one statement.
 */
enum err err_set(struct err_text *t, enum err e, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Passes a failure up. */
#define TRY(expression)                                                                            \
    do {                                                                                           \
        enum err try_err_ = (expression);                                                          \
        if (try_err_ != ERR_OK)                                                                    \
            return try_err_;                                                                       \
    } while (0)

#endif
