/* Announcing this node on the local networks and finding others: DNS-SD (RFC 6763) over mDNS (RFC
 * 6762), service _covey._tcp, on the libuv loop.
 *
 * All parsing of strangers' packets happens in a small child process (discovery/mdns_child.h), the
 * same program started again with a hidden verb. It holds no secret: a descriptor, and what is
 * announced anyway. This side starts it, hands it what to announce, reads its bounded messages
 * (discovery/mdns_wire.h), merges sightings into one record for each instance
 * (discovery/mdns_table.h), and starts it again, with back-off, when it dies. When this side closes
 * or dies, the child says goodbye on the network and ends.
 *
 * mDNS only introduces: `gone` means that nobody announces the instance any more, not that the node
 * is dead. On the loop thread. */
#ifndef COVEY_DISCOVERY_MDNS_H
#define COVEY_DISCOVERY_MDNS_H

#include "base/address.h"
#include "base/err.h"
#include "base/log.h"
#include "discovery/mdns_txt.h"

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

enum {
    MDNS_INSTANCE_MAX = 64,
    MDNS_ADDRESSES_MAX = 8, /* of one instance */
    MDNS_ARGS_MAX = 8,
};

/* What is announced. The host name is "<instance>.local", so it collides with nobody's. */
struct mdns_service {
    char instance[MDNS_INSTANCE_MAX];
    uint16_t port;
    struct mdns_txt txt;
};

/* What is known of another instance. */
struct mdns_record {
    char instance[MDNS_INSTANCE_MAX];
    bool gone;
    struct mdns_txt txt;
    struct address addresses[MDNS_ADDRESSES_MAX]; /* with port, interface and scope */
    uint32_t n_addresses;
};

struct mdns_options {
    uv_loop_t *loop;
    const struct log *log;
    /* How to start the child: a program, and its arguments (the first is its name), at most
     * MDNS_ARGS_MAX, ended by NULL. It must call mdns_child_main(MDNS_CHILD_FD). */
    const char *child_file;
    const char *const *child_args;
    struct mdns_service service; /* an empty instance: only browse */
    void *context;
    /* A new instance, a change of one, or its end. Never our own; never from within mdns_new(). */
    void (*on_found)(void *context, const struct mdns_record *record);
    /* Whom a flood of names must not push out. NULL: nobody is spared. */
    bool (*is_trusted)(void *context, const char *instance);
    /* Somebody else has our instance name: publish under another one. */
    void (*on_collision)(void *context);
};

enum { MDNS_CHILD_FD = 3 };

struct mdns;

/* ERR_IO when not even the child can be started; ERR_NO_MEMORY. */
enum err mdns_new(const struct mdns_options *options, struct mdns **ret, struct err_text *text);
/* Announces this from now on, in place of what was announced before. */
void mdns_publish(struct mdns *m, const struct mdns_service *service);
/* Interfaces or addresses of this machine changed. */
void mdns_interfaces_changed(struct mdns *m);
/* Who speaks mDNS for us: "avahi-daemon", "avahi-core", or "none" while nobody does. */
const char *mdns_backend(const struct mdns *m);
/* Stops announcing; no callback comes after it, the memory goes when the loop next runs. NULL is
 * fine. */
void mdns_close(struct mdns *m);

#endif
