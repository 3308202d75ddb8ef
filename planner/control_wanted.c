/* The wanted models: a replicated map, last writer wins by (hybrid clock, node), PROTOCOL 3.13.
 *
 * Hybrid clock: wall milliseconds << 16, or one more than the largest seen (Kulkarni et al., 2014,
 * in its scalar form). Tombstones are kept until the table is full and then go oldest first: that
 * is longer than "until all members have them", which nobody can know of members that are away. */
#include "planner/control_private.h"

#include "base/util.h"

#include <sodium.h>
#include <string.h>

/* A clock above this is a lie: it could never be overruled. */
#define CLOCK_LIMIT (UINT64_C(1) << 62)

struct wanted *control_wanted_find(struct control *c, const struct hash256 *model)
{
    for (uint32_t i = 0; i < c->n_wanted; i++)
        if (hash256_eq(&c->wanted[i].model, model))
            return &c->wanted[i];
    return NULL;
}

/* Negative when a is older. */
static int stamp_cmp(const struct wanted *a, const struct wanted *b)
{
    if (a->clock != b->clock)
        return a->clock < b->clock ? -1 : 1;
    return node_id_cmp(&a->node, &b->node);
}

/* A free slot, kept in the order of model hashes so that digests need no sorting. */
static struct wanted *wanted_insert(struct control *c, const struct hash256 *model)
{
    if (c->n_wanted == CONTROL_WANTED_MAX) {
        uint32_t oldest = CONTROL_WANTED_MAX;
        for (uint32_t i = 0; i < c->n_wanted; i++)
            if (!c->wanted[i].wanted &&
                (oldest == CONTROL_WANTED_MAX || stamp_cmp(&c->wanted[i], &c->wanted[oldest]) < 0))
                oldest = i;
        if (oldest == CONTROL_WANTED_MAX)
            return NULL;
        c->n_wanted--;
        memmove(&c->wanted[oldest], &c->wanted[oldest + 1],
                (c->n_wanted - oldest) * sizeof c->wanted[0]);
    }
    uint32_t at = 0;
    while (at < c->n_wanted && memcmp(c->wanted[at].model.bytes, model->bytes, 32) < 0)
        at++;
    memmove(&c->wanted[at + 1], &c->wanted[at], (c->n_wanted - at) * sizeof c->wanted[0]);
    c->n_wanted++;
    memset(&c->wanted[at], 0, sizeof c->wanted[at]);
    c->wanted[at].model = *model;
    return &c->wanted[at];
}

/* Takes the entry when it is newer than ours. True when something changed. */
static bool wanted_merge(struct control *c, const struct wanted *in)
{
    struct wanted *mine = control_wanted_find(c, &in->model);
    if (mine && stamp_cmp(in, mine) <= 0)
        return false;
    if (!mine) {
        uint32_t n_live = 0;
        for (uint32_t i = 0; i < c->n_wanted; i++)
            n_live += c->wanted[i].wanted;
        if (in->wanted && n_live >= CONTROL_MODELS_MAX)
            return false;
        mine = wanted_insert(c, &in->model);
        if (!mine)
            return false;
    }
    uint64_t used = mine->used_us;
    *mine = *in;
    mine->used_us = in->wanted ? c->now_us : used;
    c->hybrid_clock = MAX_OF(c->hybrid_clock, in->clock);
    c->persist_due = true;
    c->version++;
    control_refusals_forget(c, &in->model);
    return true;
}

struct wanted_message {
    Covey__Control__WantedMap map;
    Covey__Control__Wanted entries[CONTROL_WANTED_MAX];
    Covey__Control__Wanted *pointers[CONTROL_WANTED_MAX];
};

static void entry_to_message(const struct wanted *w, Covey__Control__Wanted *m)
{
    covey__control__wanted__init(m);
    m->model = control_view_bytes(w->model.bytes, 32);
    m->model_name = control_view_text(w->name);
    m->clock = w->clock;
    m->node = control_view_bytes(w->node.bytes, 32);
    m->wanted = w->wanted;
    m->context = w->context;
    m->precision = w->precision;
    m->keep_alive_s = w->keep_alive_s;
}

