#include "proto/noise.h"

#include <assert.h>
#include <string.h>

#include <sodium.h>

void noise_hmac(const uint8_t key[NOISE_HASH_BYTES], const uint8_t *bytes, size_t n,
                uint8_t ret[NOISE_HASH_BYTES])
{
    uint8_t pad[NOISE_BLOCK_BYTES], inner[NOISE_HASH_BYTES];
    crypto_generichash_state state;
    for (size_t i = 0; i < sizeof pad; i++)
        pad[i] = (uint8_t)((i < NOISE_HASH_BYTES ? key[i] : 0) ^ 0x36);
    (void)crypto_generichash_init(&state, NULL, 0, NOISE_HASH_BYTES);
    (void)crypto_generichash_update(&state, pad, sizeof pad);
    (void)crypto_generichash_update(&state, bytes, n);
    (void)crypto_generichash_final(&state, inner, sizeof inner);
    for (size_t i = 0; i < sizeof pad; i++)
        pad[i] ^= 0x36 ^ 0x5c;
    (void)crypto_generichash_init(&state, NULL, 0, NOISE_HASH_BYTES);
    (void)crypto_generichash_update(&state, pad, sizeof pad);
    (void)crypto_generichash_update(&state, inner, sizeof inner);
    (void)crypto_generichash_final(&state, ret, NOISE_HASH_BYTES);
    sodium_memzero(pad, sizeof pad);
    sodium_memzero(inner, sizeof inner);
    sodium_memzero(&state, sizeof state);
}

void noise_hkdf(const uint8_t chaining_key[NOISE_HASH_BYTES], const uint8_t *input, size_t n,
                uint8_t out1[NOISE_HASH_BYTES], uint8_t out2[NOISE_HASH_BYTES], uint8_t *out3)
{
    uint8_t temp[NOISE_HASH_BYTES], chain[NOISE_HASH_BYTES + 1];
    noise_hmac(chaining_key, input, n, temp);
    chain[0] = 1;
    noise_hmac(temp, chain, 1, out1);
    memcpy(chain, out1, NOISE_HASH_BYTES);
    chain[NOISE_HASH_BYTES] = 2;
    noise_hmac(temp, chain, sizeof chain, out2);
    if (out3) {
        memcpy(chain, out2, NOISE_HASH_BYTES);
        chain[NOISE_HASH_BYTES] = 3;
        noise_hmac(temp, chain, sizeof chain, out3);
    }
    sodium_memzero(temp, sizeof temp);
    sodium_memzero(chain, sizeof chain);
}

/* Section 12.3: 32 zero bits, then the counter little-endian. */
static void nonce_of(uint64_t counter, uint8_t ret[12])
{
    memset(ret, 0, 4);
    for (int i = 0; i < 8; i++)
        ret[4 + i] = (uint8_t)(counter >> (8 * i));
}

enum err noise_seal(struct noise_cipher *c, const uint8_t *ad, size_t n_ad, const uint8_t *text,
                    size_t n, uint8_t *out)
{
    uint8_t nonce[12];
    if (c->nonce == UINT64_MAX) /* reserved for REKEY */
        return ERR_LIMIT;
    nonce_of(c->nonce, nonce);
    (void)crypto_aead_chacha20poly1305_ietf_encrypt(out, NULL, text, n, ad, n_ad, NULL, nonce,
                                                    c->key);
    c->nonce++;
    return ERR_OK;
}

enum err noise_open(struct noise_cipher *c, const uint8_t *ad, size_t n_ad, const uint8_t *sealed,
                    size_t n, uint8_t *out)
{
    uint8_t nonce[12];
    if (n < NOISE_TAG_BYTES)
        return ERR_DENIED;
    if (c->nonce == UINT64_MAX)
        return ERR_LIMIT;
    nonce_of(c->nonce, nonce);
    if (crypto_aead_chacha20poly1305_ietf_decrypt(out, NULL, NULL, sealed, n, ad, n_ad, nonce,
                                                  c->key) != 0)
        return ERR_DENIED;
    c->nonce++;
    return ERR_OK;
}

void noise_rekey(struct noise_cipher *c)
{
    uint8_t nonce[12], zeros[NOISE_KEY_BYTES] = {0}, out[NOISE_KEY_BYTES + NOISE_TAG_BYTES];
    nonce_of(UINT64_MAX, nonce);
    (void)crypto_aead_chacha20poly1305_ietf_encrypt(out, NULL, zeros, sizeof zeros, NULL, 0, NULL,
                                                    nonce, c->key);
    memcpy(c->key, out, sizeof c->key);
    sodium_memzero(out, sizeof out);
}

void noise_public_key(const uint8_t secret[32], uint8_t ret[32])
{
    (void)crypto_scalarmult_base(ret, secret);
}

static void mix_hash(struct noise_handshake *h, const uint8_t *bytes, size_t n)
{
    crypto_generichash_state state;
    (void)crypto_generichash_init(&state, NULL, 0, NOISE_HASH_BYTES);
    (void)crypto_generichash_update(&state, h->hash, sizeof h->hash);
    (void)crypto_generichash_update(&state, bytes, n);
    (void)crypto_generichash_final(&state, h->hash, sizeof h->hash);
}

