#include "transport/hello.h"

#include "base/buf.h"
#include "base/util.h"
#include "transport/frame.h"

#include <assert.h>
#include <sodium.h>
#include <string.h>

enum {
    TAG_AT = 96, /* the tag is the last thing of a HELLO */
    TAG_BYTES = 32,
    RESERVED_BYTES = 12,
    ROLE_INITIATOR = 1,
    ROLE_RESPONDER = 2,
    /* What a tag or key is for; the first byte hashed. */
    FOR_HELLO = 1,
    FOR_ANSWER = 2,
    FOR_PROOF = 3,
    FOR_TRAFFIC = 4,
    /* Subkeys of the secret, by number. */
    SUBKEY_ID = 1,
    SUBKEY_AUTH = 2,
    SUBKEY_TRAFFIC = 3,
};
static_assert((int)(TAG_AT + TAG_BYTES) == (int)HELLO_BYTES, "layout");
static_assert((int)HELLO_PROOF_BYTES == (int)TAG_BYTES, "layout");
static_assert(HELLO_SECRET_BYTES == crypto_kdf_KEYBYTES, "the secret is a key");

static const char magic[8] = {'C', 'O', 'V', 'E', 'Y', 'D', 'A', 'T'};
static const char subkey_context[crypto_kdf_CONTEXTBYTES] = {'c', 'o', 'v', 'e',
                                                             'y', 'd', 'a', 't'};

struct gate_key {
    struct hello_key key;
    uint8_t id[HELLO_KEY_ID_BYTES];
};

struct recent {
    uint8_t id[HELLO_KEY_ID_BYTES];
    uint8_t nonce[HELLO_NONCE_BYTES];
};

struct hello_gate {
    struct gate_key keys[HELLO_KEYS_MAX]; /* oldest first */
    unsigned n_keys;
    struct recent recent[HELLO_RECENT_MAX]; /* a ring */
    unsigned n_recent, recent_at;
};

enum hello_state { START, WAIT_ANSWER, WAIT_HELLO, WAIT_PROOF, DONE, FAILED };

struct hello {
    enum hello_state state;
    struct hello_gate *gate; /* the responder's */
    struct hello_key key;
    struct hello_facts own, theirs;
    uint8_t kind;
    uint8_t nonce[HELLO_NONCE_BYTES];
    uint8_t first[HELLO_BYTES], answer[HELLO_BYTES]; /* as they went over the wire */
};

/* The fields of a HELLO before its tag. */
struct opening {
    uint16_t version;
    uint8_t kind, role;
    uint8_t key_id[HELLO_KEY_ID_BYTES];
    uint8_t nonce[HELLO_NONCE_BYTES];
    struct hello_facts facts;
    uint64_t boot_id, peer_boot_id;
};

/* ---- keys ---- */

static void subkey(const uint8_t secret[HELLO_SECRET_BYTES], uint64_t number, uint8_t ret[32])
{
    (void)crypto_kdf_derive_from_key(ret, 32, number, subkey_context, secret);
}

static void key_id_of(const uint8_t secret[HELLO_SECRET_BYTES], uint8_t ret[HELLO_KEY_ID_BYTES])
{
    uint8_t id[32];
    subkey(secret, SUBKEY_ID, id);
    memcpy(ret, id, HELLO_KEY_ID_BYTES);
}

/* Keyed BLAKE2b over the purpose and the two messages (as far as they are given). */
static void keyed_hash(const struct hello *h, uint64_t number, uint8_t purpose, size_t n_first,
                       size_t n_answer, uint8_t *ret, size_t n_ret)
{
    uint8_t key[32];
    crypto_generichash_state s;
    subkey(h->key.secret, number, key);
    (void)crypto_generichash_init(&s, key, sizeof key, n_ret);
    (void)crypto_generichash_update(&s, &purpose, 1);
    (void)crypto_generichash_update(&s, h->first, n_first);
    if (n_answer)
        (void)crypto_generichash_update(&s, h->answer, n_answer);
    (void)crypto_generichash_final(&s, ret, n_ret);
    sodium_memzero(key, sizeof key);
    sodium_memzero(&s, sizeof s);
}

static void tag_of(const struct hello *h, uint8_t purpose, uint8_t ret[TAG_BYTES])
{
    size_t n_first = purpose == FOR_HELLO ? TAG_AT : HELLO_BYTES;
    size_t n_answer = purpose == FOR_HELLO ? 0 : purpose == FOR_ANSWER ? TAG_AT : HELLO_BYTES;
    keyed_hash(h, SUBKEY_AUTH, purpose, n_first, n_answer, ret, TAG_BYTES);
}

