#include "base/address.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>

bool address_eq(const struct address *a, const struct address *b)
{
    return a->family == b->family && a->port == b->port && a->scope == b->scope &&
           memcmp(a->ip, b->ip, a->family == 4 ? 4 : 16) == 0;
}

bool address_is_loopback(const struct address *a)
{
    static const uint8_t one[16] = {[15] = 1};
    if (a->family == 4)
        return a->ip[0] == 127;
    return a->family == 6 && memcmp(a->ip, one, sizeof one) == 0;
}

bool address_is_link_local(const struct address *a)
{
    if (a->family == 4)
        return a->ip[0] == 169 && a->ip[1] == 254;
    return a->family == 6 && a->ip[0] == 0xfe && (a->ip[1] & 0xc0) == 0x80;
}

void address_text(const struct address *a, char ret[ADDRESS_TEXT_MAX])
{
    char ip[INET6_ADDRSTRLEN] = "?";
    if (a->family != 4 && a->family != 6) {
        (void)snprintf(ret, ADDRESS_TEXT_MAX, "none");
        return;
    }
    (void)inet_ntop(a->family == 4 ? AF_INET : AF_INET6, a->ip, ip, sizeof ip);
    if (a->family == 4)
        (void)snprintf(ret, ADDRESS_TEXT_MAX, "%s:%u", ip, a->port);
    else if (a->scope && a->interface[0])
        (void)snprintf(ret, ADDRESS_TEXT_MAX, "[%s%%%s]:%u", ip, a->interface, a->port);
    else if (a->scope)
        (void)snprintf(ret, ADDRESS_TEXT_MAX, "[%s%%%u]:%u", ip, a->scope, a->port);
    else
        (void)snprintf(ret, ADDRESS_TEXT_MAX, "[%s]:%u", ip, a->port);
}
