#include "transport/seal.h"

#include "base/buf.h"

#include <assert.h>
#include <sodium.h>
#include <stdlib.h>
#include <string.h>

enum { NONCE_BYTES = 12 };
static_assert(SEAL_TAG_BYTES == crypto_aead_chacha20poly1305_ietf_ABYTES, "tag");
static_assert(SEAL_TAG_BYTES == crypto_aead_aes256gcm_ABYTES, "tag");
static_assert(NONCE_BYTES == crypto_aead_chacha20poly1305_ietf_NPUBBYTES, "nonce");
static_assert(NONCE_BYTES == crypto_aead_aes256gcm_NPUBBYTES, "nonce");

struct seal {
    crypto_aead_aes256gcm_state aes; /* first, for its alignment */
    uint64_t counter;
    uint8_t key[SEAL_KEY_BYTES];
    uint8_t cipher;
};

bool seal_has_aes(void)
{
    return sodium_init() >= 0 && crypto_aead_aes256gcm_is_available() == 1;
}

enum err seal_new(uint8_t cipher, const uint8_t key[SEAL_KEY_BYTES], struct seal **ret)
{
    if (sodium_init() < 0)
        return ERR_IO;
    if (cipher != SEAL_CHACHA20_POLY1305 && (cipher != SEAL_AES_256_GCM || !seal_has_aes()))
        return ERR_UNSUPPORTED;
    size_t align = _Alignof(struct seal) < 16 ? 16 : _Alignof(struct seal);
    struct seal *s = aligned_alloc(align, (sizeof *s + align - 1) / align * align);
    if (!s)
        return ERR_NO_MEMORY;
    s->cipher = cipher;
    s->counter = 0;
    memcpy(s->key, key, sizeof s->key);
    if (cipher == SEAL_AES_256_GCM)
        (void)crypto_aead_aes256gcm_beforenm(&s->aes, key);
    *ret = s;
    return ERR_OK;
}

void seal_free(struct seal *s)
{
    if (!s)
        return;
    sodium_memzero(s, sizeof *s);
    free(s);
}

static void next_nonce(struct seal *s, uint8_t nonce[NONCE_BYTES])
{
    struct writer w = writer_of(nonce, NONCE_BYTES);
    write_u32(&w, 0);
    write_u64(&w, s->counter++);
    assert(s->counter != 0);
}

void seal_record(struct seal *s, const uint8_t *plain, size_t n, uint8_t *to)
{
    assert(n >= 1 && n <= SEAL_PLAIN_MAX);
    uint8_t nonce[NONCE_BYTES];
    next_nonce(s, nonce);
    struct writer w = writer_of(to, SEAL_PREFIX_BYTES);
    write_u32(&w, (uint32_t)(n + SEAL_TAG_BYTES));
    uint8_t *c = to + SEAL_PREFIX_BYTES;
    if (s->cipher == SEAL_AES_256_GCM)
        (void)crypto_aead_aes256gcm_encrypt_afternm(c, NULL, plain, n, to, SEAL_PREFIX_BYTES, NULL,
                                                    nonce, &s->aes);
    else
        (void)crypto_aead_chacha20poly1305_ietf_encrypt(c, NULL, plain, n, to, SEAL_PREFIX_BYTES,
                                                        NULL, nonce, s->key);
}

enum err seal_record_length(const uint8_t prefix[SEAL_PREFIX_BYTES], size_t *ret_n)
{
    struct reader r = reader_of(prefix, SEAL_PREFIX_BYTES);
    uint32_t n = read_u32(&r);
    if (n <= SEAL_TAG_BYTES || n > SEAL_PLAIN_MAX + SEAL_TAG_BYTES)
        return ERR_CORRUPT;
    *ret_n = n - SEAL_TAG_BYTES;
    return ERR_OK;
}

enum err seal_open(struct seal *s, const uint8_t *record, size_t n, uint8_t *to)
{
    uint8_t nonce[NONCE_BYTES];
    next_nonce(s, nonce);
    const uint8_t *c = record + SEAL_PREFIX_BYTES;
    size_t n_c = n + SEAL_TAG_BYTES;
    int bad;
    if (s->cipher == SEAL_AES_256_GCM)
        bad = crypto_aead_aes256gcm_decrypt_afternm(to, NULL, NULL, c, n_c, record,
                                                    SEAL_PREFIX_BYTES, nonce, &s->aes);
    else
        bad = crypto_aead_chacha20poly1305_ietf_decrypt(to, NULL, NULL, c, n_c, record,
                                                        SEAL_PREFIX_BYTES, nonce, s->key);
    return bad ? ERR_CORRUPT : ERR_OK;
}
