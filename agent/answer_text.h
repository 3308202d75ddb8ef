/* From tokens to text that a client may see: pieces are bytes, so a character may be spread over
 * tokens, and a stop string may too. Text is held back while it could still turn out to be the
 * start of a stop string. */
#ifndef COVEY_AGENT_ANSWER_TEXT_H
#define COVEY_AGENT_ANSWER_TEXT_H

#include "base/buf.h"
#include "base/err.h"

#include <stdbool.h>
#include <stddef.h>

enum { STOPS_MAX = 4, STOP_BYTES_MAX = 256, ANSWER_BYTES_MAX = 64 << 20 };

struct answer_text {
    char stops[STOPS_MAX][STOP_BYTES_MAX];
    unsigned n_stops;
    struct buf held; /* bytes not given out yet */
    bool stopped;    /* a stop string was found: it and all after it is dropped */
};

void answer_text_init(struct answer_text *t);
void answer_text_deinit(struct answer_text *t);
/* ERR_LIMIT: too many or too long; ERR_INVALID: empty. */
enum err answer_text_add_stop(struct answer_text *t, const char *stop);

/* Takes the bytes of one token; appends what may be shown now (whole UTF-8 characters) to `out`. */
enum err answer_text_push(struct answer_text *t, const char *bytes, size_t n, struct buf *out);
/* The end: what is left is shown; bytes that are no UTF-8 become U+FFFD. */
enum err answer_text_end(struct answer_text *t, struct buf *out);

#endif
