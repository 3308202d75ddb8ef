/* mDNS by Avahi's core inside our child process, for machines without a daemon, or beside one that
 * is not ours to use: port 5353 is shared.
 *
 * The core's own host records are off and we publish A and AAAA under "<instance>.local" without
 * reverse records, for each interface: a host name shared with a daemon or with a second agent on
 * the same machine would collide for ever. The service's records have a short time to live, so that
 * the corpse of a killed node leaves the caches soon. The loopback interface is used only when
 * there is no other. */
#include "discovery/mdns_backends.h"
#include "discovery/mdns_library.h"
#include "discovery/mdns_uv.h"

#include "base/util.h"

#include <avahi-common/error.h>
#include <avahi-common/malloc.h>
#include <avahi-core/core.h>
#include <avahi-core/log.h>
#include <avahi-core/lookup.h>
#include <avahi-core/publish.h>

#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    TTL_S = 120,
    TYPE_TTL_S = 4500,
    ADDRESSES_MAX = 64, /* of this machine */
    CACHE_ENTRIES_MAX = 2048,
    HOST_MAX = MDNS_INSTANCE_MAX + 8,
};

/* A list of macros, which clang-format takes for one statement. */
/* clang-format off */
#define CORE_FUNCTIONS(X) \
    X(avahi_key_new) \
    X(avahi_key_unref) \
    X(avahi_record_new_full) \
    X(avahi_record_unref) \
    X(avahi_s_entry_group_commit) \
    X(avahi_s_entry_group_free) \
    X(avahi_s_entry_group_new) \
    X(avahi_s_record_browser_free) \
    X(avahi_s_record_browser_new) \
    X(avahi_s_service_browser_free) \
    X(avahi_s_service_browser_new) \
    X(avahi_s_service_resolver_free) \
    X(avahi_s_service_resolver_new) \
    X(avahi_server_add) \
    X(avahi_server_add_address) \
    X(avahi_server_config_free) \
    X(avahi_server_config_init) \
    X(avahi_server_free) \
    X(avahi_server_new) \
    X(avahi_set_log_function)
/* clang-format on */

struct core_api {
    CORE_FUNCTIONS(MDNS_LIBRARY_MEMBER)
};

static bool open_library(struct core_api *ret)
{
#define SYMBOL(name) MDNS_LIBRARY_SYMBOL(struct core_api, name)
    static const struct mdns_symbol symbols[] = {CORE_FUNCTIONS(SYMBOL)};
    return mdns_library_open("libavahi-core.so.7", symbols, ARRAY_LEN(symbols), ret);
}

struct own_address {
    AvahiIfIndex interface;
    AvahiAddress address;
    AvahiSEntryGroup *group;
    bool kept;
};

struct core {
    struct core_api api;
    struct mdns_child *child;
    AvahiPoll poll;
    AvahiServer *server;
    AvahiSServiceBrowser *browser;
    AvahiSEntryGroup *group;
    struct mdns_service service; /* empty instance: none */
    struct own_address own[ADDRESSES_MAX];
    uint32_t n_own;
    bool running, loopback;
};

static void quiet(AvahiLogLevel level, const char *text)
{
    (void)level; /* strangers' packets cause a line each */
    (void)text;
}

/* ---- browsing ---- */

static void on_resolve(AvahiSServiceResolver *r, AvahiIfIndex interface, AvahiProtocol protocol,
                       AvahiResolverEvent event, const char *name, const char *type,
                       const char *domain, const char *host, const AvahiAddress *a, uint16_t port,
                       AvahiStringList *txt, AvahiLookupResultFlags flags, void *userdata)
{
    struct mdns_resolver *k = userdata;
    (void)r, (void)interface, (void)protocol, (void)name, (void)type, (void)domain, (void)host;
    (void)flags, (void)txt;
    if (event == AVAHI_RESOLVER_FOUND && a)
        mdns_resolver_found(k, a, port);
    /* A failure is no end: a resolver that is kept reports what comes later. */
}