static void set_key(struct noise_handshake *h, const uint8_t *key)
{
    memcpy(h->cipher.key, key, NOISE_KEY_BYTES); /* a HASHLEN of 64 is cut to 32 */
    h->cipher.has_key = true;
    h->cipher.nonce = 0;
}

static void mix_key(struct noise_handshake *h, const uint8_t *input, size_t n)
{
    uint8_t chaining_key[NOISE_HASH_BYTES], key[NOISE_HASH_BYTES];
    noise_hkdf(h->chaining_key, input, n, chaining_key, key, NULL);
    memcpy(h->chaining_key, chaining_key, sizeof chaining_key);
    set_key(h, key);
    sodium_memzero(chaining_key, sizeof chaining_key);
    sodium_memzero(key, sizeof key);
}

static void mix_key_and_hash(struct noise_handshake *h, const uint8_t *input, size_t n)
{
    uint8_t chaining_key[NOISE_HASH_BYTES], hash[NOISE_HASH_BYTES], key[NOISE_HASH_BYTES];
    noise_hkdf(h->chaining_key, input, n, chaining_key, hash, key);
    memcpy(h->chaining_key, chaining_key, sizeof chaining_key);
    mix_hash(h, hash, sizeof hash);
    set_key(h, key);
    sodium_memzero(chaining_key, sizeof chaining_key);
    sodium_memzero(key, sizeof key);
}

static enum err mix_dh(struct noise_handshake *h, const uint8_t secret[32],
                       const uint8_t public_key[32])
{
    uint8_t shared[32];
    if (crypto_scalarmult(shared, secret, public_key) != 0)
        return ERR_DENIED;
    mix_key(h, shared, sizeof shared);
    sodium_memzero(shared, sizeof shared);
    return ERR_OK;
}

void noise_start(struct noise_handshake *h, const struct noise_options *options)
{
    static const char *const names[NOISE_PATTERN_N] = {
        [NOISE_XX] = "Noise_XX_25519_ChaChaPoly_BLAKE2b",
        [NOISE_XX_PSK0] = "Noise_XXpsk0_25519_ChaChaPoly_BLAKE2b",
        [NOISE_XX_PSK3] = "Noise_XXpsk3_25519_ChaChaPoly_BLAKE2b",
    };
    assert(options->pattern < NOISE_PATTERN_N);
    assert((options->pattern == NOISE_XX) == (options->psk == NULL));
    memset(h, 0, sizeof *h);
    h->pattern = options->pattern;
    h->role = options->role;
    const char *name = names[options->pattern];
    memcpy(h->hash, name, strlen(name)); /* shorter than HASHLEN: padded with zeros */
    memcpy(h->chaining_key, h->hash, sizeof h->hash);
    mix_hash(h, options->prologue, options->n_prologue);
    memcpy(h->static_public, options->static_public, 32);
    memcpy(h->static_secret, options->static_secret, 32);
    if (options->ephemeral_secret)
        noise_set_ephemeral(h, options->ephemeral_secret);
    if (options->psk)
        memcpy(h->psk, options->psk, sizeof h->psk);
}

void noise_set_ephemeral(struct noise_handshake *h, const uint8_t secret[32])
{
    memcpy(h->ephemeral_secret, secret, 32);
    noise_public_key(secret, h->ephemeral_public);
}

/* The tokens of XX, one string of letters for each message: e, s, and E (ee), S (es), T (se), P
 * (psk). */
static const char *tokens_of(const struct noise_handshake *h)
{
    static const char *const tokens[NOISE_PATTERN_N][NOISE_MESSAGES] = {
        [NOISE_XX] = {"e", "eEsS", "sT"},
        [NOISE_XX_PSK0] = {"Pe", "eEsS", "sT"},
        [NOISE_XX_PSK3] = {"e", "eEsS", "sTP"},
    };
    assert(h->message < NOISE_MESSAGES);
    return tokens[h->pattern][h->message];
}

/* The tokens that both sides handle alike: DH by who is who, and the psk. */
static enum err mix_token(struct noise_handshake *h, char token)
{
    bool initiator = h->role == NOISE_INITIATOR;
    switch (token) {
    case 'E':
        return mix_dh(h, h->ephemeral_secret, h->peer_ephemeral);
    case 'S': /* es: the initiator's ephemeral, the responder's static */
        return initiator ? mix_dh(h, h->ephemeral_secret, h->peer_static)
                         : mix_dh(h, h->static_secret, h->peer_ephemeral);
    case 'T': /* se */
        return initiator ? mix_dh(h, h->static_secret, h->peer_ephemeral)
                         : mix_dh(h, h->ephemeral_secret, h->peer_static);
    default:
        mix_key_and_hash(h, h->psk, sizeof h->psk);
        return ERR_OK;
    }
}

