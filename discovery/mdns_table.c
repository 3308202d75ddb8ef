#include "discovery/mdns_table.h"

#include "base/util.h"

#include <stdio.h>
#include <string.h>

enum { OWN_MAX = 4 };

struct sighting {
    uint32_t interface;
    uint8_t protocol;
    uint32_t generation;
    struct address address;
    struct mdns_txt txt;
    uint64_t order; /* the newest one's TXT counts */
};

struct instance {
    char name[MDNS_INSTANCE_MAX];
    struct sighting sightings[MDNS_SIGHTINGS_MAX];
    uint32_t n;
    bool told;
    uint64_t since;           /* order of its first sighting */
    uint64_t told_us, due_us; /* UINT64_MAX: nothing to tell */
};

struct mdns_table {
    struct instance *instances[MDNS_INSTANCES_MAX];
    struct instance *evicted[MDNS_EVICTED_MAX]; /* told of, and to be told as gone */
    uint32_t n, n_evicted;
    char own[OWN_MAX][MDNS_INSTANCE_MAX];
    uint32_t next_own, generation;
    uint64_t order, grace_until_us;
    bool (*is_trusted)(void *context, const char *instance);
    void *context;
};

enum err mdns_table_new(struct mdns_table **ret)
{
    struct mdns_table *t = calloc(1, sizeof *t);
    if (!t)
        return ERR_NO_MEMORY;
    t->grace_until_us = UINT64_MAX;
    *ret = t;
    return ERR_OK;
}

void mdns_table_free(struct mdns_table *t)
{
    if (!t)
        return;
    for (uint32_t i = 0; i < t->n; i++)
        free(t->instances[i]);
    for (uint32_t i = 0; i < t->n_evicted; i++)
        free(t->evicted[i]);
    free(t);
}

uint32_t mdns_table_n(const struct mdns_table *t)
{
    return t->n;
}

static bool is_own(const struct mdns_table *t, const char *instance)
{
    for (int i = 0; i < OWN_MAX; i++) {
        if (t->own[i][0] && strcmp(t->own[i], instance) == 0)
            return true;
    }
    return false;
}

void mdns_table_set_own(struct mdns_table *t, const char *instance)
{
    if (instance[0] && !is_own(t, instance))
        (void)snprintf(t->own[t->next_own++ % OWN_MAX], MDNS_INSTANCE_MAX, "%s", instance);
}

static struct instance *find(const struct mdns_table *t, const char *name)
{
    for (uint32_t i = 0; i < t->n; i++) {
        if (strcmp(t->instances[i]->name, name) == 0)
            return t->instances[i];
    }
    return NULL;
}

static void changed(struct instance *i, uint64_t now_us)
{
    uint64_t due_us = now_us + MDNS_SETTLE_US;
    if (i->told)
        due_us = MAX_OF(due_us, i->told_us + MDNS_CHANGE_EVERY_US);
    i->due_us = MIN_OF(i->due_us, due_us);
}

/* A record may say what it likes: only addresses that can be on that interface are believed. */
static bool address_ok(const struct address *a, bool loopback)
{
    static const uint8_t zero[16], mapped[12] = {[10] = 0xff, [11] = 0xff};
    if (a->family == 4) {
        if (a->ip[0] == 0 || a->ip[0] >= 224)
            return false;
    } else if (a->ip[0] == 0xff || memcmp(a->ip, zero, 16) == 0 || memcmp(a->ip, mapped, 12) == 0) {
        return false;
    }
    return !address_is_loopback(a) || loopback;
}

void mdns_table_set_trusted(struct mdns_table *t,
                            bool (*is_trusted)(void *context, const char *instance), void *context)
{
    t->is_trusted = is_trusted;
    t->context = context;
}

static bool make_room(struct mdns_table *t)
{
    uint32_t oldest = t->n;
    if (t->n < MDNS_INSTANCES_MAX)
        return true;
    for (uint32_t k = 0; k < t->n; k++) {
        if (t->is_trusted && t->is_trusted(t->context, t->instances[k]->name))
            continue;
        if (oldest == t->n || t->instances[k]->since < t->instances[oldest]->since)
            oldest = k;
    }
    if (oldest == t->n)
        return false;
    struct instance *i = t->instances[oldest];
    if (i->told && t->n_evicted == MDNS_EVICTED_MAX)
        return false;
    if (i->told)
        t->evicted[t->n_evicted++] = i;
    else
        free(i);
    t->instances[oldest] = t->instances[--t->n];
    return true;
}

static struct instance *add(struct mdns_table *t, const char *name)
{
    if (!make_room(t))
        return NULL;
    struct instance *i = calloc(1, sizeof *i);
    if (!i)
        return NULL;
    (void)snprintf(i->name, sizeof i->name, "%s", name);
    i->due_us = UINT64_MAX;
    i->since = ++t->order;
    t->instances[t->n++] = i;
    return i;
}

