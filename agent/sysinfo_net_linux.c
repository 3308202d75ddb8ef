/* Whether this machine's network is a cable: the interface of the default route decides; where that
 * is none of hardware (a bridge, a VPN, a container's), the interfaces of hardware that are up do.
 *
 * proc(5) for /proc/net/route; Documentation/ABI/testing/sysfs-class-net for `type`, `operstate`
 * and `phy80211`; the numbers of types are ARPHRD_* of <net/if_arp.h>. */
#include "agent/sysinfo_net_linux.h"

#include "agent/sysinfo.h"

#include <dirent.h>
#include <net/if.h>
#include <net/if_arp.h>
#include <net/route.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { PATH_BYTES = 512 };
enum medium { MEDIUM_NONE, MEDIUM_VIRTUAL, MEDIUM_CABLE, MEDIUM_RADIO };

static void path_of(const char *root, const char *interface, const char *file, char ret[PATH_BYTES])
{
    (void)snprintf(ret, PATH_BYTES, "%s/sys/class/net/%s/%s", root, interface, file);
}

static bool has(const char *root, const char *interface, const char *file)
{
    char path[PATH_BYTES];
    path_of(root, interface, file, path);
    return access(path, F_OK) == 0;
}

static bool read_word(const char *root, const char *interface, const char *file, char ret[32])
{
    char path[PATH_BYTES];
    path_of(root, interface, file, path);
    FILE *f = fopen(path, "re");
    bool ok = f && fscanf(f, "%31s", ret) == 1;
    if (f)
        (void)fclose(f);
    return ok;
}

static enum medium medium_of(const char *root, const char *interface)
{
    char word[32];
    int type;
    if (!read_word(root, interface, "type", word) || sscanf(word, "%d", &type) != 1 ||
        type == ARPHRD_LOOPBACK)
        return MEDIUM_NONE;
    if (has(root, interface, "wireless") || has(root, interface, "phy80211") ||
        (type >= ARPHRD_IEEE80211 && type <= ARPHRD_IEEE80211_RADIOTAP))
        return MEDIUM_RADIO;
    return has(root, interface, "device") ? MEDIUM_CABLE : MEDIUM_VIRTUAL;
}

/* The interface of the default route with the least metric, in `ret`; false when there is none. */
static bool default_v4(const char *root, char ret[IF_NAMESIZE])
{
    char path[PATH_BYTES], line[256], name[IF_NAMESIZE];
    uint32_t to, flags, metric, mask, best = UINT32_MAX;
    bool found = false;
    (void)snprintf(path, sizeof path, "%s/proc/net/route", root);
    FILE *f = fopen(path, "re");
    if (!f)
        return false;
    while (fgets(line, sizeof line, f)) {
        if (sscanf(line, "%15s %x %*x %x %*d %*u %u %x", name, &to, &flags, &metric, &mask) != 5 ||
            to != 0 || mask != 0 || !(flags & RTF_UP) || (flags & RTF_REJECT) ||
            (found && metric >= best))
            continue;
        found = true;
        best = metric;
        memcpy(ret, name, sizeof name);
    }
    (void)fclose(f);
    return found;
}

static bool default_v6(const char *root, char ret[IF_NAMESIZE])
{
    char path[PATH_BYTES], line[256], name[IF_NAMESIZE], to[33];
    uint32_t length, metric, flags, best = UINT32_MAX;
    bool found = false;
    (void)snprintf(path, sizeof path, "%s/proc/net/ipv6_route", root);
    FILE *f = fopen(path, "re");
    if (!f)
        return false;
    while (fgets(line, sizeof line, f)) {
        if (sscanf(line, "%32s %x %*s %*x %*s %x %*x %*x %x %15s", to, &length, &metric, &flags,
                   name) != 5 ||
            length != 0 || strspn(to, "0") != 32 || !(flags & RTF_UP) || (flags & RTF_REJECT) ||
            strcmp(name, "lo") == 0 || (found && metric >= best))
            continue;
        found = true;
        best = metric;
        memcpy(ret, name, sizeof name);
    }
    (void)fclose(f);
    return found;
}

/* What the hardware that is up is: a cable, where there is one. */
static enum medium any_medium(const char *root)
{
    char path[PATH_BYTES], state[32];
    enum medium best = MEDIUM_NONE;
    (void)snprintf(path, sizeof path, "%s/sys/class/net", root);
    DIR *dir = opendir(path);
    if (!dir)
        return best;
    for (struct dirent *d; (d = readdir(dir)) != NULL;) {
        if (d->d_name[0] == '.' || !read_word(root, d->d_name, "operstate", state) ||
            (strcmp(state, "up") != 0 && strcmp(state, "unknown") != 0))
            continue;
        enum medium m = medium_of(root, d->d_name);
        if (m == MEDIUM_CABLE || (m == MEDIUM_RADIO && best == MEDIUM_NONE))
            best = m;
    }
    (void)closedir(dir);
    return best;
}

bool sysinfo_wired_below(const char *root)
{
    char name[IF_NAMESIZE] = "";
    enum medium m = MEDIUM_NONE;
    if (default_v4(root, name) || default_v6(root, name))
        m = medium_of(root, name);
    if (m != MEDIUM_CABLE && m != MEDIUM_RADIO)
        m = any_medium(root);
    return m != MEDIUM_RADIO;
}

bool sysinfo_wired(void)
{
    return sysinfo_wired_below("");
}