/* EncryptAndHash: returns the number of bytes written. */
static size_t seal_and_hash(struct noise_handshake *h, const uint8_t *text, size_t n, uint8_t *out)
{
    size_t n_out = n;
    if (h->cipher.has_key) {
        (void)noise_seal(&h->cipher, h->hash, sizeof h->hash, text, n, out);
        n_out = n + NOISE_TAG_BYTES;
    } else if (n) {
        memmove(out, text, n);
    }
    mix_hash(h, out, n_out);
    return n_out;
}

static enum err open_and_hash(struct noise_handshake *h, const uint8_t *sealed, size_t n,
                              uint8_t *out)
{
    uint8_t hash[NOISE_HASH_BYTES];
    memcpy(hash, h->hash, sizeof hash);
    mix_hash(h, sealed, n);
    if (h->cipher.has_key)
        return noise_open(&h->cipher, hash, sizeof hash, sealed, n, out);
    if (n)
        memmove(out, sealed, n);
    return ERR_OK;
}

size_t noise_overhead(const struct noise_handshake *h)
{
    size_t n = 0;
    bool has_key = h->cipher.has_key;
    for (const char *t = tokens_of(h); *t; t++) {
        if (*t == 'e') {
            n += 32;
            has_key = has_key || h->pattern != NOISE_XX;
        } else if (*t == 's') {
            n += has_key ? 32 + NOISE_TAG_BYTES : 32;
        } else {
            has_key = true;
        }
    }
    return has_key ? n + NOISE_TAG_BYTES : n;
}

static bool is_our_turn(const struct noise_handshake *h)
{
    return (h->message % 2 == 0) == (h->role == NOISE_INITIATOR);
}

enum err noise_write(struct noise_handshake *h, const uint8_t *payload, size_t n, uint8_t *out)
{
    assert(is_our_turn(h));
    for (const char *t = tokens_of(h); *t; t++) {
        if (*t == 'e') {
            memcpy(out, h->ephemeral_public, 32);
            mix_hash(h, h->ephemeral_public, 32);
            if (h->pattern != NOISE_XX)
                mix_key(h, h->ephemeral_public, 32);
            out += 32;
        } else if (*t == 's') {
            out += seal_and_hash(h, h->static_public, 32, out);
        } else {
            TRY(mix_token(h, *t));
        }
    }
    (void)seal_and_hash(h, payload, n, out);
    h->message++;
    return ERR_OK;
}

enum err noise_read(struct noise_handshake *h, const uint8_t *message, size_t n, uint8_t *payload)
{
    assert(!is_our_turn(h));
    if (n < noise_overhead(h))
        return ERR_CORRUPT;
    for (const char *t = tokens_of(h); *t; t++) {
        if (*t == 'e') {
            memcpy(h->peer_ephemeral, message, 32);
            mix_hash(h, message, 32);
            if (h->pattern != NOISE_XX)
                mix_key(h, message, 32);
            message += 32;
            n -= 32;
        } else if (*t == 's') {
            size_t n_static = h->cipher.has_key ? 32 + NOISE_TAG_BYTES : 32;
            TRY(open_and_hash(h, message, n_static, h->peer_static));
            message += n_static;
            n -= n_static;
        } else {
            TRY(mix_token(h, *t));
        }
    }
    TRY(open_and_hash(h, message, n, payload));
    h->message++;
    return ERR_OK;
}

bool noise_is_done(const struct noise_handshake *h)
{
    return h->message == NOISE_MESSAGES;
}

void noise_split(const struct noise_handshake *h, struct noise_cipher *ret_send,
                 struct noise_cipher *ret_receive, uint8_t ret_export[NOISE_HASH_BYTES])
{
    static const char label[] = "covey export";
    uint8_t first[NOISE_HASH_BYTES], second[NOISE_HASH_BYTES];
    bool initiator = h->role == NOISE_INITIATOR;
    assert(noise_is_done(h));
    noise_hkdf(h->chaining_key, NULL, 0, first, second, NULL);
    memset(ret_send, 0, sizeof *ret_send);
    memset(ret_receive, 0, sizeof *ret_receive);
    memcpy(ret_send->key, initiator ? first : second, NOISE_KEY_BYTES);
    memcpy(ret_receive->key, initiator ? second : first, NOISE_KEY_BYTES);
    ret_send->has_key = ret_receive->has_key = true;
    noise_hmac(h->chaining_key, (const uint8_t *)label, sizeof label - 1, ret_export);
    sodium_memzero(first, sizeof first);
    sodium_memzero(second, sizeof second);
}

void noise_export(const uint8_t export_key[NOISE_HASH_BYTES], const char *label, uint8_t ret[32])
{
    uint8_t out[NOISE_HASH_BYTES];
    noise_hmac(export_key, (const uint8_t *)label, strlen(label), out);
    memcpy(ret, out, 32);
    sodium_memzero(out, sizeof out);
}

void noise_wipe(struct noise_handshake *h)
{
    sodium_memzero(h, sizeof *h);
}
