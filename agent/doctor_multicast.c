/* Whether multicast passes on the interfaces of this machine: a question of mDNS (RFC 6762, 5.1) is
 * sent on each, and any packet of the group that comes in on it, our own included, is a good sign.
 * What another machine's switch or access point drops is not seen when no one else speaks there. */
#include "agent/cli.h"

#include "base/clock.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { INTERFACES_MAX = 32, MDNS_PORT = 5353, LISTEN_MS = 700, PACKET_MAX = 2048 };

struct heard {
    unsigned index;
    char name[IF_NAMESIZE];
    bool heard;
};

/* PTR? _services._dns-sd._udp.local */
static const uint8_t question[] = "\0\0\0\0\0\1\0\0\0\0\0\0"
                                  "\x09_services\x07_dns-sd\x04_udp\x05local\0\0\x0c\0\1";

static int open_group(void)
{
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_port = htons(MDNS_PORT)};
    int on = 1, fd = socket(AF_INET, SOCK_DGRAM, 0);
    if (fd < 0)
        return -1;
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &on, sizeof on);
    (void)setsockopt(fd, IPPROTO_IP, IP_PKTINFO, &on, sizeof on);
    if (bind(fd, (struct sockaddr *)&any, sizeof any) == 0)
        return fd;
    (void)close(fd);
    return -1;
}

/* Joins and asks on every interface; gives how many there are. */
static int ask_all(int fd, struct heard *ret)
{
    struct ifaddrs *list = NULL;
    struct sockaddr_in group = {.sin_family = AF_INET, .sin_port = htons(MDNS_PORT)};
    int n = 0;
    (void)inet_pton(AF_INET, "224.0.0.251", &group.sin_addr);
    if (getifaddrs(&list) != 0)
        return 0;
    for (const struct ifaddrs *i = list; i && n < INTERFACES_MAX; i = i->ifa_next) {
        unsigned want = IFF_UP | IFF_RUNNING | IFF_MULTICAST;
        if (!i->ifa_addr || i->ifa_addr->sa_family != AF_INET || (i->ifa_flags & want) != want ||
            (i->ifa_flags & (IFF_LOOPBACK | IFF_POINTOPOINT)))
            continue;
        struct sockaddr_in own;
        memcpy(&own, i->ifa_addr, sizeof own);
        struct ip_mreq join = {group.sin_addr, own.sin_addr};
        ret[n] = (struct heard){.index = if_nametoindex(i->ifa_name)};
        (void)snprintf(ret[n].name, sizeof ret[n].name, "%s", i->ifa_name);
        (void)setsockopt(fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, &join, sizeof join);
        (void)setsockopt(fd, IPPROTO_IP, IP_MULTICAST_IF, &own.sin_addr, sizeof own.sin_addr);
        (void)sendto(fd, question, sizeof question - 1, 0, (struct sockaddr *)&group, sizeof group);
        n++;
    }
    freeifaddrs(list);
    return n;
}

static void hear(int fd, struct heard *all, int n)
{
    uint8_t packet[PACKET_MAX];
    union {
        char bytes[256];
        struct cmsghdr align;
    } control;
    struct iovec part = {packet, sizeof packet};
    struct msghdr m = {.msg_iov = &part,
                       .msg_iovlen = 1,
                       .msg_control = control.bytes,
                       .msg_controllen = sizeof control.bytes};
    if (recvmsg(fd, &m, 0) < 0)
        return;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c)) {
        struct in_pktinfo info;
        if (c->cmsg_level != IPPROTO_IP || c->cmsg_type != IP_PKTINFO)
            continue;
        memcpy(&info, CMSG_DATA(c), sizeof info);
        for (int i = 0; i < n; i++)
            all[i].heard |= all[i].index == (unsigned)info.ipi_ifindex;
    }
}

void doctor_multicast(json_t *findings)
{
    struct heard all[INTERFACES_MAX];
    int fd = open_group();
    if (fd < 0)
        return;
    int n = ask_all(fd, all), missing = n;
    uint64_t until_us = clock_monotonic_us() + (uint64_t)LISTEN_MS * 1000;
    for (uint64_t now_us = 0; missing > 0 && (now_us = clock_monotonic_us()) < until_us;) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        if (poll(&p, 1, (int)((until_us - now_us) / 1000) + 1) > 0)
            hear(fd, all, n);
        missing = 0;
        for (int i = 0; i < n; i++)
            missing += !all[i].heard;
    }
    (void)close(fd);
    for (int i = 0; i < n; i++) {
        char text[96];
        (void)snprintf(text, sizeof text, "multicast seems %s on %s",
                       all[i].heard ? "to pass" : "blocked", all[i].name);
        (void)json_array_append_new(
            findings, json_pack("{s:s, s:s, s:s}", "level", all[i].heard ? "ok" : "problem", "text",
                                text, "hint",
                                all[i].heard ? ""
                                             : "let UDP port 5353 through, or name the others with "
                                               "--peer HOST"));
    }
}