static void *core_resolve(void *backend, struct mdns_seen *seen, uint8_t family)
{
    struct core *b = backend;
    struct mdns_resolver *k = mdns_resolver_new(b, b->child, seen, family);
    if (!k)
        return NULL;
    k->handle = b->api.avahi_s_service_resolver_new(
        b->server, (AvahiIfIndex)seen->interface, mdns_avahi_protocol(seen->protocol),
        seen->instance, MDNS_SERVICE_TYPE, NULL, mdns_avahi_protocol(family), AVAHI_LOOKUP_NO_TXT,
        on_resolve, k);
    return mdns_resolver_started(k);
}

static void core_resolve_stop(void *resolver)
{
    struct mdns_resolver *k = resolver;
    const struct core *b = k->backend;
    b->api.avahi_s_service_resolver_free(k->handle);
    free(k);
}

static void on_txt(AvahiSRecordBrowser *r, AvahiIfIndex interface, AvahiProtocol protocol,
                   AvahiBrowserEvent event, AvahiRecord *record, AvahiLookupResultFlags flags,
                   void *userdata)
{
    struct mdns_resolver *k = userdata;
    uint8_t bytes[MDNS_TXT_READ_MAX];
    (void)r, (void)interface, (void)protocol, (void)flags;
    if (event != AVAHI_BROWSER_NEW || !record || record->key->type != AVAHI_DNS_TYPE_TXT)
        return;
    AvahiStringList *txt = record->data.txt.string_list;
    if (avahi_string_list_serialize(txt, NULL, 0) > sizeof bytes)
        return;
    size_t n = avahi_string_list_serialize(txt, bytes, sizeof bytes);
    mdns_child_txt(k->child, k->seen, bytes, n);
}

static void *core_follow_txt(void *backend, struct mdns_seen *seen)
{
    struct core *b = backend;
    char name[MDNS_SERVICE_NAME_MAX];
    if (!mdns_service_name(seen->instance, name))
        return NULL;
    struct mdns_resolver *k = mdns_resolver_new(b, b->child, seen, 0);
    if (!k)
        return NULL;
    AvahiKey *key = b->api.avahi_key_new(name, AVAHI_DNS_CLASS_IN, AVAHI_DNS_TYPE_TXT);
    if (key) {
        k->handle = b->api.avahi_s_record_browser_new(b->server, (AvahiIfIndex)seen->interface,
                                                      mdns_avahi_protocol(seen->protocol), key, 0,
                                                      on_txt, k);
        b->api.avahi_key_unref(key);
    }
    return mdns_resolver_started(k);
}

static void core_follow_txt_stop(void *follower)
{
    struct mdns_resolver *k = follower;
    const struct core *b = k->backend;
    b->api.avahi_s_record_browser_free(k->handle);
    free(k);
}

static void on_browse(AvahiSServiceBrowser *browser, AvahiIfIndex interface, AvahiProtocol protocol,
                      AvahiBrowserEvent event, const char *name, const char *type,
                      const char *domain, AvahiLookupResultFlags flags, void *userdata)
{
    struct core *b = userdata;
    (void)browser, (void)type, (void)domain, (void)flags;
    mdns_browsed(b->child, interface, protocol, event, name);
    if (event == AVAHI_BROWSER_FAILURE)
        mdns_child_failed(b->child, "browsing failed");
}

static void core_browse(void *backend)
{
    struct core *b = backend;
    if (b->browser)
        b->api.avahi_s_service_browser_free(b->browser);
    b->browser = b->api.avahi_s_service_browser_new(b->server, AVAHI_IF_UNSPEC, AVAHI_PROTO_UNSPEC,
                                                    MDNS_SERVICE_TYPE, NULL, 0, on_browse, b);
    if (!b->browser)
        mdns_child_failed(b->child, "browsing cannot start");
}

/* ---- publishing ---- */

