#include "transport/bulk.h"

#include "base/clock.h"
#include "base/util.h"
#include "transport/bulk_wire.h"

#include <assert.h>
#include <poll.h>
#include <sodium.h>
#include <string.h>

enum {
    GET_BYTES = 48,
    ASK_BYTES = 44,
    HASH_BYTES = 32,
};
static_assert(LINK_HEADER_BYTES + HASH_BYTES + BULK_BLOCK_BYTES <= (int)BULK_FRAME_BYTES_MAX,
              "a block fits a frame");

/* ---- hashes ---- */

struct hash256 bulk_leaf_hash(const void *bytes, size_t n)
{
    static const uint8_t leaf = 0;
    struct hash256 h;
    crypto_generichash_state s;
    (void)crypto_generichash_init(&s, NULL, 0, sizeof h.bytes);
    (void)crypto_generichash_update(&s, &leaf, 1);
    if (n)
        (void)crypto_generichash_update(&s, bytes, n);
    (void)crypto_generichash_final(&s, h.bytes, sizeof h.bytes);
    return h;
}

static struct hash256 inner_hash(const struct hash256 *left, const struct hash256 *right)
{
    static const uint8_t inner = 1;
    struct hash256 h;
    crypto_generichash_state s;
    (void)crypto_generichash_init(&s, NULL, 0, sizeof h.bytes);
    (void)crypto_generichash_update(&s, &inner, 1);
    (void)crypto_generichash_update(&s, left->bytes, sizeof left->bytes);
    (void)crypto_generichash_update(&s, right->bytes, sizeof right->bytes);
    (void)crypto_generichash_final(&s, h.bytes, sizeof h.bytes);
    return h;
}

/* The recursion of RFC 6962 from left to right: whole subtrees wait on a stack, two of one height
 * become one of the next, and what is left at the end is joined from the right. */
struct hash256 bulk_tree_root(const struct hash256 *leaves, size_t n)
{
    struct hash256 stack[64];
    unsigned depth = 0;
    if (n == 0)
        return bulk_leaf_hash(NULL, 0);
    for (size_t i = 0; i < n; i++) {
        stack[depth++] = leaves[i];
        for (size_t k = i + 1; k % 2 == 0; k /= 2) {
            depth--;
            stack[depth - 1] = inner_hash(&stack[depth - 1], &stack[depth]);
        }
    }
    while (depth > 1) {
        depth--;
        stack[depth - 1] = inner_hash(&stack[depth - 1], &stack[depth]);
    }
    return stack[0];
}

/* ---- server ---- */

struct bulk_server {
    struct link *link;
    struct bulk_source source;
    size_t n_reply; /* bytes of `reply` that the link had no room for yet */
    uint8_t reply[BULK_FRAME_BYTES_MAX];
};

enum err bulk_server_new(struct link *link, const struct bulk_source *source,
                         struct bulk_server **ret)
{
    if (sodium_init() < 0)
        return ERR_IO;
    struct bulk_server *s = malloc(sizeof *s);
    if (!s)
        return ERR_NO_MEMORY;
    s->link = link;
    s->source = *source;
    s->n_reply = 0;
    *ret = s;
    return ERR_OK;
}

void bulk_server_free(struct bulk_server *s)
{
    free(s);
}

static void reply_error(struct bulk_server *s, uint64_t tag, enum err e)
{
    struct writer w = writer_of(s->reply, sizeof s->reply);
    bulk_begin(&w, BULK_ERROR, tag, 2);
    write_u16(&w, frame_error_of(e));
    s->n_reply = w.len;
}

static bool range_ok(const struct bulk_range *r)
{
    uint64_t end;
    return r->file < BULK_FILES_MAX && r->n_bytes >= 1 && r->n_bytes <= BULK_BLOCK_BYTES &&
           !add_overflows(r->offset, r->n_bytes, &end) && end <= INT64_MAX &&
           r->offset / BULK_BLOCK_BYTES == (end - 1) / BULK_BLOCK_BYTES;
}

static enum err answer_get(struct bulk_server *s, struct bulk_head *h)
{
    struct hash256 manifest;
    struct bulk_range range;
    read_bytes(&h->body, manifest.bytes, sizeof manifest.bytes);
    range.file = read_u32(&h->body);
    range.n_bytes = read_u32(&h->body);
    range.offset = read_u64(&h->body);
    if (h->body.bad || h->body.left > 0)
        return ERR_CORRUPT;
    if (!range_ok(&range)) {
        reply_error(s, h->tag, ERR_INVALID);
        return ERR_OK;
    }
    uint8_t *to = s->reply + LINK_HEADER_BYTES + HASH_BYTES;
    enum err e =
        s->source.read(s->source.context, &manifest, range.file, range.offset, range.n_bytes, to);
    if (e != ERR_OK) {
        reply_error(s, h->tag, e);
        return ERR_OK;
    }
    struct hash256 hash = bulk_leaf_hash(to, range.n_bytes);
    struct writer w = writer_of(s->reply, sizeof s->reply);
    bulk_begin(&w, BULK_CHUNK, h->tag, HASH_BYTES + (size_t)range.n_bytes);
    write_bytes(&w, hash.bytes, sizeof hash.bytes);
    s->n_reply = w.len + range.n_bytes;
    return ERR_OK;
}

