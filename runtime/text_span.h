/* A run of bytes in a text: which part of a rendered prompt came from the user, and must therefore
 * stay plain text when it is tokenised. */
#ifndef COVEY_RUNTIME_TEXT_SPAN_H
#define COVEY_RUNTIME_TEXT_SPAN_H

#include <stddef.h>

struct text_span {
    size_t begin, end; /* bytes, end excluded */
};

/* Sorted, disjoint, none empty. Owned by whoever declares it; `v` comes from malloc. */
struct text_spans {
    struct text_span *v;
    size_t n;
};

void text_spans_deinit(struct text_spans *spans);

#endif
