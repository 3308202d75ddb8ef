/* What a node has seen of others over mDNS: sightings (an instance, seen on one interface over one
 * protocol, with one address) merged into one record for each instance. Bounded: a flood of names
 * fills the table and no more, pushes out its own oldest, and what is gone leaves it. Changes of
 * one instance are handed out at most so often, however fast a stranger changes it. Pure: the time
 * is given. */
#ifndef COVEY_DISCOVERY_MDNS_TABLE_H
#define COVEY_DISCOVERY_MDNS_TABLE_H

#include "discovery/mdns.h"
#include "discovery/mdns_wire.h"

enum {
    MDNS_INSTANCES_MAX = 256,
    MDNS_EVICTED_MAX = 64,             /* that their user has not heard of yet */
    MDNS_SIGHTINGS_MAX = 16,           /* of one instance */
    MDNS_SETTLE_US = 30 * 1000,        /* so long may further addresses come in with the first */
    MDNS_CHANGE_EVERY_US = 500 * 1000, /* of one instance */
    MDNS_GRACE_US = 5 * 1000 * 1000,   /* for a new child to see again what the old one saw */
};

struct mdns_table;

enum err mdns_table_new(struct mdns_table **ret);
void mdns_table_free(struct mdns_table *t);
/* Whom a full table never forgets in favour of a newcomer; without it, nobody is spared. */
void mdns_table_set_trusted(struct mdns_table *t,
                            bool (*is_trusted)(void *context, const char *instance), void *context);
/* Our own instance names are skipped: this one, and those set before it. */
void mdns_table_set_own(struct mdns_table *t, const char *instance);
/* A SIGHTING or LOST. `loopback` says whether the interface is the loopback one. A full table
 * forgets the oldest that is not trusted, and tells it as gone. ERR_INVALID: an address that makes
 * no sense there, a name that is not to be trusted. ERR_LIMIT: no room now: all are trusted, or too
 * many changes wait to be taken. */
enum err mdns_table_apply(struct mdns_table *t, const struct mdns_message *m,
                          const char *interface_name, bool loopback, uint64_t now_us);
/* The child started anew: what it does not see again within MDNS_GRACE_US is gone. */
void mdns_table_restarted(struct mdns_table *t, uint64_t now_us);
/* Takes a change that is due; false when there is none. */
bool mdns_table_next(struct mdns_table *t, uint64_t now_us, struct mdns_record *ret);
/* When to ask again; UINT64_MAX: nothing is waiting. */
uint64_t mdns_table_due(const struct mdns_table *t);
uint32_t mdns_table_n(const struct mdns_table *t);

#endif
