#include "proto/session.h"

#include "base/buf.h"
#include "proto/noise.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include <sodium.h>

enum {
    HEADER_BYTES = 8,
    SECOND_BYTES = 32 + 48 + 16, /* ephemeral key, sealed static key, tag */
    THIRD_BYTES = 48 + 16,
    LENGTH_BYTES = 4,
    SEALED_MIN = 2 + NOISE_TAG_BYTES,
    SEALED_MAX = FRAME_PAYLOAD_MAX + SEALED_MIN,
};
_Static_assert((int)SEALED_MAX <= (int)NOISE_MESSAGE_MAX, "a frame is one Noise message");

enum phase {
    AWAIT_FIRST,  /* responder */
    AWAIT_SECOND, /* initiator */
    AWAIT_THIRD,  /* responder */
    AWAIT_LENGTH,
    AWAIT_FRAME,
    FAILED,
};

struct session {
    enum session_role role;
    enum phase phase;
    enum err failure;
    struct random_source random;
    uint8_t static_public[32], static_secret[32];
    struct session_psk *psks;
    uint32_t n_psks;
    uint64_t psk_tag;
    struct noise_handshake handshake;
    struct noise_cipher send, receive;
    uint8_t export_key[NOISE_HASH_BYTES];
    uint64_t n_sent, n_received;
    uint8_t length[LENGTH_BYTES]; /* of the frame being read: its associated data */
    size_t want;                  /* bytes that complete what is awaited */
    struct buf in, out;
};

static const uint8_t header[HEADER_BYTES] = {'c', 'o', 'v', 'e', 'y', 0, 0, SESSION_VERSION};

static void start_handshake(struct session *s, const uint8_t psk[SESSION_KEY_BYTES],
                            const uint8_t ephemeral_secret[32])
{
    noise_start(&s->handshake,
                &(struct noise_options){
                    .pattern = NOISE_XX_PSK0,
                    .role = s->role == SESSION_INITIATOR ? NOISE_INITIATOR : NOISE_RESPONDER,
                    .prologue = header,
                    .n_prologue = sizeof header,
                    .static_public = s->static_public,
                    .static_secret = s->static_secret,
                    .ephemeral_secret = ephemeral_secret,
                    .psk = psk,
                });
}

/* Writes the handshake's next message, with an empty payload, to the output. */
static enum err write_handshake(struct session *s)
{
    uint8_t *to;
    size_t n = noise_overhead(&s->handshake);
    TRY(buf_reserve(&s->out, n, &to));
    TRY(noise_write(&s->handshake, NULL, 0, to));
    s->out.len += n;
    return ERR_OK;
}

static enum err begin(struct session *s)
{
    if (s->role == SESSION_RESPONDER) {
        s->phase = AWAIT_FIRST;
        s->want = SESSION_FIRST_BYTES;
        return ERR_OK;
    }
    uint8_t ephemeral[32];
    s->random.fill(s->random.ctx, ephemeral, sizeof ephemeral);
    start_handshake(s, s->psks[0].key, ephemeral);
    sodium_memzero(ephemeral, sizeof ephemeral);
    s->psk_tag = s->psks[0].tag;
    s->phase = AWAIT_SECOND;
    s->want = SECOND_BYTES;
    TRY(buf_append(&s->out, header, sizeof header));
    return write_handshake(s);
}

static enum err set_up(struct session *s, const struct session_options *options)
{
    s->in = BUF_INIT(SEALED_MAX);
    s->out = BUF_INIT(SESSION_OUTPUT_MAX);
    s->psks = calloc(options->n_psks, sizeof *s->psks);
    if (!s->psks)
        return ERR_NO_MEMORY;
    s->role = options->role;
    s->random = options->random;
    s->n_psks = options->n_psks;
    memcpy(s->psks, options->psks, options->n_psks * sizeof *s->psks);
    memcpy(s->static_public, options->static_public, 32);
    memcpy(s->static_secret, options->static_secret, 32);
    return begin(s);
}