static void on_group(AvahiServer *server, AvahiSEntryGroup *group, AvahiEntryGroupState state,
                     void *userdata)
{
    struct core *b = userdata;
    (void)server, (void)group;
    if (state == AVAHI_ENTRY_GROUP_COLLISION)
        mdns_child_collision(b->child, b->service.instance);
    else if (state == AVAHI_ENTRY_GROUP_FAILURE)
        mdns_child_failed(b->child, "publishing failed");
}

static void host_name(const struct core *b, char ret[HOST_MAX])
{
    (void)snprintf(ret, HOST_MAX, "%s.local", b->service.instance);
}

static int add(struct core *b, AvahiPublishFlags flags, AvahiRecord *take_record)
{
    int e = take_record ? b->api.avahi_server_add(b->server, b->group, AVAHI_IF_UNSPEC,
                                                  AVAHI_PROTO_UNSPEC, flags, take_record)
                        : AVAHI_ERR_NO_MEMORY;
    if (take_record)
        b->api.avahi_record_unref(take_record);
    return e;
}

static AvahiRecord *record(const struct core *b, const char *name, uint16_t type, uint32_t ttl_s)
{
    return b->api.avahi_record_new_full(name, AVAHI_DNS_CLASS_IN, type, ttl_s);
}

static int add_pointer(struct core *b, const char *from, const char *to, uint32_t ttl_s)
{
    AvahiRecord *r = record(b, from, AVAHI_DNS_TYPE_PTR, ttl_s);
    if (r)
        r->data.ptr.name = avahi_strdup(to);
    return add(b, 0, r);
}

static int add_txt(struct core *b, const char *name, AvahiPublishFlags flags)
{
    AvahiRecord *r = record(b, name, AVAHI_DNS_TYPE_TXT, TTL_S);
    if (r)
        r->data.txt.string_list = mdns_avahi_txt(&b->service.txt);
    return add(b, AVAHI_PUBLISH_UNIQUE | flags, r);
}

static int add_service(struct core *b, const char *name)
{
    static const char type[] = MDNS_SERVICE_TYPE ".local";
    char host[HOST_MAX];
    host_name(b, host);
    AvahiRecord *srv = record(b, name, AVAHI_DNS_TYPE_SRV, TTL_S);
    if (srv) {
        srv->data.srv.port = b->service.port;
        srv->data.srv.name = avahi_strdup(host);
    }
    int e = add(b, AVAHI_PUBLISH_UNIQUE, srv);
    if (e == 0)
        e = add_txt(b, name, 0);
    if (e == 0)
        e = add_pointer(b, type, name, TTL_S);
    if (e == 0)
        e = add_pointer(b, "_services._dns-sd._udp.local", type, TYPE_TTL_S);
    return e == 0 ? b->api.avahi_s_entry_group_commit(b->group) : e;
}

static void forget_addresses(struct core *b)
{
    for (uint32_t i = 0; i < b->n_own; i++)
        b->api.avahi_s_entry_group_free(b->own[i].group);
    b->n_own = 0;
}

static bool usable(const struct ifaddrs *a)
{
    return a->ifa_addr && (a->ifa_flags & IFF_UP) &&
           (a->ifa_addr->sa_family == AF_INET || a->ifa_addr->sa_family == AF_INET6);
}

static bool is_other(const struct ifaddrs *a)
{
    return usable(a) && !(a->ifa_flags & (IFF_LOOPBACK | IFF_POINTOPOINT)) &&
           (a->ifa_flags & IFF_MULTICAST);
}

static bool only_loopback(void)
{
    struct ifaddrs *list;
    bool other = false;
    if (getifaddrs(&list) != 0)
        return false;
    for (const struct ifaddrs *a = list; a && !other; a = a->ifa_next)
        other = is_other(a);
    freeifaddrs(list);
    return !other;
}

