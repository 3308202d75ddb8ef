/* Bytes from the network into sealed sessions and datagrams. The first byte of the input chooses:
 * 0  a responder that waits for the first message
 * 1  a responder that waits for the third
 * 2  an initiator that waits for the second
 * 3  either end of a session, after the handshake
 * 4  the input as payloads, sealed by the other end, one bit of the stream flipped: never accepted
 * 5  a datagram
 * The second byte sets how large the pieces are in which they come. */
#include "base/buf.h"
#include "base/rng.h"
#include "proto/datagram.h"
#include "proto/noise.h"
#include "proto/session.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct ends {
    struct rng rng;
    struct session *s[2];
};

static void must(bool good)
{
    if (!good)
        abort();
}

static void fill(void *ctx, uint8_t *to, size_t n)
{
    for (size_t i = 0; i < n; i++)
        to[i] = (uint8_t)rng_u64(ctx);
}

static void ends_open(struct ends *e)
{
    struct session_psk psk = {.key = {7}, .tag = 1};
    rng_seed(&e->rng, 1);
    for (int i = 0; i < 2; i++) {
        uint8_t secret[32] = {(uint8_t)(i + 1)}, public_key[32];
        noise_public_key(secret, public_key);
        must(session_new(&(struct session_options){.role = (enum session_role)i,
                                                   .static_public = public_key,
                                                   .static_secret = secret,
                                                   .psks = &psk,
                                                   .n_psks = 1,
                                                   .random = {fill, &e->rng}},
                         &e->s[i]) == ERR_OK);
    }
}

static void hand_over(struct ends *e, int from)
{
    size_t n, used;
    struct session_event event;
    const uint8_t *bytes = session_output(e->s[from], &n);
    must(session_feed(e->s[!from], bytes, n, &used, &event) == ERR_OK && used == n);
    session_output_consume(e->s[from], n);
}

/* Feeds the bytes piece by piece; counts the frames that come out. */
static int feed(struct session *s, const uint8_t *bytes, size_t n, size_t piece)
{
    int n_frames = 0;
    while (n > 0) {
        size_t used, k = MIN_OF(piece, n);
        struct session_event event;
        enum err e = session_feed(s, bytes, k, &used, &event);
        must(used <= k);
        if (e != ERR_OK) {
            must(session_feed(s, bytes, k, &used, &event) == e && used == 0);
            must(session_send(s, 1, 0, bytes, 1) == e);
            return n_frames;
        }
        must(used > 0);
        n_frames += event.kind == SESSION_EVENT_FRAME;
        bytes += used;
        n -= used;
    }
    return n_frames;
}

static void try_flipped(struct ends *e, const uint8_t *data, size_t size, size_t piece)
{
    size_t n, at = 0;
    int n_sent = 0;
    for (; at < size && n_sent < 16; n_sent++) {
        size_t k = MIN_OF(size - at, (size_t)data[at] * 16);
        must(session_send(e->s[0], data[at], 0, data + at, k) == ERR_OK);
        at += k + 1;
    }
    const uint8_t *out = session_output(e->s[0], &n);
    uint8_t *bytes = malloc(n ? n : 1);
    if (bytes && n) {
        memcpy(bytes, out, n);
        size_t flip = ((size_t)data[0] * 256 + data[size - 1]) % (8 * n);
        bytes[flip / 8] ^= (uint8_t)(1u << flip % 8);
        must(feed(e->s[1], bytes, n, piece) < n_sent);
    }
    free(bytes);
}

static void try_datagram(const uint8_t *data, size_t size)
{
    struct datagram d;
    uint8_t master[32] = {1}, out[DATAGRAM_PAYLOAD_MAX], channel;
    size_t n;
    uint64_t id;
    datagram_init(&d, master, SESSION_RESPONDER);
    (void)datagram_key_id(data, size, &id);
    must(datagram_open(&d, data, size, out, &n, &channel) != ERR_OK);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ends e = {0};
    if (size < 3)
        return 0;
    uint8_t mode = data[0] % 6;
    size_t piece = data[1] ? data[1] : 1 << 16;
    data += 2;
    size -= 2;
    ends_open(&e);
    if (mode == 0) {
        (void)feed(e.s[1], data, size, piece);
    } else if (mode == 1) {
        hand_over(&e, 0);
        (void)feed(e.s[1], data, size, piece);
    } else if (mode == 2) {
        (void)feed(e.s[0], data, size, piece);
    } else {
        hand_over(&e, 0);
        hand_over(&e, 1);
        hand_over(&e, 0);
        if (mode == 3)
            (void)feed(e.s[size % 2], data, size, piece);
        else if (mode == 4)
            try_flipped(&e, data, size, piece);
        else
            try_datagram(data, size);
    }
    session_free(e.s[0]);
    session_free(e.s[1]);
    return 0;
}

#ifdef WRITE_CORPUS
/* cc -DWRITE_CORPUS ... fuzz_session.c && ./a.out FOLDER: the messages of a whole session. */
#include <stdio.h>

static void write_file(const char *folder, uint8_t mode, const uint8_t *bytes, size_t n)
{
    char path[512];
    uint8_t head[2] = {mode, 5};
    (void)snprintf(path, sizeof path, "%s/mode%d", folder, mode);
    FILE *f = fopen(path, "wb");
    must(f && fwrite(head, 1, 2, f) == 2 && fwrite(bytes, 1, n, f) == n);
    (void)fclose(f);
}

int main(int argc, char **argv)
{
    struct ends e = {0};
    size_t n, n_sealed;
    const uint8_t *bytes;
    uint8_t text[300], sealed[DATAGRAM_BYTES_MAX], master[32] = {2};
    struct datagram d;
    must(argc == 2);
    for (size_t i = 0; i < sizeof text; i++)
        text[i] = (uint8_t)i;
    ends_open(&e);
    bytes = session_output(e.s[0], &n);
    write_file(argv[1], 0, bytes, n);
    hand_over(&e, 0);
    bytes = session_output(e.s[1], &n);
    write_file(argv[1], 2, bytes, n);
    hand_over(&e, 1);
    bytes = session_output(e.s[0], &n);
    write_file(argv[1], 1, bytes, n);
    hand_over(&e, 0);
    must(session_send(e.s[0], 1, 0, text, sizeof text) == ERR_OK);
    bytes = session_output(e.s[0], &n);
    ((uint8_t *)(uintptr_t)bytes)[n - 1] ^= 1; /* forged: a good one would be accepted */
    write_file(argv[1], 3, bytes, n);
    write_file(argv[1], 4, text, sizeof text);
    datagram_init(&d, master, SESSION_INITIATOR);
    must(datagram_seal(&d, 1, text, sizeof text, sealed, &n_sealed) == ERR_OK);
    write_file(argv[1], 5, sealed, n_sealed);
    return 0;
}
#endif
