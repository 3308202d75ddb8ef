/* What the two Avahi backends share. */
#ifndef COVEY_DISCOVERY_MDNS_BACKENDS_H
#define COVEY_DISCOVERY_MDNS_BACKENDS_H

#include "discovery/mdns_child.h"

#include <avahi-common/address.h>
#include <avahi-common/defs.h>
#include <avahi-common/strlst.h>

#define MDNS_SERVICE_TYPE "_covey._tcp"

extern const struct mdns_backend mdns_avahi_backend, mdns_core_backend;

/* Also of a follower of a TXT record (without a family). */
struct mdns_resolver {
    void *backend;
    struct mdns_child *child;
    struct mdns_seen *seen;
    uint8_t family;
    void *handle; /* Avahi's */
};

/* NULL: no memory. */
struct mdns_resolver *mdns_resolver_new(void *backend, struct mdns_child *child,
                                        struct mdns_seen *seen, uint8_t family);
/* `k` when it has Avahi's handle; else it is freed: NULL. */
struct mdns_resolver *mdns_resolver_started(struct mdns_resolver *take_k);
/* Of a browser of services. */
void mdns_browsed(struct mdns_child *child, AvahiIfIndex interface, AvahiProtocol protocol,
                  AvahiBrowserEvent event, const char *name);
void mdns_resolver_found(struct mdns_resolver *r, const AvahiAddress *a, uint16_t port);
/* "instance._covey._tcp.local", escaped; false when it is too long. */
enum { MDNS_SERVICE_NAME_MAX = 1024 };
bool mdns_service_name(const char *instance, char ret[MDNS_SERVICE_NAME_MAX]);
AvahiProtocol mdns_avahi_protocol(uint8_t family);
/* NULL: no memory. */
AvahiStringList *mdns_avahi_txt(const struct mdns_txt *txt);

#endif
