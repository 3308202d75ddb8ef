/* What macOS does its own way: IP_BOUND_IF, media types, the routing socket. */
#include "transport/net.h"

#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <net/if_media.h>
#include <net/route.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

enum err net_os_bind_interface(int fd, uint8_t family, uint32_t index)
{
    char name[IF_NAMESIZE];
    if (!if_indextoname(index, name))
        return ERR_NOT_FOUND;
    int value = (int)index;
    int bad = family == NET_IPV4
                  ? setsockopt(fd, IPPROTO_IP, IP_BOUND_IF, &value, sizeof value)
                  : setsockopt(fd, IPPROTO_IPV6, IPV6_BOUND_IF, &value, sizeof value);
    return bad ? ERR_IO : ERR_OK;
}

void net_os_give_up_after(int fd, uint32_t ms)
{
    int on = 1, every_s = (int)(ms / 2000 ? ms / 2000 : 1), times = 2;
    int drop_s = (int)((ms + 999) / 1000);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_RXT_CONNDROPTIME, &drop_s, sizeof drop_s);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPALIVE, &every_s, sizeof every_s);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &every_s, sizeof every_s);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &times, sizeof times);
    (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
}

uint8_t net_os_interface_kind(const char *name)
{
    /* The Thunderbolt bridge is always bridge0; utun, awdl and llw are no ways to a peer. */
    if (strcmp(name, "bridge0") == 0)
        return NET_THUNDERBOLT;
    if (strncmp(name, "en", 2) != 0)
        return NET_OTHER;
    struct ifmediareq media = {0};
    strncpy(media.ifm_name, name, sizeof media.ifm_name - 1);
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    if (fd < 0)
        return NET_ETHERNET;
    int bad = ioctl(fd, SIOCGIFMEDIA, &media);
    (void)close(fd);
    return bad == 0 && IFM_TYPE(media.ifm_current) == IFM_IEEE80211 ? NET_WIFI : NET_ETHERNET;
}

enum err net_os_watch_open(int *ret_fd)
{
    int fd = socket(PF_ROUTE, SOCK_RAW, 0);
    if (fd < 0)
        return ERR_IO;
    if (fcntl(fd, F_SETFD, FD_CLOEXEC) < 0 || fcntl(fd, F_SETFL, O_NONBLOCK) < 0) {
        (void)close(fd);
        return ERR_IO;
    }
    *ret_fd = fd;
    return ERR_OK;
}
