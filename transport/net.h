/* Addresses as text and as the system has them, network interfaces of this machine: plain values,
 * and what an operating system does differently about them (net_linux.c, net_macos.c). No loop
 * here; see transport/loop_net. */
#ifndef COVEY_TRANSPORT_NET_H
#define COVEY_TRANSPORT_NET_H

#include "base/address.h"
#include "base/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct sockaddr_storage;

enum {
    NET_INTERFACES_MAX = 16,
    NET_INTERFACE_ADDRESSES_MAX = 8,
    NET_INTERFACE_NAME_MAX = 16,
};

/* struct address's `family` */
enum net_family { NET_NONE = 0, NET_IPV4 = 4, NET_IPV6 = 6 };

/* A literal address, not a name: "10.0.0.1", "10.0.0.1:1", "::1", "[::1]:1", "fe80::1%eth0". The
 * port is `default_port` where none is given. ERR_INVALID; ERR_NOT_FOUND: no such interface. */
enum err net_address_parse(const char *text, uint16_t default_port, struct address *ret);
/* IPv4-mapped IPv6 becomes IPv4. ERR_UNSUPPORTED: another family. */
enum err net_address_of(const struct sockaddr_storage *from, struct address *ret);
/* Fills in `interface` from `scope`: the other functions leave it empty. */
void net_address_name(struct address *a);
/* The length of the result. */
unsigned net_address_to(const struct address *a, struct sockaddr_storage *ret);

enum net_kind {
    NET_OTHER = 0,
    NET_LOOPBACK = 1,
    NET_ETHERNET = 2,
    NET_WIFI = 3,
    NET_THUNDERBOLT = 4,
};
/* "loopback", "ethernet", … */
const char *net_kind_name(uint8_t kind);

struct net_interface {
    uint32_t index;
    char name[NET_INTERFACE_NAME_MAX];
    uint8_t kind;                                          /* enum net_kind; a guess */
    uint8_t n_addresses;                                   /* further ones are left out */
    struct address addresses[NET_INTERFACE_ADDRESSES_MAX]; /* port 0 */
};

struct net_interfaces {
    uint32_t n; /* interfaces that are up and have an address; further ones are left out */
    struct net_interface list[NET_INTERFACES_MAX];
};

/* What is there now, loopback included. ERR_IO. */
enum err net_interfaces_get(struct net_interfaces *ret);
bool net_interfaces_eq(const struct net_interfaces *a, const struct net_interfaces *b);

/* For the shells: one implementation per system. */

/* Everything that this socket sends leaves through that interface (SO_BINDTODEVICE, IP_BOUND_IF).
 * ERR_NOT_FOUND: no such interface. ERR_IO. */
enum err net_os_bind_interface(int fd, uint8_t family, uint32_t index);
/* A connection whose other end does not acknowledge for about so long breaks, whether or not
 * anything is being sent: the only way to notice a cut cable. Best effort. */
void net_os_give_up_after(int fd, uint32_t ms);
uint8_t net_os_interface_kind(const char *name);
/* A descriptor that is readable when interfaces or addresses change. ERR_IO. */
enum err net_os_watch_open(int *ret_fd);

#endif