static bool tag_right(const struct hello *h, uint8_t purpose, const uint8_t tag[TAG_BYTES])
{
    uint8_t expected[TAG_BYTES];
    tag_of(h, purpose, expected);
    return sodium_memcmp(expected, tag, TAG_BYTES) == 0;
}

/* ---- the gate ---- */

enum err hello_gate_new(struct hello_gate **ret)
{
    if (sodium_init() < 0)
        return ERR_IO;
    struct hello_gate *g = calloc(1, sizeof *g);
    if (!g)
        return ERR_NO_MEMORY;
    *ret = g;
    return ERR_OK;
}

void hello_gate_free(struct hello_gate *g)
{
    if (!g)
        return;
    sodium_memzero(g, sizeof *g);
    free(g);
}

static void drop_key(struct hello_gate *g, unsigned i)
{
    g->n_keys--;
    memmove(&g->keys[i], &g->keys[i + 1], (g->n_keys - i) * sizeof g->keys[0]);
    sodium_memzero(&g->keys[g->n_keys], sizeof g->keys[0]);
}

void hello_gate_remove(struct hello_gate *g, const uint8_t secret[HELLO_SECRET_BYTES])
{
    for (unsigned i = g->n_keys; i-- > 0;) {
        if (sodium_memcmp(g->keys[i].key.secret, secret, HELLO_SECRET_BYTES) == 0)
            drop_key(g, i);
    }
}

void hello_gate_remove_peer(struct hello_gate *g, const struct node_id *peer)
{
    for (unsigned i = g->n_keys; i-- > 0;) {
        if (node_id_eq(&g->keys[i].key.peer, peer))
            drop_key(g, i);
    }
}

enum err hello_gate_add(struct hello_gate *g, const struct hello_key *key)
{
    hello_gate_remove(g, key->secret);
    if (g->n_keys == HELLO_KEYS_MAX)
        return ERR_LIMIT;
    struct gate_key *k = &g->keys[g->n_keys++];
    k->key = *key;
    key_id_of(key->secret, k->id);
    return ERR_OK;
}

const struct hello_key *hello_gate_find(const struct hello_gate *g, const struct node_id *peer)
{
    for (unsigned i = g->n_keys; i-- > 0;) {
        if (node_id_eq(&g->keys[i].key.peer, peer))
            return &g->keys[i].key;
    }
    return NULL;
}

static const struct hello_key *find_by_id(const struct hello_gate *g,
                                          const uint8_t id[HELLO_KEY_ID_BYTES])
{
    for (unsigned i = 0; i < g->n_keys; i++) {
        if (memcmp(g->keys[i].id, id, HELLO_KEY_ID_BYTES) == 0)
            return &g->keys[i].key;
    }
    return NULL;
}

/* Remembers it; false when it was seen before. Only for HELLOs with a right tag, so that strangers
 * cannot fill the memory. */
static bool remember(struct hello_gate *g, const struct opening *o)
{
    struct recent r;
    memcpy(r.id, o->key_id, sizeof r.id);
    memcpy(r.nonce, o->nonce, sizeof r.nonce);
    for (unsigned i = 0; i < g->n_recent; i++) {
        if (memcmp(&g->recent[i], &r, sizeof r) == 0)
            return false;
    }
    g->recent[g->recent_at] = r;
    g->recent_at = (g->recent_at + 1) % HELLO_RECENT_MAX;
    if (g->n_recent < HELLO_RECENT_MAX)
        g->n_recent++;
    return true;
}

/* ---- encoding ---- */

static void encode(const struct hello *h, uint8_t role, uint8_t to[HELLO_BYTES])
{
    static const uint8_t zeros[RESERVED_BYTES];
    uint8_t key_id[HELLO_KEY_ID_BYTES];
    struct writer w = writer_of(to, HELLO_BYTES);
    key_id_of(h->key.secret, key_id);
    write_bytes(&w, magic, sizeof magic);
    write_u16(&w, HELLO_VERSION);
    write_u8(&w, h->kind);
    write_u8(&w, role);
    write_u32(&w, h->own.features);
    write_bytes(&w, key_id, sizeof key_id);
    write_bytes(&w, h->nonce, sizeof h->nonce);
    write_u16(&w, h->own.protocol_min);
    write_u16(&w, h->own.protocol_max);
    write_u32(&w, h->own.arithmetic_version);
    write_u64(&w, h->own.kernel_digest);
    write_u64(&w, h->key.own_boot_id);
    write_u64(&w, h->key.peer_boot_id);
    write_u64(&w, h->own.types);
    write_u32(&w, h->own.frame_bytes_max);
    write_bytes(&w, zeros, sizeof zeros);
    assert(!w.bad && w.len == TAG_AT);
    tag_of(h, role == ROLE_INITIATOR ? FOR_HELLO : FOR_ANSWER, to + TAG_AT);
}