static AvahiAddress address_of(const struct sockaddr *from)
{
    AvahiAddress a = {.proto = AVAHI_PROTO_INET};
    if (from->sa_family == AF_INET) {
        struct sockaddr_in v4;
        memcpy(&v4, from, sizeof v4);
        a.data.ipv4.address = v4.sin_addr.s_addr;
    } else {
        struct sockaddr_in6 v6;
        memcpy(&v6, from, sizeof v6);
        a.proto = AVAHI_PROTO_INET6;
        memcpy(a.data.ipv6.address, &v6.sin6_addr, sizeof a.data.ipv6.address);
    }
    return a;
}

static bool same_address(const AvahiAddress *a, const AvahiAddress *b)
{
    return a->proto == b->proto &&
           memcmp(&a->data, &b->data, a->proto == AVAHI_PROTO_INET ? 4 : 16) == 0;
}

static void add_address(struct core *b, AvahiIfIndex interface, AvahiAddress *address)
{
    char host[HOST_MAX];
    for (uint32_t i = 0; i < b->n_own; i++) {
        if (b->own[i].interface == interface && same_address(&b->own[i].address, address)) {
            b->own[i].kept = true;
            return;
        }
    }
    if (b->n_own == ADDRESSES_MAX)
        return;
    AvahiSEntryGroup *group = b->api.avahi_s_entry_group_new(b->server, on_group, b);
    if (!group)
        return;
    host_name(b, host);
    int e = b->api.avahi_server_add_address(b->server, group, interface, AVAHI_PROTO_UNSPEC,
                                            AVAHI_PUBLISH_NO_REVERSE, host, address);
    if (e == 0)
        e = b->api.avahi_s_entry_group_commit(group);
    if (e != 0) {
        b->api.avahi_s_entry_group_free(group);
        mdns_child_trouble(b->child, avahi_strerror(e));
        return;
    }
    b->own[b->n_own++] = (struct own_address){interface, *address, group, true};
}

/* Publishes what this machine has now, and takes back what it no longer has. */
static void follow_addresses(struct core *b)
{
    struct ifaddrs *list;
    if (!b->service.instance[0] || getifaddrs(&list) != 0)
        return;
    for (uint32_t i = 0; i < b->n_own; i++)
        b->own[i].kept = false;
    for (const struct ifaddrs *a = list; a; a = a->ifa_next) {
        bool wanted = b->loopback ? usable(a) && (a->ifa_flags & IFF_LOOPBACK) : is_other(a);
        unsigned interface = wanted ? if_nametoindex(a->ifa_name) : 0;
        if (interface == 0)
            continue;
        AvahiAddress address = address_of(a->ifa_addr);
        add_address(b, (AvahiIfIndex)interface, &address);
    }
    freeifaddrs(list);
    uint32_t kept = 0;
    for (uint32_t i = 0; i < b->n_own; i++) {
        if (b->own[i].kept)
            b->own[kept++] = b->own[i];
        else
            b->api.avahi_s_entry_group_free(b->own[i].group);
    }
    b->n_own = kept;
}

static enum err publish_all(struct core *b)
{
    char name[HOST_MAX + 32];
    if (!b->service.instance[0] || !b->running)
        return ERR_OK;
    follow_addresses(b);
    if (!b->group)
        b->group = b->api.avahi_s_entry_group_new(b->server, on_group, b);
    if (!b->group)
        return ERR_NO_MEMORY;
    (void)snprintf(name, sizeof name, "%s.%s.local", b->service.instance, MDNS_SERVICE_TYPE);
    int e = add_service(b, name);
    if (e == 0)
        return ERR_OK;
    mdns_child_trouble(b->child, avahi_strerror(e));
    return e == AVAHI_ERR_COLLISION ? ERR_EXISTS : ERR_IO;
}

static void unpublish(struct core *b)
{
    forget_addresses(b);
    if (b->group)
        b->api.avahi_s_entry_group_free(b->group);
    b->group = NULL;
}