static bool ask_ok(uint32_t file, uint32_t first, uint32_t n_blocks)
{
    return file < BULK_FILES_MAX && n_blocks >= 1 && n_blocks <= BULK_MAP_BLOCKS_MAX &&
           first <= UINT32_MAX - n_blocks;
}

static enum err answer_ask(struct bulk_server *s, struct bulk_head *h)
{
    struct hash256 manifest;
    read_bytes(&h->body, manifest.bytes, sizeof manifest.bytes);
    uint32_t file = read_u32(&h->body);
    uint32_t first = read_u32(&h->body);
    uint32_t n_blocks = read_u32(&h->body);
    if (h->body.bad || h->body.left > 0)
        return ERR_CORRUPT;
    if (!ask_ok(file, first, n_blocks)) {
        reply_error(s, h->tag, ERR_INVALID);
        return ERR_OK;
    }
    size_t n = ((size_t)n_blocks + 7) / 8;
    uint8_t *bits = s->reply + LINK_HEADER_BYTES;
    memset(bits, 0, n);
    enum err e = s->source.have(s->source.context, &manifest, file, first, n_blocks, bits);
    if (e != ERR_OK) {
        reply_error(s, h->tag, e);
        return ERR_OK;
    }
    struct writer w = writer_of(s->reply, sizeof s->reply);
    bulk_begin(&w, BULK_MAP, h->tag, n);
    s->n_reply = w.len + n;
    return ERR_OK;
}

static enum err answer(struct bulk_server *s, const uint8_t *bytes, size_t n)
{
    struct bulk_head h;
    TRY(bulk_parse(bytes, n, &h));
    switch (h.type) {
    case BULK_GET:
        return answer_get(s, &h);
    case BULK_ASK:
        return answer_ask(s, &h);
    default:
        return ERR_CORRUPT;
    }
}

enum err bulk_server_step(struct bulk_server *s)
{
    for (;;) {
        if (s->n_reply > 0) {
            struct link_piece p = {s->reply, s->n_reply};
            TRY(link_send(s->link, &p, 1));
            s->n_reply = 0;
        }
        const uint8_t *bytes;
        size_t n;
        TRY(link_receive(s->link, &bytes, &n));
        TRY(answer(s, bytes, n));
    }
}

static bool is_stopped(int stop_fd)
{
    struct pollfd p = {stop_fd, POLLIN, 0};
    return stop_fd >= 0 && poll(&p, 1, 0) > 0;
}

enum err bulk_serve(struct link *link, const struct bulk_source *source, int stop_fd)
{
    struct bulk_server *s;
    TRY(bulk_server_new(link, source, &s));
    enum err e;
    while ((e = bulk_server_step(s)) == ERR_AGAIN) {
        struct bulk_wait w = {clock_monotonic_us() + BULK_IDLE_MS * 1000ull, stop_fd};
        /* With an answer to get rid of, more questions are not looked at. */
        e = s->n_reply > 0 ? bulk_wait_room(link, &w) : bulk_wait_input(link, &w);
        if (e != ERR_OK)
            break;
    }
    bulk_server_free(s);
    return e == ERR_CLOSED ? ERR_OK : e;
}

/* ---- client ---- */

struct fetch {
    struct link *link;
    const struct bulk_sink *sink;
    struct bulk_range window[BULK_WINDOW]; /* a ring; the oldest is the next to be answered */
    uint64_t n_asked, n_answered;          /* tags: the request's number */
    uint32_t idle_ms;
    int stop_fd;
    bool no_more;
};

static struct bulk_wait wait_of(const struct fetch *f)
{
    return (struct bulk_wait){clock_monotonic_us() + f->idle_ms * 1000ull, f->stop_fd};
}

static enum err send_get(struct link *l, const struct hash256 *manifest, uint64_t tag,
                         const struct bulk_range *range, const struct bulk_wait *wait)
{
    uint8_t frame[LINK_HEADER_BYTES + GET_BYTES];
    struct writer w = writer_of(frame, sizeof frame);
    bulk_begin(&w, BULK_GET, tag, GET_BYTES);
    write_bytes(&w, manifest->bytes, sizeof manifest->bytes);
    write_u32(&w, range->file);
    write_u32(&w, range->n_bytes);
    write_u64(&w, range->offset);
    return bulk_send(l, frame, w.len, wait);
}

