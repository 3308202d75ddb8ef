/* The child process that speaks mDNS (see discovery/mdns.h): picks a backend, has it announce and
 * browse, and tells the agent through its socket what is seen. Parses what strangers send; holds no
 * secret. The backends are behind an operation table: Avahi's daemon (mdns_avahi.c), Avahi's core
 * (mdns_core.c); macOS's dns_sd will be another. */
#ifndef COVEY_DISCOVERY_MDNS_CHILD_H
#define COVEY_DISCOVERY_MDNS_CHILD_H

#include "discovery/mdns_wire.h"

#include <uv.h>

enum {
    MDNS_SEEN_MAX = 512,                  /* (instance, interface, protocol) at a time */
    MDNS_UNRESOLVED_US = 3 * 1000 * 1000, /* then it makes room for a new one */
};

/* Runs until the other end of `fd` closes. The exit status. */
int mdns_child_main(int fd);

struct mdns_child;
struct mdns_seen;

struct mdns_backend {
    enum mdns_backend_kind kind;
    /* ERR_NOT_FOUND: not on this machine now, try the next. */
    enum err (*start)(struct mdns_child *c, uv_loop_t *loop, void **ret);
    /* Says goodbye. Every resolver has been stopped before. */
    void (*stop)(void *backend);
    /* In place of what was published before. */
    enum err (*publish)(void *backend, const struct mdns_service *service);
    void (*interfaces_changed)(void *backend);
    /* Follows the port and the address of one family of something seen, until stopped. NULL:
     * cannot.
     */
    void *(*resolve)(void *backend, struct mdns_seen *seen, uint8_t family);
    void (*resolve_stop)(void *resolver);
    /* The same for its TXT record. (Avahi's resolver would report a change only when the old record
     * has left the cache, which takes seconds.) */
    void *(*follow_txt)(void *backend, struct mdns_seen *seen);
    void (*follow_txt_stop)(void *follower);
};

/* In order of preference, ended by NULL. */
const struct mdns_backend *const *mdns_backends(void);

struct mdns_seen {
    struct mdns_seen *next;
    char instance[MDNS_INSTANCE_MAX];
    uint32_t interface;
    uint8_t protocol; /* 4 or 6 */
    uint64_t since_us;
    bool lost, told; /* the agent knows it */
    void *follower;  /* of its TXT record */
    bool has_txt;
    struct mdns_txt txt;
    struct {
        void *resolver;
        bool valid, dirty;
        uint8_t ip[16];
        uint16_t port;
    } family[2]; /* IPv4, IPv6 */
};

/* What a backend reports. */
void mdns_child_seen(struct mdns_child *c, uint32_t interface, uint8_t protocol,
                     const char *instance);
void mdns_child_lost(struct mdns_child *c, uint32_t interface, uint8_t protocol,
                     const char *instance);
void mdns_child_resolved(struct mdns_child *c, struct mdns_seen *seen, uint8_t family,
                         const uint8_t *ip, uint16_t port);
void mdns_child_txt(struct mdns_child *c, struct mdns_seen *seen, const uint8_t *txt, size_t n);
/* All that was seen is to be seen anew: the backend starts over by itself. */
void mdns_child_forget(struct mdns_child *c);
/* Somebody else has this instance or host name. */
void mdns_child_collision(struct mdns_child *c, const char *instance);
/* The backend cannot go on; it is stopped from the loop and another is chosen. */
void mdns_child_failed(struct mdns_child *c, const char *why);
void mdns_child_trouble(struct mdns_child *c, const char *text);

#endif