static enum err core_publish(void *backend, const struct mdns_service *service)
{
    struct core *b = backend;
    char name[HOST_MAX + 32];
    bool only_txt = b->group && strcmp(b->service.instance, service->instance) == 0 &&
                    b->service.port == service->port;
    b->service = *service;
    if (only_txt) {
        (void)snprintf(name, sizeof name, "%s.%s.local", service->instance, MDNS_SERVICE_TYPE);
        /* The name has been probed: a change is announced at once (RFC 6762, 8.4). */
        if (add_txt(b, name, AVAHI_PUBLISH_UPDATE | AVAHI_PUBLISH_NO_PROBE) == 0)
            return ERR_OK;
    }
    unpublish(b);
    return publish_all(b);
}

/* ---- life ---- */

static void on_server(AvahiServer *server, AvahiServerState state, void *userdata)
{
    struct core *b = userdata;
    b->server = server; /* also while it is made */
    if (state == AVAHI_SERVER_RUNNING && !b->running) {
        b->running = true;
        if (publish_all(b) != ERR_OK)
            mdns_child_failed(b->child, "publishing failed");
    } else if (state == AVAHI_SERVER_FAILURE) {
        mdns_child_failed(b->child, "the mDNS stack failed");
    }
}

static enum err open_server(struct core *b)
{
    AvahiServerConfig config;
    int e = 0;
    (void)b->api.avahi_server_config_init(&config);
    config.publish_workstation = config.publish_hinfo = config.publish_domain = 0;
    config.publish_addresses = 0;
    config.enable_wide_area = 0;
    config.n_cache_entries_max = CACHE_ENTRIES_MAX;
    b->loopback = only_loopback();
    if (!b->loopback)
        config.deny_interfaces = avahi_string_list_add(config.deny_interfaces, "lo");
    b->running = false;
    b->server = b->api.avahi_server_new(&b->poll, &config, on_server, b, &e);
    b->api.avahi_server_config_free(&config);
    if (!b->server) {
        mdns_child_trouble(b->child, avahi_strerror(e));
        return ERR_IO;
    }
    core_browse(b);
    return ERR_OK;
}

static void close_server(struct core *b)
{
    unpublish(b);
    if (b->browser)
        b->api.avahi_s_service_browser_free(b->browser);
    b->browser = NULL;
    if (b->server)
        b->api.avahi_server_free(b->server);
    b->server = NULL;
}

static void core_interfaces_changed(void *backend)
{
    struct core *b = backend;
    if (only_loopback() == b->loopback) {
        follow_addresses(b);
        return;
    }
    mdns_child_forget(b->child);
    close_server(b);
    if (open_server(b) != ERR_OK)
        mdns_child_failed(b->child, "mDNS cannot start again after a change of interfaces");
}

static void core_stop(void *backend)
{
    struct core *b = backend;
    close_server(b);
    free(b);
}

static enum err core_start(struct mdns_child *child, uv_loop_t *loop, void **ret)
{
    struct core *b = calloc(1, sizeof *b);
    if (!b)
        return ERR_NO_MEMORY;
    if (!open_library(&b->api)) {
        free(b);
        return ERR_NOT_FOUND;
    }
    b->child = child;
    b->api.avahi_set_log_function(quiet);
    mdns_uv_init(&b->poll, loop);
    *ret = b; /* things may be seen from the start */
    enum err e = open_server(b);
    if (e != ERR_OK) {
        free(b);
        return e;
    }
    return ERR_OK;
}

const struct mdns_backend mdns_core_backend = {.kind = MDNS_BACKEND_AVAHI_CORE,
                                               .start = core_start,
                                               .stop = core_stop,
                                               .publish = core_publish,
                                               .interfaces_changed = core_interfaces_changed,
                                               .resolve = core_resolve,
                                               .resolve_stop = core_resolve_stop,
                                               .follow_txt = core_follow_txt,
                                               .follow_txt_stop = core_follow_txt_stop};