static enum err ask_more(struct fetch *f)
{
    while (!f->no_more && f->n_asked - f->n_answered < BULK_WINDOW) {
        struct bulk_range range;
        if (!f->sink->next(f->sink->context, &range)) {
            f->no_more = true;
            break;
        }
        if (!range_ok(&range))
            return ERR_INVALID;
        struct bulk_wait w = wait_of(f);
        TRY(send_get(f->link, &f->sink->manifest, f->n_asked, &range, &w));
        f->window[f->n_asked++ % BULK_WINDOW] = range;
    }
    return ERR_OK;
}

static enum err take_chunk(struct fetch *f, const struct bulk_range *range, struct reader *body)
{
    struct hash256 hash;
    read_bytes(body, hash.bytes, sizeof hash.bytes);
    if (body->bad || body->left != range->n_bytes)
        return ERR_CORRUPT;
    struct hash256 ours = bulk_leaf_hash(body->p, body->left);
    if (!hash256_eq(&ours, &hash))
        return f->sink->missing(f->sink->context, range, ERR_CORRUPT);
    return f->sink->put(f->sink->context, range, body->p, &hash);
}

static enum err take_answer(struct fetch *f, struct bulk_head *h)
{
    if (h->tag != f->n_answered || f->n_answered == f->n_asked)
        return ERR_CORRUPT;
    struct bulk_range range = f->window[f->n_answered++ % BULK_WINDOW];
    if (h->type == BULK_CHUNK)
        return take_chunk(f, &range, &h->body);
    if (h->type != BULK_ERROR)
        return ERR_CORRUPT;
    uint16_t code = read_u16(&h->body);
    if (h->body.bad || h->body.left > 0 || code == 0)
        return ERR_CORRUPT;
    return f->sink->missing(f->sink->context, &range, frame_error_to(code));
}

/* Waits in slices, because a slow block shows life by its bytes before it is whole. */
static enum err next_answer(struct fetch *f, struct bulk_head *ret)
{
    const uint8_t *bytes;
    size_t n;
    enum err e;
    struct link_stats before, after;
    struct bulk_wait w = wait_of(f);
    link_stats_get(f->link, &before);
    while ((e = link_receive(f->link, &bytes, &n)) == ERR_AGAIN) {
        link_stats_get(f->link, &after);
        if (after.n_bytes_received != before.n_bytes_received)
            w = wait_of(f);
        before = after;
        TRY(bulk_wait_input(f->link, &w));
    }
    return e == ERR_OK ? bulk_parse(bytes, n, ret) : e;
}

enum err bulk_fetch(struct link *link, const struct bulk_sink *sink, uint32_t idle_ms, int stop_fd)
{
    if (sodium_init() < 0)
        return ERR_IO;
    struct fetch f = {.link = link, .sink = sink, .idle_ms = idle_ms, .stop_fd = stop_fd};
    for (;;) {
        TRY(ask_more(&f));
        if (f.n_answered == f.n_asked)
            return ERR_OK;
        if (is_stopped(stop_fd))
            return ERR_CANCELLED;
        struct bulk_head h;
        TRY(next_answer(&f, &h));
        TRY(take_answer(&f, &h));
    }
}

enum err bulk_ask_map(struct link *link, const struct hash256 *manifest, uint32_t file,
                      uint32_t first, uint32_t n_blocks, uint32_t timeout_ms, uint8_t *ret)
{
    if (!ask_ok(file, first, n_blocks))
        return ERR_INVALID;
    struct bulk_wait wait = {clock_monotonic_us() + timeout_ms * 1000ull, -1};
    uint8_t frame[LINK_HEADER_BYTES + ASK_BYTES];
    struct writer w = writer_of(frame, sizeof frame);
    bulk_begin(&w, BULK_ASK, 0, ASK_BYTES);
    write_bytes(&w, manifest->bytes, sizeof manifest->bytes);
    write_u32(&w, file);
    write_u32(&w, first);
    write_u32(&w, n_blocks);
    TRY(bulk_send(link, frame, w.len, &wait));
    struct bulk_head h;
    TRY(bulk_receive(link, &wait, &h));
    size_t n = ((size_t)n_blocks + 7) / 8;
    if (h.type == BULK_ERROR) {
        uint16_t code = read_u16(&h.body);
        return h.body.bad || h.body.left > 0 || code == 0 ? ERR_CORRUPT : frame_error_to(code);
    }
    if (h.type != BULK_MAP || h.tag != 0 || h.body.left != n)
        return ERR_CORRUPT;
    read_bytes(&h.body, ret, n);
    return ERR_OK;
}
