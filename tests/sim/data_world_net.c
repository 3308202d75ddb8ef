/* The queue of events, chance, and the links of a data_world. */
#include "tests/sim/data_world_internal.h"

#include "base/util.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void world_fail(struct world *w, const char *format, ...)
{
    if (w->r->failure[0])
        return;
    int n = snprintf(w->r->failure, sizeof w->r->failure,
                     "seed %llu at %llu us: ", (unsigned long long)w->o.seed,
                     (unsigned long long)w->now);
    va_list args;
    va_start(args, format);
    (void)vsnprintf(w->r->failure + n, sizeof w->r->failure - (size_t)n, format, args);
    va_end(args);
}

uint32_t world_below(struct world *w, uint32_t n)
{
    return (uint32_t)rng_below(&w->rng, n);
}

bool world_chance(struct world *w, uint32_t of)
{
    return world_below(w, of) == 0;
}

void world_note(struct world *w, uint64_t v)
{
    w->r->digest = (w->r->digest ^ v) * 0x100000001b3u + (w->r->digest >> 29);
}

/* --- the queue of events --- */

static bool earlier(const struct event *a, const struct event *b)
{
    return a->at != b->at ? a->at < b->at : a->order < b->order;
}

struct event *world_post(struct world *w, uint64_t at, enum kind kind, uint32_t node)
{
    if (w->n_heap == w->cap_heap) {
        w->cap_heap = w->cap_heap ? 2 * w->cap_heap : 256;
        w->heap = realloc(w->heap, w->cap_heap * sizeof *w->heap);
        if (!w->heap)
            abort();
    }
    struct event e = {.at = MAX_OF(at, w->now), .order = w->order++, .kind = kind, .node = node};
    if (node < NODES)
        e.boot = w->nodes[node].boot;
    uint32_t i = w->n_heap++;
    while (i > 0 && earlier(&e, &w->heap[(i - 1) / 2])) {
        w->heap[i] = w->heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    w->heap[i] = e;
    return &w->heap[i];
}

struct event world_pop(struct world *w)
{
    struct event first = w->heap[0], last = w->heap[--w->n_heap];
    uint32_t i = 0;
    for (;;) {
        uint32_t c = 2 * i + 1;
        if (c >= w->n_heap)
            break;
        if (c + 1 < w->n_heap && earlier(&w->heap[c + 1], &w->heap[c]))
            c++;
        if (!earlier(&w->heap[c], &last))
            break;
        w->heap[i] = w->heap[c];
        i = c;
    }
    if (w->n_heap > 0)
        w->heap[i] = last;
    return first;
}

/* --- links --- */

struct connection *world_connection(struct world *w, uint32_t a, uint32_t b)
{
    uint32_t n = w->pair[MIN_OF(a, b)][MAX_OF(a, b)];
    return n ? &w->connections[n - 1] : NULL;
}

uint32_t world_side(const struct connection *c, uint32_t node)
{
    return c->side[0] == node ? 0 : 1;
}

uint32_t world_number(const struct world *w, const struct node_id *id)
{
    for (uint32_t i = 0; i < w->o.n_nodes; i++) {
        if (node_id_eq(&w->nodes[i].id, id))
            return i;
    }
    return NODES;
}

void world_connect(struct world *w, uint32_t a, uint32_t b)
{
    if (a == b || a >= NODES || b >= NODES || !w->nodes[a].alive || !w->nodes[b].alive ||
        w->blocked[MIN_OF(a, b)][MAX_OF(a, b)] || world_connection(w, a, b) ||
        w->n_connections == CONNECTIONS)
        return;
    struct connection *c = &w->connections[w->n_connections++];
    *c = (struct connection){.side = {a, b}, .lost_from = {UINT64_MAX, UINT64_MAX}};
    w->pair[MIN_OF(a, b)][MAX_OF(a, b)] = w->n_connections;
    for (uint32_t s = 0; s < 2; s++)
        world_post(w, w->now + 1 * MS + world_below(w, 5 * MS), EV_UP, c->side[s])->number =
            w->n_connections;
}

void world_cut(struct world *w, struct connection *c, uint32_t late_us)
{
    if (c->lost_from[0] != UINT64_MAX)
        return;
    uint32_t number = (uint32_t)(c - w->connections) + 1;
    for (uint32_t s = 0; s < 2; s++) {
        c->lost_from[s] = w->now + world_below(w, 10 * MS);
        world_post(w, c->lost_from[s] + world_below(w, late_us + 1), EV_DOWN, c->side[s])->number =
            number;
    }
}

void world_send(struct world *w, uint32_t from, const struct pipeline_send *send)
{
    uint32_t to = world_number(w, &send->to);
    struct connection *c = to < NODES ? world_connection(w, from, to) : NULL;
    if (!c || !c->up[world_side(c, from)] || c->down[world_side(c, from)]) {
        world_fail(w, "node %u sends to %u without a link", from, to);
        return;
    }
    struct frame scratch;
    const struct frame *f = pipeline_frame(send, &scratch);
    size_t n = frame_encoded_bytes(f), n_written = 0;
    size_t cap = (n + send->n_row_bytes + 15) / 16 * 16;
    uint8_t *bytes = aligned_alloc(16, cap);
    if (!bytes || frame_encode(f, bytes, n, &n_written) != ERR_OK || n_written != n) {
        world_fail(w, "node %u makes a frame of type %u that cannot be encoded", from, send->type);
        free(bytes);
        return;
    }
    if (send->n_row_bytes)
        memcpy(bytes + n, send->rows, send->n_row_bytes);
    uint32_t s = world_side(c, to);
    uint64_t at = w->now + 200 + world_below(w, 2 * MS);
    if (w->o.stalls && !w->healed && world_chance(w, 500))
        at += world_below(w, 1500) * MS;
    at = MAX_OF(at, c->last_at[s] + 1);
    c->last_at[s] = at;
    w->r->n_frames++;
    bool lost = w->o.losses && !w->healed && world_chance(w, 150);
    if (lost || at >= c->lost_from[s]) {
        free(bytes);
        return;
    }
    struct event *e = world_post(w, at, EV_FRAME, to);
    e->peer = from;
    e->bytes = bytes;
    e->n_bytes = n + send->n_row_bytes;
    e->number = (uint32_t)(c - w->connections) + 1;
}
