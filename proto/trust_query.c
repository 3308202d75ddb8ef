/* What the trust core answers between steps. */
#include "proto/trust_internal.h"

#include <assert.h>
#include <string.h>

#include <sodium.h>

enum trust_origin trust_origin(const struct trust *t)
{
    return t->origin;
}

const struct node_id *trust_self_id(const struct trust *t)
{
    return &t->identity.id;
}

const struct node_id *trust_founder(const struct trust *t)
{
    return &t->founder;
}

const struct hash256 *trust_cluster_id(const struct trust *t)
{
    return &t->cluster;
}

enum trust_role trust_role(const struct trust *t, const struct node_id *id)
{
    return members_role(t->members, id);
}

bool trust_is_member(const struct trust *t, const struct node_id *id)
{
    enum trust_role role = trust_role(t, id);
    return role == TRUST_ROLE_MEMBER || role == TRUST_ROLE_WORKER;
}

bool trust_member_at(const struct trust *t, uint32_t i, struct trust_member *ret)
{
    return members_at(t->members, i, ret);
}

uint32_t trust_n_members(const struct trust *t)
{
    return members_count(t->members);
}

static uint64_t tag_of(enum psk_kind kind, uint64_t serial)
{
    return (uint64_t)kind << PSK_KIND_SHIFT | serial;
}

_Static_assert(TRUST_SECRETS_MAX + TRUST_TOKENS_MAX <= SESSION_PSKS_MAX, "all fit a responder");

uint32_t trust_psks(const struct trust *t, uint64_t now_us,
                    struct session_psk ret[SESSION_PSKS_MAX])
{
    uint32_t n = 0;
    for (uint32_t i = t->n_secrets; i-- > 0;) { /* the newest first: the likeliest */
        ret[n].tag = tag_of(PSK_SECRET, 0);
        memcpy(ret[n++].key, t->secrets[i].key, sizeof ret->key);
    }
    for (uint32_t i = 0; i < t->n_tokens; i++) {
        if (t->tokens[i].expires_at_us <= now_us)
            continue;
        ret[n].tag = tag_of(PSK_TOKEN, t->tokens[i].serial);
        token_psk(&t->tokens[i].token, ret[n++].key);
    }
    return n;
}

void trust_dial_psk(const struct trust *t, struct session_psk *ret)
{
    trust_dial_psk_at(t, 0, ret);
}

void trust_dial_psk_at(const struct trust *t, uint32_t attempt, struct session_psk *ret)
{
    assert(t->n_secrets > 0);
    ret->tag = tag_of(PSK_SECRET, 0);
    memcpy(ret->key, t->secrets[t->n_secrets - 1 - attempt % t->n_secrets].key, sizeof ret->key);
}

bool trust_join_psk(const struct trust *t, struct session_psk *ret)
{
    if (!t->join.open)
        return false;
    ret->tag = tag_of(PSK_JOIN, t->join.serial);
    token_psk(&t->join.token, ret->key);
    return true;
}

bool trust_join_tag(const struct trust *t, uint8_t ret[TOKEN_TAG_BYTES])
{
    if (!t->join.open)
        return false;
    token_tag(&t->join.token, ret);
    return true;
}

bool trust_invite_tag(const struct trust *t, uint32_t i, uint64_t now_us,
                      uint8_t ret[TOKEN_TAG_BYTES])
{
    for (uint32_t k = 0; k < t->n_tokens; k++) {
        if (t->tokens[k].expires_at_us <= now_us)
            continue;
        if (i-- == 0) {
            token_tag(&t->tokens[k].token, ret);
            return true;
        }
    }
    return false;
}

static void make_tag(const struct secret *secret, const uint8_t *nonce, const char *instance,
                     uint8_t ret[CLUSTER_TAG_BYTES])
{
    uint8_t mac[crypto_auth_hmacsha256_BYTES];
    crypto_auth_hmacsha256_state state;
    (void)crypto_auth_hmacsha256_init(&state, secret->key, sizeof secret->key);
    (void)crypto_auth_hmacsha256_update(&state, nonce, CLUSTER_TAG_NONCE_BYTES);
    (void)crypto_auth_hmacsha256_update(&state, (const uint8_t *)instance, strlen(instance));
    (void)crypto_auth_hmacsha256_final(&state, mac);
    memmove(ret, nonce, CLUSTER_TAG_NONCE_BYTES);
    memcpy(ret + CLUSTER_TAG_NONCE_BYTES, mac, CLUSTER_TAG_BYTES - CLUSTER_TAG_NONCE_BYTES);
}

void trust_cluster_tag(const struct trust *t, const uint8_t nonce[CLUSTER_TAG_NONCE_BYTES],
                       const char *instance, uint8_t ret[CLUSTER_TAG_BYTES])
{
    make_tag(&t->secrets[t->n_secrets - 1], nonce, instance, ret);
}

bool trust_check_cluster_tag(const struct trust *t, const uint8_t *tag, size_t n,
                             const char *instance)
{
    uint8_t expected[CLUSTER_TAG_BYTES];
    if (n != CLUSTER_TAG_BYTES)
        return false;
    for (uint32_t i = t->n_secrets; i-- > 0;) {
        make_tag(&t->secrets[i], tag, instance, expected);
        if (sodium_memcmp(expected, tag, CLUSTER_TAG_BYTES) == 0)
            return true;
    }
    return false;
}

bool trust_session_peer(const struct trust *t, uint64_t session, struct trust_peer *ret)
{
    for (uint32_t i = 0; i < t->n_talks; i++) {
        if (t->talks[i].session == session && t->talks[i].state == TALK_MEMBER) {
            *ret = t->talks[i].peer;
            return true;
        }
    }
    return false;
}
