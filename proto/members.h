/* The set of signed membership records and revocations of one cluster, and what follows from it.
 *
 * The set only grows. What follows depends on the set alone, never on the order in which it came
 * (proto/trust.h has the rules in words):
 *
 *   authority(x)   the founder, or a record from an authority that lets x admit; revocations aside
 *   wins(t, i)     t's shortest chain of authority is shorter than i's, or as long and t's key
 * smaller void(i -> t)   t is the founder; or, with everyone whom t revoked and wins against taken
 * out, i is an authority no more. The second is the rule for two that revoke each other, widened so
 * that keys which the loser admits afterwards do not get round it. revoked(t)     some authority's
 * revocation of t is not void member(x)      not revoked, and the founder or with a record from a
 * member that may admit
 *
 * Private to proto. Not here: secrets, sessions. */
#ifndef COVEY_PROTO_MEMBERS_H
#define COVEY_PROTO_MEMBERS_H

#include "base/err.h"
#include "base/id.h"
#include "base/util.h"
#include "proto/identity.h"
#include "proto/trust.h"

#include <stdbool.h>
#include <stdint.h>

enum item_kind { ITEM_RECORD = 1, ITEM_REVOCATION = 2 }; /* as in trust.proto */

enum {
    RECORD_BODY_MAX = 1024,          /* a whole chain of them fits one frame */
    REVOCATION_BODY_MAX = 24 * 1024, /* lists up to TRUST_MEMBERS_MAX keys */
    MEMBERS_BYTES_MAX = 768 * 1024,  /* all bodies: leaves room in TRUST_STORED_MAX */
};

struct item {
    enum item_kind kind;
    struct node_id subject, issuer;
    bool may_admit;
    struct hash256 hash; /* of kind, body and signature */
    uint8_t signature[IDENTITY_SIGNATURE_BYTES];
    uint8_t *body;
    uint32_t n_body;
};

/* By which an item is known in the set. */
void item_hash(enum item_kind kind, const uint8_t *body, size_t n_body,
               const uint8_t signature[IDENTITY_SIGNATURE_BYTES], struct hash256 *ret);

struct members;

enum err members_new(const struct hash256 *cluster, const struct node_id *founder,
                     struct members **ret);
enum err members_clone(const struct members *m, struct members **ret);
void members_free(struct members *m);
DEFINE_CLEANUP(struct members, members_free)

/* Takes in one signed item; *ret_new says whether the set changed. ERR_CORRUPT: not a statement of
 * this cluster, or not signed by its issuer; ERR_DENIED: the issuer has no authority that we know
 * of; ERR_LIMIT: the set is full; ERR_NO_MEMORY. Call members_settle before asking what follows. */
enum err members_add(struct members *m, enum item_kind kind, const uint8_t *body, size_t n_body,
                     const uint8_t signature[IDENTITY_SIGNATURE_BYTES], bool *ret_new);
/* Signs and adds. Errors as above. */
enum err members_admit(struct members *m, const struct identity *issuer,
                       const struct node_id *subject, bool may_admit);
enum err members_revoke(struct members *m, const struct identity *issuer,
                        const struct node_id *subject);

/* Works out what follows from the set. ERR_NO_MEMORY: nothing changed, call again. */
enum err members_settle(struct members *m);

/* As of the last members_settle. */
enum trust_role members_role(const struct members *m, const struct node_id *id);
bool members_at(const struct members *m, uint32_t i, struct trust_member *ret);
uint32_t members_count(const struct members *m); /* members and workers */
/* Would `id` still be a member if `without` were revoked? */
bool members_stands_without(const struct members *m, const struct node_id *id,
                            const struct node_id *without);
/* The records from the founder to `id`, founder's first; returns how many (0: no chain). */
uint32_t members_chain(const struct members *m, const struct node_id *id,
                       const struct item *ret[TRUST_CHAIN_MAX]);

/* The items, each after those that its issuer's authority rests on. Pointers hold until the set
 * changes. */
uint32_t members_n_items(const struct members *m);
const struct item *members_item(const struct members *m, uint32_t i);
/* Of the whole set, whatever the order. */
void members_digest(const struct members *m, struct hash256 *ret);

#endif
