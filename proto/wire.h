/* What the cores hand out to be sent: messages on numbered channels, in a bounded box.
 *
 * A channel belongs to one room, which alone knows the encoding inside (protobuf-c). `way` says how
 * a message travels: as a frame of the sealed session (ordered, at most 64 KiB) or as one sealed
 * datagram (may be lost, at most DATAGRAM_PAYLOAD_MAX). The box owns the bytes. */
#ifndef COVEY_PROTO_WIRE_H
#define COVEY_PROTO_WIRE_H

#include "base/err.h"
#include "base/id.h"

#include <stdint.h>

enum channel {
    CHANNEL_TRUST = 1,   /* proto/trust: introductions, records, secrets */
    CHANNEL_SWIM = 2,    /* discovery/swim: probes, gossip, digests */
    CHANNEL_CONTROL = 3, /* planner/control: claims, plans, wanted models */
    CHANNEL_NODE = 4,    /* agent/node: data-plane introductions, model manifests */
    CHANNEL_N
};

enum way { WAY_SESSION, WAY_DATAGRAM };

enum {
    FRAME_PAYLOAD_MAX = 64 * 1024 - 64, /* of a session frame */
    DATAGRAM_PAYLOAD_MAX = 1152, /* fits an IPv6 minimum MTU of 1280 with every header and tag */
    OUTBOX_MESSAGES_MAX = 4096,
    OUTBOX_BYTES_MAX = 16 * 1024 * 1024,
};

struct wire_message {
    struct node_id to;
    uint64_t session; /* when not 0: this very session, before the peer is known */
    uint32_t path;    /* datagrams: the path to use; 0 means the best one */
    uint8_t channel;  /* enum channel */
    uint8_t way;      /* enum way */
    uint32_t len;
    uint8_t *bytes;
};

struct outbox {
    struct wire_message *messages;
    uint32_t n, cap;
    size_t n_bytes;
};
#define OUTBOX_INIT ((struct outbox){NULL, 0, 0, 0})

/* Copies the bytes. ERR_LIMIT when a maximum would be exceeded (the message is then not sent; the
 * caller's protocol must survive that as it survives loss), ERR_NO_MEMORY. `m->bytes` is only read.
 */
enum err outbox_push(struct outbox *box, const struct wire_message *m);
void outbox_clear(struct outbox *box);
void outbox_deinit(struct outbox *box);

#endif
