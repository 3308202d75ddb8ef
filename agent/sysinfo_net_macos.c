/* Whether this machine's network is a cable: macOS prefers an Ethernet interface (a Thunderbolt
 * bridge is one) to Wi-Fi wherever both are connected, so any that is connected and has an address
 * decides. ifmedia(4) as <net/if_media.h> has it. */
#include "agent/sysinfo.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <net/if_media.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/sockio.h>
#include <unistd.h>

enum medium { MEDIUM_NONE, MEDIUM_CABLE, MEDIUM_RADIO };

static enum medium medium_of(int fd, const char *interface)
{
    struct ifmediareq m;
    memset(&m, 0, sizeof m);
    (void)strlcpy(m.ifm_name, interface, sizeof m.ifm_name);
    if (ioctl(fd, SIOCGIFMEDIA, &m) != 0 || !(m.ifm_status & IFM_AVALID) ||
        !(m.ifm_status & IFM_ACTIVE))
        return MEDIUM_NONE;
    if (IFM_TYPE(m.ifm_current) == IFM_IEEE80211)
        return MEDIUM_RADIO;
    return IFM_TYPE(m.ifm_current) == IFM_ETHER ? MEDIUM_CABLE : MEDIUM_NONE;
}

bool sysinfo_wired(void)
{
    struct ifaddrs *list = NULL;
    enum medium best = MEDIUM_NONE;
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    if (fd < 0 || getifaddrs(&list) != 0)
        list = NULL;
    for (const struct ifaddrs *i = list; i; i = i->ifa_next) {
        if (!i->ifa_addr || !(i->ifa_flags & IFF_UP) || !(i->ifa_flags & IFF_RUNNING) ||
            (i->ifa_flags & IFF_LOOPBACK) ||
            (i->ifa_addr->sa_family != AF_INET && i->ifa_addr->sa_family != AF_INET6))
            continue;
        /* The links between Apple's devices are no network of the user's. */
        if (strncmp(i->ifa_name, "awdl", 4) == 0 || strncmp(i->ifa_name, "llw", 3) == 0)
            continue;
        enum medium m = medium_of(fd, i->ifa_name);
        if (m == MEDIUM_CABLE || (m == MEDIUM_RADIO && best == MEDIUM_NONE))
            best = m;
    }
    if (list)
        freeifaddrs(list);
    if (fd >= 0)
        (void)close(fd);
    return best != MEDIUM_RADIO;
}
