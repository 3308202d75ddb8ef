#include "proto/datagram.h"

#include "base/buf.h"

#include <string.h>

#include <sodium.h>

/* Key and id of one direction, from the session's export and a word for who sends. */
static void derive(const uint8_t master[32], const char *sender, uint8_t key[32], uint64_t *ret_id)
{
    uint8_t out[64];
    (void)crypto_generichash(out, sizeof out, (const uint8_t *)sender, strlen(sender), master, 32);
    memcpy(key, out, 32);
    struct reader r = reader_of(out + 32, 8);
    *ret_id = read_u64(&r);
    sodium_memzero(out, sizeof out);
}

void datagram_init(struct datagram *d, const uint8_t master[32], enum session_role role)
{
    static const char *const senders[] = {"covey datagram initiator", "covey datagram responder"};
    bool initiator = role == SESSION_INITIATOR;
    memset(d, 0, sizeof *d);
    derive(master, senders[initiator ? 0 : 1], d->send_key, &d->send_id);
    derive(master, senders[initiator ? 1 : 0], d->receive_key, &d->receive_id);
}

void datagram_wipe(struct datagram *d)
{
    sodium_memzero(d, sizeof *d);
}

static void nonce_of(uint64_t counter, uint8_t ret[12])
{
    struct writer w = writer_of(ret, 12);
    write_u32(&w, 0);
    write_u64(&w, counter);
}

enum err datagram_key_id(const uint8_t *bytes, size_t n, uint64_t *ret_id)
{
    if (n < DATAGRAM_OVERHEAD || n > DATAGRAM_BYTES_MAX)
        return ERR_CORRUPT;
    struct reader r = reader_of(bytes, n);
    *ret_id = read_u64(&r);
    return ERR_OK;
}

enum err datagram_seal(struct datagram *d, uint8_t channel, const uint8_t *payload, size_t n,
                       uint8_t ret[DATAGRAM_BYTES_MAX], size_t *ret_n)
{
    if (n > DATAGRAM_PAYLOAD_MAX || d->send_counter == UINT64_MAX)
        return ERR_LIMIT;
    uint8_t nonce[12];
    nonce_of(d->send_counter, nonce);
    struct writer w = writer_of(ret, DATAGRAM_BYTES_MAX);
    write_u64(&w, d->send_id);
    write_u64(&w, d->send_counter);
    write_u8(&w, channel);
    write_bytes(&w, payload, n);
    uint8_t *sealed = ret + DATAGRAM_HEADER_BYTES;
    (void)crypto_aead_chacha20poly1305_ietf_encrypt(
        sealed, NULL, sealed, n + 1, ret, DATAGRAM_HEADER_BYTES, NULL, nonce, d->send_key);
    d->send_counter++;
    *ret_n = n + DATAGRAM_OVERHEAD;
    return ERR_OK;
}

/* The window of counters [highest - DATAGRAM_WINDOW, highest): a ring of bits, RFC 6479's way. */
static bool is_seen(const struct datagram *d, uint64_t counter)
{
    if (counter >= d->highest)
        return false;
    if (d->highest - counter > DATAGRAM_WINDOW)
        return true;
    uint64_t bit = counter % DATAGRAM_WINDOW;
    return d->seen[bit / 64] >> (bit % 64) & 1;
}

static void mark_seen(struct datagram *d, uint64_t counter)
{
    if (counter >= d->highest) {
        uint64_t n_new = counter + 1 - d->highest;
        if (n_new >= DATAGRAM_WINDOW)
            memset(d->seen, 0, sizeof d->seen);
        else
            for (uint64_t c = d->highest; c <= counter; c++)
                d->seen[c % DATAGRAM_WINDOW / 64] &= ~(UINT64_C(1) << (c % 64));
        d->highest = counter + 1;
    }
    uint64_t bit = counter % DATAGRAM_WINDOW;
    d->seen[bit / 64] |= UINT64_C(1) << (bit % 64);
}

enum err datagram_open(struct datagram *d, const uint8_t *bytes, size_t n,
                       uint8_t ret[DATAGRAM_PAYLOAD_MAX], size_t *ret_n, uint8_t *ret_channel)
{
    if (n < DATAGRAM_OVERHEAD || n > DATAGRAM_BYTES_MAX)
        return ERR_CORRUPT;
    struct reader r = reader_of(bytes, n);
    uint64_t id = read_u64(&r), counter = read_u64(&r);
    if (id != d->receive_id || counter == UINT64_MAX)
        return ERR_DENIED;
    if (is_seen(d, counter))
        return ERR_STALE;
    uint8_t nonce[12], plain[DATAGRAM_PAYLOAD_MAX + 1];
    nonce_of(counter, nonce);
    if (crypto_aead_chacha20poly1305_ietf_decrypt(plain, NULL, NULL, r.p, r.left, bytes,
                                                  DATAGRAM_HEADER_BYTES, nonce,
                                                  d->receive_key) != 0)
        return ERR_DENIED;
    mark_seen(d, counter);
    *ret_channel = plain[0];
    *ret_n = n - DATAGRAM_OVERHEAD;
    memcpy(ret, plain + 1, *ret_n);
    return ERR_OK;
}