static bool entry_from_message(const Covey__Control__Wanted *m, struct wanted *ret)
{
    memset(ret, 0, sizeof *ret);
    size_t n = m->model_name ? strlen(m->model_name) : 0;
    if (!control_take_hash(&m->model, &ret->model) || !control_take_id(&m->node, &ret->node) ||
        n >= MODEL_NAME_MAX || m->clock >= CLOCK_LIMIT || m->precision >= PRECISION_N)
        return false;
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)m->model_name[i] < 0x20 || m->model_name[i] == 0x7f)
            return false;
    if (n > 0)
        memcpy(ret->name, m->model_name, n);
    ret->clock = m->clock;
    ret->wanted = m->wanted;
    ret->context = m->context;
    ret->precision = (uint8_t)m->precision;
    ret->keep_alive_s = m->keep_alive_s;
    return true;
}

/* All entries, or only the one given. */
static void map_to_message(const struct control *c, const struct wanted *only,
                           struct wanted_message *m)
{
    covey__control__wanted_map__init(&m->map);
    m->map.entries = m->pointers;
    for (uint32_t i = 0; i < c->n_wanted; i++) {
        if (only && only != &c->wanted[i])
            continue;
        Covey__Control__Wanted *e = &m->entries[m->map.n_entries];
        entry_to_message(&c->wanted[i], e);
        m->pointers[m->map.n_entries++] = e;
    }
}

void control_wanted_send(struct control *c, const struct node_id *to, bool answer)
{
    struct wanted_message w;
    map_to_message(c, NULL, &w);
    w.map.answer = answer;
    Covey__Control__Message m = COVEY__CONTROL__MESSAGE__INIT;
    m.body_case = COVEY__CONTROL__MESSAGE__BODY_WANTED;
    m.wanted = &w.map;
    control_send_message(c, to, &m);
}

static void wanted_spread(struct control *c, const struct wanted *entry)
{
    struct wanted_message w;
    map_to_message(c, entry, &w);
    Covey__Control__Message m = COVEY__CONTROL__MESSAGE__INIT;
    m.body_case = COVEY__CONTROL__MESSAGE__BODY_WANTED;
    m.wanted = &w.map;
    control_send_all(c, &m, false);
}

/* Stamps an entry as our own newest word, and tells all. */
static void wanted_stamp(struct control *c, struct wanted *w, uint64_t wall_ms)
{
    uint64_t wall = wall_ms < CLOCK_LIMIT >> 17 ? wall_ms << 16 : 0;
    uint64_t clock = MAX_OF(wall, c->hybrid_clock + 1);
    w->clock = c->hybrid_clock = clock;
    w->node = c->options.self;
    c->persist_due = true;
    c->version++;
    wanted_spread(c, w);
}

static enum err want(struct control *c, const struct control_event *e)
{
    if (!e->model_name || strlen(e->model_name) >= MODEL_NAME_MAX || e->precision >= PRECISION_N)
        return ERR_INVALID;
    struct wanted *w = control_wanted_find(c, &e->model);
    if (w && w->wanted && w->context == e->context && w->precision == e->precision &&
        w->keep_alive_s == e->keep_alive_s) {
        w->used_us = c->now_us;                 /* nothing new, but it is wanted now */
        if (control_is_refused(c, &e->model)) { /* perhaps what was wrong has been put right */
            control_refusals_forget(c, &e->model);
            wanted_stamp(c, w, e->wall_ms);
        }
        return ERR_OK;
    }
    uint32_t n_live = 0;
    for (uint32_t i = 0; i < c->n_wanted; i++)
        n_live += c->wanted[i].wanted;
    if ((!w || !w->wanted) && n_live >= CONTROL_MODELS_MAX)
        return ERR_LIMIT;
    if (!w)
        w = wanted_insert(c, &e->model);
    if (!w)
        return ERR_LIMIT;
    memset(w->name, 0, sizeof w->name);
    memcpy(w->name, e->model_name, strlen(e->model_name));
    w->wanted = true;
    w->context = e->context;
    w->precision = e->precision;
    w->keep_alive_s = e->keep_alive_s;
    w->used_us = c->now_us;
    control_refusals_forget(c, &e->model);
    wanted_stamp(c, w, e->wall_ms);
    return ERR_OK;
}

enum err control_wanted_event(struct control *c, const struct control_event *e)
{
    struct wanted *w = control_wanted_find(c, &e->model);
    switch (e->kind) {
    case CONTROL_WANT:
        return want(c, e);
    case CONTROL_UNWANT:
        if (!w || !w->wanted)
            return ERR_NOT_FOUND;
        w->wanted = false;
        wanted_stamp(c, w, e->wall_ms);
        return ERR_OK;
    case CONTROL_USED:
        if (w)
            w->used_us = c->now_us;
        return ERR_OK;
    default:
        return ERR_INVALID;
    }
}

