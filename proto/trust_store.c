/* The form of trust on disk: the message Stored, then a checksum. Secrets are in it: mode 0600. */
#include "proto/trust_internal.h"

#include <stdlib.h>
#include <string.h>

#include <sodium.h>

enum { STORE_VERSION = 1, CHECKSUM_BYTES = 32 };

ProtobufCBinaryData pb_view(const uint8_t *bytes, size_t n)
{
    union {
        const uint8_t *in;
        uint8_t *out; /* protobuf-c only reads what it packs */
    } data = {bytes};
    return (ProtobufCBinaryData){.len = n, .data = data.out};
}

void pb_item(const struct item *from, Covey__Trust__Signed *ret)
{
    covey__trust__signed__init(ret);
    ret->kind = from->kind == ITEM_RECORD ? COVEY__TRUST__KIND__KIND_RECORD
                                          : COVEY__TRUST__KIND__KIND_REVOCATION;
    ret->body = pb_view(from->body, from->n_body);
    ret->signature = pb_view(from->signature, sizeof from->signature);
}

bool pb_secret(const Covey__Trust__Secret *from, struct secret *ret)
{
    if (from->key.len != sizeof ret->key)
        return false;
    ret->generation = from->generation;
    memcpy(ret->key, from->key.data, sizeof ret->key);
    return true;
}

/* Everything that Stored points to, in one piece of memory. */
struct stored_parts {
    Covey__Trust__Secret secrets[TRUST_SECRETS_MAX], *secret_pointers[TRUST_SECRETS_MAX];
    ProtobufCBinaryData used[TRUST_USED_MAX];
    Covey__Trust__Signed items[TRUST_RECORDS_MAX + TRUST_REVOCATIONS_MAX];
    Covey__Trust__Signed *item_pointers[TRUST_RECORDS_MAX + TRUST_REVOCATIONS_MAX];
};

static void fill_stored(const struct trust *t, struct stored_parts *parts,
                        Covey__Trust__Stored *ret)
{
    ret->version = STORE_VERSION;
    ret->self = pb_view(t->identity.id.bytes, sizeof t->identity.id.bytes);
    ret->cluster = pb_view(t->cluster.bytes, sizeof t->cluster.bytes);
    ret->founder = pb_view(t->founder.bytes, sizeof t->founder.bytes);
    for (uint32_t i = 0; i < t->n_secrets; i++) {
        covey__trust__secret__init(&parts->secrets[i]);
        parts->secrets[i].generation = t->secrets[i].generation;
        parts->secrets[i].key = pb_view(t->secrets[i].key, sizeof t->secrets[i].key);
        parts->secret_pointers[i] = &parts->secrets[i];
    }
    ret->n_secrets = t->n_secrets;
    ret->secrets = parts->secret_pointers;
    for (uint32_t i = 0; i < t->n_used; i++)
        parts->used[i] = pb_view(t->used[i].bytes, sizeof t->used[i].bytes);
    ret->n_used_tokens = t->n_used;
    ret->used_tokens = parts->used;
    ret->n_items = members_n_items(t->members);
    for (uint32_t i = 0; i < ret->n_items; i++) {
        pb_item(members_item(t->members, i), &parts->items[i]);
        parts->item_pointers[i] = &parts->items[i];
    }
    ret->items = parts->item_pointers;
}

enum err store_encode(const struct trust *t, struct buf *ret)
{
    Covey__Trust__Stored stored = COVEY__TRUST__STORED__INIT;
    _cleanup_(freep) struct stored_parts *parts = malloc(sizeof *parts);
    if (!parts)
        return ERR_NO_MEMORY;
    fill_stored(t, parts, &stored);
    size_t n = covey__trust__stored__get_packed_size(&stored);
    uint8_t *to;
    TRY(buf_reserve(ret, n + CHECKSUM_BYTES, &to));
    (void)covey__trust__stored__pack(&stored, to);
    (void)crypto_generichash(to + n, CHECKSUM_BYTES, to, n, NULL, 0);
    ret->len += n + CHECKSUM_BYTES;
    return ERR_OK;
}

static enum err take_items(struct trust *t, const Covey__Trust__Stored *stored)
{
    for (size_t i = 0; i < stored->n_items; i++) {
        const Covey__Trust__Signed *item = stored->items[i];
        bool is_new;
        if (item->signature.len != IDENTITY_SIGNATURE_BYTES)
            return ERR_CORRUPT;
        TRY(members_add(t->members, (enum item_kind)item->kind, item->body.data, item->body.len,
                        item->signature.data, &is_new));
    }
    return members_settle(t->members);
}

static enum err take_stored(struct trust *t, const Covey__Trust__Stored *stored)
{
    if (stored->version != STORE_VERSION)
        return ERR_UNSUPPORTED;
    if (stored->self.len != 32 || stored->cluster.len != 32 || stored->founder.len != 32 ||
        stored->n_secrets == 0 || stored->n_secrets > TRUST_SECRETS_MAX ||
        stored->n_used_tokens > TRUST_USED_MAX)
        return ERR_CORRUPT;
    if (memcmp(stored->self.data, t->identity.id.bytes, 32) != 0)
        return ERR_STALE;
    memcpy(t->cluster.bytes, stored->cluster.data, 32);
    memcpy(t->founder.bytes, stored->founder.data, 32);
    for (size_t i = 0; i < stored->n_secrets; i++) {
        struct secret secret;
        if (!pb_secret(stored->secrets[i], &secret))
            return ERR_CORRUPT;
        (void)trust_take_secret(t, &secret);
    }
    for (size_t i = 0; i < stored->n_used_tokens; i++) {
        if (stored->used_tokens[i].len != 32)
            return ERR_CORRUPT;
        memcpy(t->used[t->n_used++].bytes, stored->used_tokens[i].data, 32);
    }
    TRY(members_new(&t->cluster, &t->founder, &t->members));
    return take_items(t, stored);
}

/* ERR_STALE: of another key. */
enum err store_decode(struct trust *t, const uint8_t *bytes, size_t n)
{
    uint8_t checksum[CHECKSUM_BYTES];
    if (n < CHECKSUM_BYTES || n > TRUST_STORED_MAX)
        return ERR_CORRUPT;
    n -= CHECKSUM_BYTES;
    (void)crypto_generichash(checksum, sizeof checksum, bytes, n, NULL, 0);
    if (memcmp(checksum, bytes + n, sizeof checksum) != 0)
        return ERR_CORRUPT;
    Covey__Trust__Stored *stored = covey__trust__stored__unpack(NULL, n, bytes);
    if (!stored)
        return ERR_CORRUPT;
    enum err e = take_stored(t, stored);
    covey__trust__stored__free_unpacked(stored, NULL);
    return e;
}