static struct sighting *slot_for(struct mdns_table *t, struct instance *i,
                                 const struct mdns_message *m)
{
    struct sighting *oldest = &i->sightings[0];
    for (uint32_t k = 0; k < i->n; k++) {
        struct sighting *s = &i->sightings[k];
        /* A kept resolver reports one address of each family; a new one replaces it. */
        if (s->interface == m->interface && s->protocol == m->protocol &&
            s->address.family == m->family)
            return s;
        if (s->generation != t->generation || s->order < oldest->order)
            oldest = s;
    }
    if (i->n < MDNS_SIGHTINGS_MAX) {
        i->sightings[i->n] = (struct sighting){.interface = 0};
        return &i->sightings[i->n++];
    }
    return oldest;
}

static enum err apply_sighting(struct mdns_table *t, const struct mdns_message *m,
                               const char *interface_name, bool loopback, uint64_t now_us)
{
    struct address a = {.family = m->family, .port = m->service.port};
    memcpy(a.ip, m->ip, m->family == 4 ? 4 : 16);
    if (address_is_link_local(&a) && a.family == 6)
        a.scope = m->interface;
    (void)snprintf(a.interface, sizeof a.interface, "%.15s", interface_name);
    if (!address_ok(&a, loopback))
        return ERR_INVALID;
    struct instance *i = find(t, m->service.instance);
    if (!i)
        i = add(t, m->service.instance);
    if (!i)
        return ERR_LIMIT;
    struct sighting *s = slot_for(t, i, m);
    bool same = s->interface == m->interface && address_eq(&s->address, &a) &&
                mdns_txt_eq(&s->txt, &m->service.txt);
    *s = (struct sighting){.interface = m->interface,
                           .protocol = m->protocol,
                           .generation = t->generation,
                           .address = a,
                           .txt = m->service.txt,
                           .order = ++t->order};
    if (!same || !i->told)
        changed(i, now_us);
    return ERR_OK;
}

static void drop_sightings(struct mdns_table *t, struct instance *i, const struct mdns_message *m,
                           uint64_t now_us)
{
    uint32_t kept = 0;
    for (uint32_t k = 0; k < i->n; k++) {
        const struct sighting *s = &i->sightings[k];
        bool drop = m ? s->interface == m->interface && s->protocol == m->protocol
                      : s->generation != t->generation;
        if (!drop)
            i->sightings[kept++] = *s;
    }
    if (kept != i->n)
        changed(i, now_us);
    i->n = kept;
}

enum err mdns_table_apply(struct mdns_table *t, const struct mdns_message *m,
                          const char *interface_name, bool loopback, uint64_t now_us)
{
    const char *name = m->service.instance;
    if (is_own(t, name))
        return ERR_OK;
    /* Such names are those of peers that a person gave. */
    if (strncmp(name, "peer:", 5) == 0)
        return ERR_INVALID;
    if (m->type == MDNS_SIGHTING)
        return apply_sighting(t, m, interface_name, loopback, now_us);
    struct instance *i = find(t, name);
    if (i)
        drop_sightings(t, i, m, now_us);
    return ERR_OK;
}

void mdns_table_restarted(struct mdns_table *t, uint64_t now_us)
{
    t->generation++;
    t->grace_until_us = now_us + MDNS_GRACE_US;
}

static void fill(const struct instance *i, struct mdns_record *ret)
{
    *ret = (struct mdns_record){.gone = i->n == 0};
    memcpy(ret->instance, i->name, sizeof ret->instance);
    uint64_t newest = 0;
    for (uint32_t k = 0; k < i->n; k++) {
        const struct sighting *s = &i->sightings[k];
        if (s->order > newest) {
            newest = s->order;
            ret->txt = s->txt;
        }
        bool known = ret->n_addresses == MDNS_ADDRESSES_MAX;
        for (uint32_t j = 0; j < ret->n_addresses && !known; j++)
            known = address_eq(&ret->addresses[j], &s->address) &&
                    strcmp(ret->addresses[j].interface, s->address.interface) == 0;
        if (!known)
            ret->addresses[ret->n_addresses++] = s->address;
    }
}

bool mdns_table_next(struct mdns_table *t, uint64_t now_us, struct mdns_record *ret)
{
    if (now_us >= t->grace_until_us) {
        t->grace_until_us = UINT64_MAX;
        for (uint32_t i = 0; i < t->n; i++)
            drop_sightings(t, t->instances[i], NULL, now_us);
    }
    if (t->n_evicted > 0) { /* before it can be found again under the same name */
        struct instance *i = t->evicted[--t->n_evicted];
        *ret = (struct mdns_record){.gone = true};
        memcpy(ret->instance, i->name, sizeof ret->instance);
        free(i);
        return true;
    }
    for (uint32_t k = 0; k < t->n;) {
        struct instance *i = t->instances[k];
        if (i->due_us > now_us) {
            k++;
            continue;
        }
        bool silent = i->n == 0 && !i->told;
        fill(i, ret);
        i->told = true;
        i->told_us = now_us;
        i->due_us = UINT64_MAX;
        if (i->n == 0) {
            free(i);
            t->instances[k] = t->instances[--t->n];
        }
        if (!silent)
            return true;
    }
    return false;
}

uint64_t mdns_table_due(const struct mdns_table *t)
{
    if (t->n_evicted > 0)
        return 0;
    uint64_t due_us = t->n > 0 ? t->grace_until_us : UINT64_MAX;
    for (uint32_t i = 0; i < t->n; i++)
        due_us = MIN_OF(due_us, t->instances[i]->due_us);
    return due_us;
}
