#include "transport/net.h"

#include "base/util.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

static enum err parse_port(const char *text, uint16_t *ret)
{
    size_t n = strlen(text);
    if (n < 1 || n > 5 || strspn(text, "0123456789") != n)
        return ERR_INVALID;
    unsigned long port = strtoul(text, NULL, 10);
    if (port < 1 || port > UINT16_MAX)
        return ERR_INVALID;
    *ret = (uint16_t)port;
    return ERR_OK;
}

static enum err parse_ipv6(char *text, struct address *a)
{
    char *percent = strchr(text, '%');
    if (percent)
        *percent++ = 0;
    if (inet_pton(AF_INET6, text, a->ip) != 1)
        return ERR_INVALID;
    a->family = NET_IPV6;
    if (!percent)
        return ERR_OK;
    if (!address_is_link_local(a))
        return ERR_INVALID;
    size_t n = strlen(percent);
    a->scope = if_nametoindex(percent);
    if (!a->scope && n > 0 && n < 10 && strspn(percent, "0123456789") == n)
        a->scope = (uint32_t)strtoul(percent, NULL, 10);
    return a->scope ? ERR_OK : ERR_NOT_FOUND;
}

enum err net_address_parse(const char *text, uint16_t default_port, struct address *ret)
{
    struct address a = {.port = default_port};
    char copy[ADDRESS_TEXT_MAX];
    size_t n = strlen(text);
    if (n == 0 || n >= sizeof copy)
        return ERR_INVALID;
    memcpy(copy, text, n + 1);
    char *first = strchr(copy, ':');
    if (copy[0] == '[') {
        char *end = strchr(copy, ']');
        if (!end || (end[1] != 0 && end[1] != ':'))
            return ERR_INVALID;
        if (end[1] == ':')
            TRY(parse_port(end + 2, &a.port));
        *end = 0;
        TRY(parse_ipv6(copy + 1, &a));
    } else if (first && strchr(first + 1, ':')) {
        TRY(parse_ipv6(copy, &a));
    } else {
        if (first) {
            *first = 0;
            TRY(parse_port(first + 1, &a.port));
        }
        if (inet_pton(AF_INET, copy, a.ip) != 1)
            return ERR_INVALID;
        a.family = NET_IPV4;
    }
    *ret = a;
    return ERR_OK;
}

enum err net_address_of(const struct sockaddr_storage *from, struct address *ret)
{
    struct address a = {.family = NET_NONE};
    if (from->ss_family == AF_INET) {
        struct sockaddr_in in;
        memcpy(&in, from, sizeof in);
        a.family = NET_IPV4;
        a.port = ntohs(in.sin_port);
        memcpy(a.ip, &in.sin_addr, 4);
    } else if (from->ss_family == AF_INET6) {
        struct sockaddr_in6 in;
        memcpy(&in, from, sizeof in);
        a.port = ntohs(in.sin6_port);
        if (IN6_IS_ADDR_V4MAPPED(&in.sin6_addr)) {
            a.family = NET_IPV4;
            memcpy(a.ip, in.sin6_addr.s6_addr + 12, 4);
        } else {
            a.family = NET_IPV6;
            memcpy(a.ip, &in.sin6_addr, 16);
            if (address_is_link_local(&a))
                a.scope = in.sin6_scope_id;
        }
    } else {
        return ERR_UNSUPPORTED;
    }
    *ret = a;
    return ERR_OK;
}

void net_address_name(struct address *a)
{
    a->interface[0] = 0;
    if (a->scope)
        (void)if_indextoname(a->scope, a->interface);
}

unsigned net_address_to(const struct address *a, struct sockaddr_storage *ret)
{
    memset(ret, 0, sizeof *ret);
    if (a->family == NET_IPV4) {
        struct sockaddr_in in = {.sin_family = AF_INET, .sin_port = htons(a->port)};
        memcpy(&in.sin_addr, a->ip, 4);
        memcpy(ret, &in, sizeof in);
        return sizeof in;
    }
    struct sockaddr_in6 in = {
        .sin6_family = AF_INET6, .sin6_port = htons(a->port), .sin6_scope_id = a->scope};
    memcpy(&in.sin6_addr, a->ip, 16);
    memcpy(ret, &in, sizeof in);
    return sizeof in;
}

