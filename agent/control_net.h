/* The control port on the loop: sealed sessions over TCP and sealed datagrams over UDP. A shell: it
 * moves bytes between sockets and the session core (proto/session.h) and decides nothing but what
 * PROTOCOL 1.3 fixes: unauthenticated connections number at most SESSION_UNAUTHENTICATED_MAX, live
 * 3 s, and the oldest gives way.
 *
 * Sessions that we dial have the number that the node core gave them; accepted ones get theirs here
 * (top bit set). */
#ifndef COVEY_AGENT_CONTROL_NET_H
#define COVEY_AGENT_CONTROL_NET_H

#include "agent/node.h"
#include "base/address.h"
#include "proto/datagram.h"
#include "proto/session.h"
#include "transport/loop_net.h"

struct control_net;

struct control_net_options {
    uint16_t port;                                /* 0: any */
    const uint8_t *static_public, *static_secret; /* X25519; borrowed for good */
    struct random_source random;
    void *context;
    /* Keys that an inbound handshake may use now. */
    uint32_t (*psks)(void *context, struct session_psk *ret, uint32_t max);
    /* SESSION_READY, MESSAGE, SESSION_DOWN or DATAGRAM; views last for the call. */
    void (*on_event)(void *context, const struct node_event *event);
};

enum err control_net_new(uv_loop_t *loop, const struct control_net_options *options,
                         struct control_net **ret, struct err_text *text);
void control_net_free(struct control_net *c);
uint16_t control_net_port(const struct control_net *c);

/* A failed dial is reported as SESSION_DOWN, never from within. */
void control_net_dial(struct control_net *c, uint64_t session, const struct address *to,
                      const uint8_t psk[SESSION_KEY_BYTES], uint64_t psk_tag);
/* Queues a frame. ERR_NOT_FOUND, ERR_BUSY (the peer does not read: the session is then closed and
 * reported). */
enum err control_net_send(struct control_net *c, uint64_t session, uint8_t channel,
                          const uint8_t *bytes, uint32_t len);
enum err control_net_datagram(struct control_net *c, uint64_t session, const struct address *to,
                              uint8_t channel, const uint8_t *bytes, uint32_t len);
/* Sends what is queued for up to a second, then closes; nothing is reported any more. */
void control_net_close(struct control_net *c, uint64_t session);
/* Membership was checked: the session no longer counts as unauthenticated. */
void control_net_authenticated(struct control_net *c, uint64_t session);
/* session_export of a live session. */
enum err control_net_export(struct control_net *c, uint64_t session, const char *label,
                            uint8_t ret[32]);

#endif
