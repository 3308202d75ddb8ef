#include "agent/answer_text.h"

#include "base/util.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

void answer_text_init(struct answer_text *t)
{
    *t = (struct answer_text){.held = BUF_INIT(ANSWER_BYTES_MAX)};
}

void answer_text_deinit(struct answer_text *t)
{
    buf_deinit(&t->held);
}

enum err answer_text_add_stop(struct answer_text *t, const char *stop)
{
    size_t n = strlen(stop);
    if (n == 0)
        return ERR_INVALID;
    if (t->n_stops == STOPS_MAX || n >= STOP_BYTES_MAX)
        return ERR_LIMIT;
    (void)snprintf(t->stops[t->n_stops++], STOP_BYTES_MAX, "%s", stop);
    return ERR_OK;
}

/* Length of the well-formed UTF-8 character at p (RFC 3629), 0 when it is none, -1 when it is cut
 * short. */
static int character(const uint8_t *p, size_t n)
{
    if (p[0] < 0x80)
        return 1;
    int len = p[0] >= 0xc2 && p[0] <= 0xdf   ? 2
              : (p[0] & 0xf0) == 0xe0        ? 3
              : p[0] >= 0xf0 && p[0] <= 0xf4 ? 4
                                             : 0;
    if (len == 0)
        return 0;
    for (int i = 1; i < len; i++) {
        if ((size_t)i >= n)
            return -1;
        uint8_t low = 0x80, high = 0xbf;
        if (i == 1) {
            low = p[0] == 0xe0 ? 0xa0 : p[0] == 0xf0 ? 0x90 : 0x80;
            high = p[0] == 0xed ? 0x9f : p[0] == 0xf4 ? 0x8f : 0xbf;
        }
        if (p[i] < low || p[i] > high)
            return 0;
    }
    return len;
}

/* Gives out held[0, n) as valid UTF-8, up to a character that is cut short (unless it is the end).
 */
static enum err give(struct answer_text *t, size_t n, bool end, struct buf *out)
{
    size_t at = 0;
    while (at < n) {
        int len = character(t->held.data + at, t->held.len - at);
        if (len < 0 && !end)
            break;
        if (len > 0 && at + (size_t)len > n)
            break;
        if (len <= 0) {
            TRY(buf_append(out, "\xef\xbf\xbd", 3));
            at++;
        } else {
            TRY(buf_append(out, t->held.data + at, (size_t)len));
            at += (size_t)len;
        }
    }
    buf_consume(&t->held, at);
    return ERR_OK;
}

/* Where the first stop string begins, or the held length. */
static size_t find_stop(const struct answer_text *t)
{
    size_t first = t->held.len;
    for (unsigned i = 0; i < t->n_stops; i++) {
        size_t n = strlen(t->stops[i]);
        for (size_t at = 0; at + n <= t->held.len && at < first; at++) {
            if (memcmp(t->held.data + at, t->stops[i], n) == 0)
                first = at;
        }
    }
    return first;
}

/* How many bytes at the end could be the start of a stop string. */
static size_t maybe_stop(const struct answer_text *t)
{
    size_t most = 0;
    for (unsigned i = 0; i < t->n_stops; i++) {
        size_t n = strlen(t->stops[i]);
        for (size_t k = MIN_OF(n - 1, t->held.len); k > most; k--) {
            if (memcmp(t->held.data + t->held.len - k, t->stops[i], k) == 0)
                most = k;
        }
    }
    return most;
}

enum err answer_text_push(struct answer_text *t, const char *bytes, size_t n, struct buf *out)
{
    if (t->stopped)
        return ERR_OK;
    TRY(buf_append(&t->held, bytes, n));
    size_t stop = find_stop(t);
    if (stop < t->held.len) {
        t->stopped = true;
        TRY(give(t, stop, true, out));
        t->held.len = 0;
        return ERR_OK;
    }
    return give(t, t->held.len - maybe_stop(t), false, out);
}

enum err answer_text_end(struct answer_text *t, struct buf *out)
{
    return t->stopped ? ERR_OK : give(t, t->held.len, true, out);
}
