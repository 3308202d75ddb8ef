/* What Linux does its own way: SO_BINDTODEVICE, /sys/class/net, rtnetlink. */
#include "transport/net.h"

#include <errno.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <stdio.h>
#include <string.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

enum err net_os_bind_interface(int fd, uint8_t family, uint32_t index)
{
    (void)family;
    char name[IF_NAMESIZE] = "";
    if (!if_indextoname(index, name))
        return ERR_NOT_FOUND;
    /* Needs no privilege since Linux 5.7. */
    if (setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, name, (socklen_t)strlen(name) + 1) < 0)
        return errno == ENODEV ? ERR_NOT_FOUND : ERR_IO;
    return ERR_OK;
}

void net_os_give_up_after(int fd, uint32_t ms)
{
    int on = 1, every_s = (int)(ms / 2000 ? ms / 2000 : 1), times = 2;
    unsigned user_ms = ms;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &user_ms, sizeof user_ms);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &every_s, sizeof every_s);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &every_s, sizeof every_s);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &times, sizeof times);
    (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
}

static int sys_has(const char *name, const char *what)
{
    char path[128];
    (void)snprintf(path, sizeof path, "/sys/class/net/%s/%s", name, what);
    return access(path, F_OK) == 0;
}

uint8_t net_os_interface_kind(const char *name)
{
    if (strchr(name, '/') || strcmp(name, "..") == 0)
        return NET_OTHER;
    if (sys_has(name, "wireless") || sys_has(name, "phy80211"))
        return NET_WIFI;
    char path[128], target[256];
    (void)snprintf(path, sizeof path, "/sys/class/net/%s/device/driver", name);
    ssize_t n = readlink(path, target, sizeof target - 1);
    if (n > 0) {
        target[n] = 0;
        if (strstr(target, "thunderbolt"))
            return NET_THUNDERBOLT;
    }
    if (strncmp(name, "tun", 3) == 0 || strncmp(name, "wg", 2) == 0 ||
        strncmp(name, "tailscale", 9) == 0)
        return NET_OTHER;
    return NET_ETHERNET;
}

enum err net_os_watch_open(int *ret_fd)
{
    int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC | SOCK_NONBLOCK, NETLINK_ROUTE);
    if (fd < 0)
        return ERR_IO;
    struct sockaddr_nl a = {.nl_family = AF_NETLINK,
                            .nl_groups = RTMGRP_LINK | RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR};
    if (bind(fd, (struct sockaddr *)&a, sizeof a) < 0) {
        (void)close(fd);
        return ERR_IO;
    }
    *ret_fd = fd;
    return ERR_OK;
}
