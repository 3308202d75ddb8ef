/* A network address as plain bytes, so that cores can hold and compare addresses without a socket
 * header. */
#ifndef COVEY_BASE_ADDRESS_H
#define COVEY_BASE_ADDRESS_H

#include <stdbool.h>
#include <stdint.h>

enum { ADDRESS_INTERFACE_MAX = 16, ADDRESS_TEXT_MAX = 80 };

struct address {
    uint8_t family;                        /* 4 or 6; 0 means none */
    uint8_t ip[16];                        /* network order; the first 4 bytes for IPv4 */
    uint16_t port;                         /* host order */
    uint32_t scope;                        /* interface index for link-local addresses, else 0 */
    char interface[ADDRESS_INTERFACE_MAX]; /* the local interface that reaches it, "" when not known
                                            */
};

/* Same family, ip, port and scope. */
bool address_eq(const struct address *a, const struct address *b);
bool address_is_loopback(const struct address *a);
bool address_is_link_local(const struct address *a);
/* "10.0.0.1:26840" or "[fe80::1%eth0]:26840" */
void address_text(const struct address *a, char ret[ADDRESS_TEXT_MAX]);

#endif