enum err session_new(const struct session_options *options, struct session **ret)
{
    if (options->n_psks == 0 || options->n_psks > SESSION_PSKS_MAX ||
        (options->role == SESSION_INITIATOR && options->n_psks != 1))
        return ERR_INVALID;
    struct session *s = calloc(1, sizeof *s);
    if (!s)
        return ERR_NO_MEMORY;
    enum err e = set_up(s, options);
    if (e != ERR_OK) {
        session_free(s);
        return e;
    }
    *ret = s;
    return ERR_OK;
}

/* What only the handshake needs. */
static void forget_handshake(struct session *s)
{
    if (s->psks)
        sodium_memzero(s->psks, s->n_psks * sizeof *s->psks);
    free(s->psks);
    s->psks = NULL;
    s->n_psks = 0;
    noise_wipe(&s->handshake);
    sodium_memzero(s->static_secret, sizeof s->static_secret);
}

void session_free(struct session *s)
{
    if (!s)
        return;
    forget_handshake(s);
    if (s->in.data)
        sodium_memzero(s->in.data, s->in.cap);
    buf_deinit(&s->in);
    buf_deinit(&s->out);
    sodium_memzero(s, sizeof *s);
    free(s);
}

static enum err read_first(struct session *s, const uint8_t *bytes)
{
    if (memcmp(bytes, header, HEADER_BYTES - 1) != 0)
        return ERR_CORRUPT;
    if (bytes[HEADER_BYTES - 1] != SESSION_VERSION)
        return ERR_UNSUPPORTED;
    uint8_t ephemeral[32] = {0}, none[1];
    for (uint32_t i = 0; i < s->n_psks; i++) {
        /* Our ephemeral key is not needed to read the first message: a stranger costs no
         * randomness. */
        start_handshake(s, s->psks[i].key, ephemeral);
        if (noise_read(&s->handshake, bytes + HEADER_BYTES, SESSION_FIRST_BYTES - HEADER_BYTES,
                       none) != ERR_OK)
            continue;
        s->random.fill(s->random.ctx, ephemeral, sizeof ephemeral);
        noise_set_ephemeral(&s->handshake, ephemeral);
        sodium_memzero(ephemeral, sizeof ephemeral);
        s->psk_tag = s->psks[i].tag;
        s->phase = AWAIT_THIRD;
        s->want = THIRD_BYTES;
        return write_handshake(s);
    }
    return ERR_DENIED;
}

static void become_ready(struct session *s, struct session_event *ret)
{
    noise_split(&s->handshake, &s->send, &s->receive, s->export_key);
    ret->kind = SESSION_EVENT_READY;
    memcpy(ret->peer_static, s->handshake.peer_static, sizeof ret->peer_static);
    ret->psk_tag = s->psk_tag;
    forget_handshake(s);
    s->phase = AWAIT_LENGTH;
    s->want = LENGTH_BYTES;
}

static enum err read_length(struct session *s, const uint8_t *bytes)
{
    struct reader r = reader_of(bytes, LENGTH_BYTES);
    uint32_t n = read_u32(&r);
    if (n < SEALED_MIN || n > SEALED_MAX)
        return ERR_CORRUPT;
    memcpy(s->length, bytes, LENGTH_BYTES);
    s->phase = AWAIT_FRAME;
    s->want = n;
    return ERR_OK;
}

static void count(struct noise_cipher *cipher, uint64_t *n)
{
    if (++*n % SESSION_REKEY_FRAMES == 0)
        noise_rekey(cipher);
}

static enum err read_frame(struct session *s, uint8_t *bytes, struct session_event *ret)
{
    TRY(noise_open(&s->receive, s->length, sizeof s->length, bytes, s->want, bytes));
    count(&s->receive, &s->n_received);
    ret->kind = SESSION_EVENT_FRAME;
    ret->channel = bytes[0];
    ret->flags = bytes[1];
    ret->bytes = bytes + 2;
    ret->len = (uint32_t)(s->want - SEALED_MIN);
    s->phase = AWAIT_LENGTH;
    s->want = LENGTH_BYTES;
    return ERR_OK;
}