enum err control_wanted_in(struct control *c, const struct node_id *from,
                           const Covey__Control__WantedMap *m)
{
    if (m->n_entries > CONTROL_WANTED_MAX)
        return ERR_CORRUPT;
    bool changed = false;
    for (size_t i = 0; i < m->n_entries; i++) {
        struct wanted in;
        if (!entry_from_message(m->entries[i], &in))
            return ERR_CORRUPT;
        changed |= wanted_merge(c, &in);
    }
    if (m->answer) {
        /* They sent all they have: whatever of ours they lack goes back. */
        bool theirs_differ = m->n_entries != c->n_wanted;
        for (size_t i = 0; i < m->n_entries && !theirs_differ; i++) {
            struct wanted in;
            if (!entry_from_message(m->entries[i], &in))
                return ERR_CORRUPT;
            const struct wanted *mine = control_wanted_find(c, &in.model);
            theirs_differ = !mine || stamp_cmp(mine, &in) != 0;
        }
        if (theirs_differ)
            control_wanted_send(c, from, false);
    }
    if (changed && c->role == ROLE_PLAN)
        for (uint32_t i = 0; i < c->n_wanted; i++)
            for (size_t k = 0; k < m->n_entries; k++)
                if (memcmp(m->entries[k]->model.data, c->wanted[i].model.bytes, 32) == 0)
                    wanted_spread(c, &c->wanted[i]);
    return ERR_OK;
}

/* The planner's clock ends what nobody used for long enough. */
void control_wanted_expire(struct control *c)
{
    for (uint32_t i = 0; i < c->n_wanted; i++) {
        struct wanted *w = &c->wanted[i];
        if (!w->wanted || w->keep_alive_s == 0)
            continue;
        if (c->now_us - w->used_us < (uint64_t)w->keep_alive_s * 1000000)
            continue;
        w->wanted = false;
        control_note(c, "%s was not used for %u s and is unloaded", w->name, w->keep_alive_s);
        wanted_stamp(c, w, 0);
    }
}

uint64_t control_wanted_digest(const struct control *c)
{
    crypto_generichash_state h;
    (void)crypto_generichash_init(&h, NULL, 0, 32);
    for (uint32_t i = 0; i < c->n_wanted; i++) {
        uint8_t bytes[72];
        struct writer w = writer_of(bytes, sizeof bytes);
        write_bytes(&w, c->wanted[i].model.bytes, 32);
        write_u64(&w, c->wanted[i].clock);
        write_bytes(&w, c->wanted[i].node.bytes, 32);
        (void)crypto_generichash_update(&h, bytes, sizeof bytes);
    }
    uint8_t out[32];
    (void)crypto_generichash_final(&h, out, sizeof out);
    struct reader r = reader_of(out, sizeof out);
    return read_u64(&r);
}

enum err control_persist_write(struct control *c)
{
    struct wanted_message w;
    map_to_message(c, NULL, &w);
    Covey__Control__Persisted p = COVEY__CONTROL__PERSISTED__INIT;
    p.term = c->term_seen;
    p.n_wanted = w.map.n_entries;
    p.wanted = w.map.entries;
    struct buf *b = &c->update->persist;
    uint8_t *to;
    size_t n = covey__control__persisted__get_packed_size(&p);
    b->len = 0;
    TRY(buf_reserve(b, n, &to));
    b->len += covey__control__persisted__pack(&p, to);
    c->persist_due = false;
    return ERR_OK;
}

enum err control_persist_read(struct control *c, const void *bytes, size_t n)
{
    if (n > CONTROL_PERSIST_MAX)
        return ERR_CORRUPT;
    Covey__Control__Persisted *p = covey__control__persisted__unpack(NULL, n, bytes);
    if (!p)
        return ERR_CORRUPT;
    enum err e = p->n_wanted > CONTROL_WANTED_MAX ? ERR_CORRUPT : ERR_OK;
    c->term_seen = p->term;
    for (size_t i = 0; e == ERR_OK && i < p->n_wanted; i++) {
        struct wanted in;
        if (entry_from_message(p->wanted[i], &in))
            (void)wanted_merge(c, &in);
        else
            e = ERR_CORRUPT;
    }
    covey__control__persisted__free_unpacked(p, NULL);
    c->persist_due = false;
    return e;
}