static enum err decode(const uint8_t bytes[HELLO_BYTES], uint8_t role, struct opening *o)
{
    uint8_t m[sizeof magic];
    struct reader r = reader_of(bytes, TAG_AT);
    read_bytes(&r, m, sizeof m);
    o->version = read_u16(&r);
    o->kind = read_u8(&r);
    o->role = read_u8(&r);
    o->facts.features = read_u32(&r);
    read_bytes(&r, o->key_id, sizeof o->key_id);
    read_bytes(&r, o->nonce, sizeof o->nonce);
    o->facts.protocol_min = read_u16(&r);
    o->facts.protocol_max = read_u16(&r);
    o->facts.arithmetic_version = read_u32(&r);
    o->facts.kernel_digest = read_u64(&r);
    o->boot_id = read_u64(&r);
    o->peer_boot_id = read_u64(&r);
    o->facts.types = read_u64(&r);
    o->facts.frame_bytes_max = read_u32(&r);
    if (memcmp(m, magic, sizeof m) != 0 || o->role != role || o->kind < HELLO_DATA ||
        o->kind >= HELLO_KIND_N || o->facts.protocol_min > o->facts.protocol_max)
        return ERR_CORRUPT;
    return o->version == HELLO_VERSION ? ERR_OK : ERR_UNSUPPORTED;
}

/* ---- the conversation ---- */

static struct hello *hello_new(const struct hello_facts *own, const uint8_t *nonce)
{
    struct hello *h = sodium_init() < 0 ? NULL : calloc(1, sizeof *h);
    if (!h)
        return NULL;
    h->own = *own;
    if (!seal_has_aes())
        h->own.features &= ~(uint32_t)HELLO_AES;
    memcpy(h->nonce, nonce, sizeof h->nonce);
    return h;
}

enum err hello_new_initiator(const struct hello_key *key, uint8_t kind,
                             const struct hello_facts *own, const uint8_t nonce[HELLO_NONCE_BYTES],
                             struct hello **ret)
{
    if (kind < HELLO_DATA || kind >= HELLO_KIND_N)
        return ERR_INVALID;
    struct hello *h = hello_new(own, nonce);
    if (!h)
        return ERR_NO_MEMORY;
    h->state = START;
    h->key = *key;
    h->kind = kind;
    *ret = h;
    return ERR_OK;
}

enum err hello_new_responder(struct hello_gate *gate, const struct hello_facts *own,
                             const uint8_t nonce[HELLO_NONCE_BYTES], struct hello **ret)
{
    struct hello *h = hello_new(own, nonce);
    if (!h)
        return ERR_NO_MEMORY;
    h->state = WAIT_HELLO;
    h->gate = gate;
    *ret = h;
    return ERR_OK;
}

void hello_free(struct hello *h)
{
    if (!h)
        return;
    sodium_memzero(h, sizeof *h);
    free(h);
}

size_t hello_wants(const struct hello *h)
{
    switch (h->state) {
    case WAIT_ANSWER:
    case WAIT_HELLO:
        return HELLO_BYTES;
    case WAIT_PROOF:
        return HELLO_PROOF_BYTES;
    default:
        return 0;
    }
}

static uint16_t common_protocol(const struct hello *h)
{
    uint16_t high = MIN_OF(h->own.protocol_max, h->theirs.protocol_max);
    uint16_t low = MAX_OF(h->own.protocol_min, h->theirs.protocol_min);
    return low <= high ? high : 0;
}

/* Both sides can come to terms. */
static bool fits(const struct hello *h)
{
    return common_protocol(h) > 0 && h->theirs.frame_bytes_max >= FRAME_STEP_HEADER_MAX;
}

static bool boots_right(const struct hello *h, const struct opening *o)
{
    return o->boot_id == h->key.peer_boot_id && o->peer_boot_id == h->key.own_boot_id;
}

