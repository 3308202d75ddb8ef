/* Messages between an agent and its mDNS child, over a stream socket: u16 length of what follows,
 * u8 type, fields. The child reads strangers' packets and may be anybody's by now, so this side
 * checks every length, number and string. Pure. */
#ifndef COVEY_DISCOVERY_MDNS_WIRE_H
#define COVEY_DISCOVERY_MDNS_WIRE_H

#include "discovery/mdns.h"

enum { MDNS_MESSAGE_MAX = 512 };

enum mdns_message_type {
    /* to the child */
    MDNS_PUBLISH = 1,    /* service */
    MDNS_INTERFACES = 2, /* they changed */
    /* from the child */
    MDNS_STARTED = 3,   /* backend */
    MDNS_SIGHTING = 4,  /* interface, protocol, address, service (port 0 never) */
    MDNS_LOST = 5,      /* interface, protocol, service.instance */
    MDNS_COLLISION = 6, /* service.instance: ours, and somebody else's too */
    MDNS_TROUBLE = 7,   /* text: a line for the log */
};

enum mdns_backend_kind {
    MDNS_BACKEND_NONE = 0,
    MDNS_BACKEND_AVAHI_DAEMON = 1,
    MDNS_BACKEND_AVAHI_CORE = 2,
    MDNS_BACKEND_DNS_SD = 3,
    MDNS_BACKEND_N
};
const char *mdns_backend_name(enum mdns_backend_kind kind);

struct mdns_message {
    enum mdns_message_type type;
    enum mdns_backend_kind backend;
    uint32_t interface; /* index, never 0 */
    uint8_t protocol;   /* 4 or 6: what the announcement came over */
    uint8_t family;     /* 4 or 6: of the address */
    uint8_t ip[16];
    struct mdns_service service;
    char text[128];
};

/* The length; never more than MDNS_MESSAGE_MAX. */
size_t mdns_message_encode(const struct mdns_message *m, uint8_t ret[MDNS_MESSAGE_MAX]);
/* Takes the first message of `bytes`. ERR_AGAIN: not all of it is there. ERR_CORRUPT: close. */
enum err mdns_message_decode(const uint8_t *bytes, size_t n, struct mdns_message *ret,
                             size_t *ret_used);

#endif