/* What was awaited is complete in `in`. */
static enum err take(struct session *s, struct session_event *ret)
{
    uint8_t none[1], *bytes = s->in.data;
    switch (s->phase) {
    case AWAIT_FIRST:
        return read_first(s, bytes);
    case AWAIT_SECOND:
        TRY(noise_read(&s->handshake, bytes, SECOND_BYTES, none));
        TRY(write_handshake(s));
        become_ready(s, ret);
        return ERR_OK;
    case AWAIT_THIRD:
        TRY(noise_read(&s->handshake, bytes, THIRD_BYTES, none));
        become_ready(s, ret);
        return ERR_OK;
    case AWAIT_LENGTH:
        return read_length(s, bytes);
    case AWAIT_FRAME:
        return read_frame(s, bytes, ret);
    case FAILED:
        break;
    }
    return s->failure;
}

static enum err feed(struct session *s, const uint8_t *bytes, size_t n, size_t *ret_used,
                     struct session_event *ret_event)
{
    while (ret_event->kind == SESSION_EVENT_NONE) {
        size_t k = MIN_OF(n - *ret_used, s->want - s->in.len);
        TRY(buf_append(&s->in, bytes + *ret_used, k));
        *ret_used += k;
        if (s->in.len < s->want)
            break;
        enum err e = take(s, ret_event);
        s->in.len = 0; /* an event's bytes stay where they are until the next call */
        TRY(e);
    }
    return ERR_OK;
}

enum err session_feed(struct session *s, const uint8_t *bytes, size_t n, size_t *ret_used,
                      struct session_event *ret_event)
{
    *ret_event = (struct session_event){.kind = SESSION_EVENT_NONE};
    *ret_used = 0;
    if (s->phase == FAILED)
        return s->failure;
    enum err e = feed(s, bytes, n, ret_used, ret_event);
    if (e != ERR_OK) {
        forget_handshake(s);
        buf_deinit(&s->out);
        s->phase = FAILED;
        s->failure = e;
        *ret_event = (struct session_event){.kind = SESSION_EVENT_NONE};
    }
    return e;
}

enum err session_send(struct session *s, uint8_t channel, uint8_t flags, const uint8_t *bytes,
                      size_t n)
{
    if (s->phase == FAILED)
        return s->failure;
    if (!session_is_ready(s))
        return ERR_AGAIN;
    if (n > FRAME_PAYLOAD_MAX)
        return ERR_LIMIT;
    if (n + SESSION_FRAME_OVERHEAD > s->out.max - s->out.len)
        return ERR_BUSY;
    uint8_t *to;
    TRY(buf_reserve(&s->out, n + SESSION_FRAME_OVERHEAD, &to));
    struct writer w = writer_of(to, n + SESSION_FRAME_OVERHEAD);
    write_u32(&w, (uint32_t)(n + SEALED_MIN));
    write_u8(&w, channel);
    write_u8(&w, flags);
    write_bytes(&w, bytes, n);
    assert(!w.bad);
    TRY(noise_seal(&s->send, to, LENGTH_BYTES, to + LENGTH_BYTES, n + 2, to + LENGTH_BYTES));
    count(&s->send, &s->n_sent);
    s->out.len += n + SESSION_FRAME_OVERHEAD;
    return ERR_OK;
}

const uint8_t *session_output(const struct session *s, size_t *ret_n)
{
    *ret_n = s->out.len;
    return s->out.data;
}

void session_output_consume(struct session *s, size_t k)
{
    assert(k <= s->out.len);
    buf_consume(&s->out, k);
}

bool session_is_ready(const struct session *s)
{
    return s->phase == AWAIT_LENGTH || s->phase == AWAIT_FRAME;
}

enum err session_export(const struct session *s, const char *label, uint8_t ret[SESSION_KEY_BYTES])
{
    if (!session_is_ready(s))
        return ERR_AGAIN;
    noise_export(s->export_key, label, ret);
    return ERR_OK;
}

enum session_role session_role(const struct session *s)
{
    return s->role;
}
