/* The data port on the loop: accepts, lets strangers do no more than one fixed-size message within
 * HELLO_TIMEOUT_MS, and hands finished connections on; and dials the data ports of peers. */
#ifndef COVEY_TRANSPORT_HELLO_NET_H
#define COVEY_TRANSPORT_HELLO_NET_H

#include "transport/hello.h"
#include "transport/loop_net.h"

struct data_port;
struct data_dial;

struct data_port_options {
    uint16_t port;           /* 0: any */
    struct hello_gate *gate; /* outlives the port */
    struct hello_facts own;
    void *context;
    /* An authenticated connection that a peer opened; `fd` is the callee's: no byte beyond the
     * handshake was read from it. The callee wipes its copy of the keys when it is done. */
    void (*on_connection)(void *context, int fd, const struct hello_result *result);
};

enum err data_port_new(uv_loop_t *loop, const struct data_port_options *options,
                       struct data_port **ret, struct err_text *text);
uint16_t data_port_port(const struct data_port *p);
/* Connections in their handshake; at most HELLO_PENDING_MAX. */
unsigned data_port_pending(const struct data_port *p);
void data_port_close(struct data_port *p);

struct data_dial_options {
    struct address to;
    uint32_t interface; /* 0: as the system routes */
    uint8_t kind;       /* enum hello_kind */
    struct hello_key key;
    struct hello_facts own;
    void *context;
    /* Once, never from within data_dial; the dial is gone then. On ERR_OK `fd` is the callee's.
     * Errors of net_connect and hello_step; ERR_CLOSED also when the peer knows no such key. */
    void (*on_done)(void *context, enum err e, int fd, const struct hello_result *result);
};

/* Connects and shakes hands within HELLO_TIMEOUT_MS. */
enum err data_dial_new(uv_loop_t *loop, const struct data_dial_options *options,
                       struct data_dial **ret);
void data_dial_cancel(struct data_dial *d);

#endif