const char *net_kind_name(uint8_t kind)
{
    static const char *const names[] = {"other", "loopback", "ethernet", "wifi", "thunderbolt"};
    return kind < ARRAY_LEN(names) ? names[kind] : names[NET_OTHER];
}

/* The entry of that name, made where there is room. */
static struct net_interface *entry_of(struct net_interfaces *all, const char *name, bool loopback)
{
    if (strlen(name) >= NET_INTERFACE_NAME_MAX)
        return NULL;
    for (uint32_t i = 0; i < all->n; i++) {
        if (strcmp(all->list[i].name, name) == 0)
            return &all->list[i];
    }
    uint32_t index = if_nametoindex(name);
    if (all->n == NET_INTERFACES_MAX || !index)
        return NULL;
    struct net_interface *e = &all->list[all->n++];
    *e = (struct net_interface){.index = index,
                                .kind = loopback ? NET_LOOPBACK : net_os_interface_kind(name)};
    memcpy(e->name, name, strlen(name) + 1);
    return e;
}

static int by_index(const void *a, const void *b)
{
    uint32_t x = ((const struct net_interface *)a)->index;
    uint32_t y = ((const struct net_interface *)b)->index;
    return x < y ? -1 : x > y;
}

static int by_address(const void *a, const void *b)
{
    const struct address *x = a, *y = b;
    return x->family != y->family ? x->family - y->family : memcmp(x->ip, y->ip, sizeof x->ip);
}

static void put_address(struct net_interfaces *all, const struct ifaddrs *i)
{
    struct sockaddr_storage s = {0};
    struct address a;
    bool v4 = i->ifa_addr->sa_family == AF_INET;
    memcpy(&s, i->ifa_addr, v4 ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6));
    if (net_address_of(&s, &a) != ERR_OK)
        return;
    struct net_interface *e = entry_of(all, i->ifa_name, i->ifa_flags & IFF_LOOPBACK);
    if (!e || e->n_addresses == NET_INTERFACE_ADDRESSES_MAX)
        return;
    a.port = 0;
    if (a.family == NET_IPV6 && address_is_link_local(&a)) {
        a.scope = e->index;
        a.ip[2] = a.ip[3] = 0; /* some systems keep the scope in there */
    }
    e->addresses[e->n_addresses++] = a;
}

enum err net_interfaces_get(struct net_interfaces *ret)
{
    struct ifaddrs *list;
    if (getifaddrs(&list) < 0)
        return ERR_IO;
    memset(ret, 0, sizeof *ret);
    for (const struct ifaddrs *i = list; i; i = i->ifa_next) {
        bool up = (i->ifa_flags & IFF_UP) && (i->ifa_flags & IFF_RUNNING);
        if (up && i->ifa_addr &&
            (i->ifa_addr->sa_family == AF_INET || i->ifa_addr->sa_family == AF_INET6))
            put_address(ret, i);
    }
    freeifaddrs(list);
    qsort(ret->list, ret->n, sizeof ret->list[0], by_index);
    for (uint32_t i = 0; i < ret->n; i++)
        qsort(ret->list[i].addresses, ret->list[i].n_addresses, sizeof(struct address), by_address);
    return ERR_OK;
}

static bool interface_eq(const struct net_interface *a, const struct net_interface *b)
{
    if (a->index != b->index || strcmp(a->name, b->name) != 0 || a->kind != b->kind ||
        a->n_addresses != b->n_addresses)
        return false;
    for (unsigned i = 0; i < a->n_addresses; i++) {
        if (!address_eq(&a->addresses[i], &b->addresses[i]))
            return false;
    }
    return true;
}

bool net_interfaces_eq(const struct net_interfaces *a, const struct net_interfaces *b)
{
    if (a->n != b->n)
        return false;
    for (uint32_t i = 0; i < a->n; i++) {
        if (!interface_eq(&a->list[i], &b->list[i]))
            return false;
    }
    return true;
}