static enum err take_hello(struct hello *h, const uint8_t *bytes, struct hello_update *ret)
{
    struct opening o;
    TRY(decode(bytes, ROLE_INITIATOR, &o));
    const struct hello_key *key = find_by_id(h->gate, o.key_id);
    if (!key)
        return ERR_DENIED;
    h->key = *key;
    h->kind = o.kind;
    h->theirs = o.facts;
    memcpy(h->first, bytes, HELLO_BYTES);
    if (!tag_right(h, FOR_HELLO, bytes + TAG_AT) || !boots_right(h, &o) || !remember(h->gate, &o))
        return ERR_DENIED;
    /* An answer goes out even where there is no common version, so that the initiator can say so.
     */
    encode(h, ROLE_RESPONDER, h->answer);
    memcpy(ret->out, h->answer, HELLO_BYTES);
    ret->n_out = HELLO_BYTES;
    h->state = WAIT_PROOF;
    return ERR_OK;
}

static enum err take_answer(struct hello *h, const uint8_t *bytes, struct hello_update *ret)
{
    struct opening o;
    TRY(decode(bytes, ROLE_RESPONDER, &o));
    h->theirs = o.facts;
    memcpy(h->answer, bytes, HELLO_BYTES);
    if (!tag_right(h, FOR_ANSWER, bytes + TAG_AT) || !boots_right(h, &o) || o.kind != h->kind)
        return ERR_DENIED;
    if (!fits(h))
        return ERR_UNSUPPORTED;
    tag_of(h, FOR_PROOF, ret->out);
    ret->n_out = HELLO_PROOF_BYTES;
    ret->done = true;
    h->state = DONE;
    return ERR_OK;
}

static enum err take_proof(struct hello *h, const uint8_t *bytes, struct hello_update *ret)
{
    uint8_t id[HELLO_KEY_ID_BYTES];
    key_id_of(h->key.secret, id);
    /* The session may have ended meanwhile. */
    if (!tag_right(h, FOR_PROOF, bytes) || !find_by_id(h->gate, id))
        return ERR_DENIED;
    if (!fits(h))
        return ERR_UNSUPPORTED;
    ret->done = true;
    h->state = DONE;
    return ERR_OK;
}

static enum err step(struct hello *h, const uint8_t *bytes, struct hello_update *ret)
{
    switch (h->state) {
    case START:
        encode(h, ROLE_INITIATOR, h->first);
        memcpy(ret->out, h->first, HELLO_BYTES);
        ret->n_out = HELLO_BYTES;
        h->state = WAIT_ANSWER;
        return ERR_OK;
    case WAIT_ANSWER:
        return take_answer(h, bytes, ret);
    case WAIT_HELLO:
        return take_hello(h, bytes, ret);
    case WAIT_PROOF:
        return take_proof(h, bytes, ret);
    default:
        return ERR_INVALID;
    }
}

enum err hello_step(struct hello *h, const uint8_t *bytes, size_t n, struct hello_update *ret)
{
    struct hello_update update = {.n_out = 0};
    enum err e = n == hello_wants(h) ? step(h, bytes, &update) : ERR_INVALID;
    if (e != ERR_OK) {
        h->state = FAILED;
        return e;
    }
    *ret = update;
    return ERR_OK;
}

void hello_result_get(const struct hello *h, struct hello_result *ret)
{
    assert(h->state == DONE);
    uint8_t both[2 * SEAL_KEY_BYTES];
    keyed_hash(h, SUBKEY_TRAFFIC, FOR_TRAFFIC, HELLO_BYTES, HELLO_BYTES, both, sizeof both);
    bool aes = (h->own.features & h->theirs.features & HELLO_AES) != 0;
    *ret = (struct hello_result){
        .kind = h->kind,
        .peer = h->key.peer,
        .peer_boot_id = h->key.peer_boot_id,
        .protocol = common_protocol(h),
        .frame_bytes_max = MIN_OF(MIN_OF(h->own.frame_bytes_max, h->theirs.frame_bytes_max),
                                  (uint32_t)FRAME_BYTES_MAX),
        .theirs = h->theirs,
        .keys = {.cipher = aes ? SEAL_AES_256_GCM : SEAL_CHACHA20_POLY1305},
    };
    const uint8_t *from_initiator = both, *from_responder = both + SEAL_KEY_BYTES;
    memcpy(ret->keys.send, h->gate ? from_responder : from_initiator, SEAL_KEY_BYTES);
    memcpy(ret->keys.receive, h->gate ? from_initiator : from_responder, SEAL_KEY_BYTES);
    sodium_memzero(both, sizeof both);
}
