/* mDNS through Avahi's daemon, over D-Bus, where it runs when we start. It owns the host name and
 * the addresses, and says goodbye for us when we die. */
#include "discovery/mdns_backends.h"
#include "discovery/mdns_library.h"
#include "discovery/mdns_uv.h"

#include "base/util.h"

#include <avahi-client/client.h>
#include <avahi-client/lookup.h>
#include <avahi-client/publish.h>
#include <avahi-common/error.h>

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define CLIENT_FUNCTIONS(X)                                                                        \
    X(avahi_client_errno)                                                                          \
    X(avahi_client_free)                                                                           \
    X(avahi_client_new)                                                                            \
    X(avahi_entry_group_add_service_strlst)                                                        \
    X(avahi_entry_group_commit)                                                                    \
    X(avahi_entry_group_new)                                                                       \
    X(avahi_entry_group_reset)                                                                     \
    X(avahi_entry_group_update_service_txt_strlst)                                                 \
    X(avahi_record_browser_free)                                                                   \
    X(avahi_record_browser_new)                                                                    \
    X(avahi_service_browser_free)                                                                  \
    X(avahi_service_browser_new)                                                                   \
    X(avahi_service_resolver_free) X(avahi_service_resolver_new)

struct client_api {
    CLIENT_FUNCTIONS(MDNS_LIBRARY_MEMBER)
};

static bool open_library(struct client_api *ret)
{
#define SYMBOL(name) MDNS_LIBRARY_SYMBOL(struct client_api, name)
    static const struct mdns_symbol symbols[] = {CLIENT_FUNCTIONS(SYMBOL)};
    return mdns_library_open("libavahi-client.so.3", symbols, ARRAY_LEN(symbols), ret);
}

struct avahi {
    struct client_api api;
    struct mdns_child *child;
    AvahiPoll poll;
    AvahiClient *client;
    AvahiServiceBrowser *browser;
    AvahiEntryGroup *group;
    struct mdns_service service; /* empty instance: none */
    bool running, published;
};

/* ---- browsing ---- */

static void on_resolve(AvahiServiceResolver *r, AvahiIfIndex interface, AvahiProtocol protocol,
                       AvahiResolverEvent event, const char *name, const char *type,
                       const char *domain, const char *host, const AvahiAddress *a, uint16_t port,
                       AvahiStringList *txt, AvahiLookupResultFlags flags, void *userdata)
{
    struct mdns_resolver *k = userdata;
    (void)r, (void)interface, (void)protocol, (void)name, (void)type, (void)domain, (void)host;
    (void)flags, (void)txt;
    if (event == AVAHI_RESOLVER_FOUND && a)
        mdns_resolver_found(k, a, port);
}

static void *avahi_resolve(void *backend, struct mdns_seen *seen, uint8_t family)
{
    struct avahi *b = backend;
    struct mdns_resolver *k = mdns_resolver_new(b, b->child, seen, family);
    if (!k)
        return NULL;
    k->handle = b->api.avahi_service_resolver_new(
        b->client, (AvahiIfIndex)seen->interface, mdns_avahi_protocol(seen->protocol),
        seen->instance, MDNS_SERVICE_TYPE, NULL, mdns_avahi_protocol(family), AVAHI_LOOKUP_NO_TXT,
        on_resolve, k);
    return mdns_resolver_started(k);
}

static void avahi_resolve_stop(void *resolver)
{
    struct mdns_resolver *k = resolver;
    const struct avahi *b = k->backend;
    (void)b->api.avahi_service_resolver_free(k->handle);
    free(k);
}

static void on_txt(AvahiRecordBrowser *r, AvahiIfIndex interface, AvahiProtocol protocol,
                   AvahiBrowserEvent event, const char *name, uint16_t class, uint16_t type,
                   const void *data, size_t n, AvahiLookupResultFlags flags, void *userdata)
{
    struct mdns_resolver *k = userdata;
    (void)r, (void)interface, (void)protocol, (void)name, (void)class, (void)flags;
    if (event == AVAHI_BROWSER_NEW && type == AVAHI_DNS_TYPE_TXT)
        mdns_child_txt(k->child, k->seen, data, n);
}

static void *avahi_follow_txt(void *backend, struct mdns_seen *seen)
{
    struct avahi *b = backend;
    char name[MDNS_SERVICE_NAME_MAX];
    if (!mdns_service_name(seen->instance, name))
        return NULL;
    struct mdns_resolver *k = mdns_resolver_new(b, b->child, seen, 0);
    if (!k)
        return NULL;
    k->handle = b->api.avahi_record_browser_new(
        b->client, (AvahiIfIndex)seen->interface, mdns_avahi_protocol(seen->protocol), name,
        AVAHI_DNS_CLASS_IN, AVAHI_DNS_TYPE_TXT, 0, on_txt, k);
    return mdns_resolver_started(k);
}

static void avahi_follow_txt_stop(void *follower)
{
    struct mdns_resolver *k = follower;
    const struct avahi *b = k->backend;
    (void)b->api.avahi_record_browser_free(k->handle);
    free(k);
}

static void on_browse(AvahiServiceBrowser *browser, AvahiIfIndex interface, AvahiProtocol protocol,
                      AvahiBrowserEvent event, const char *name, const char *type,
                      const char *domain, AvahiLookupResultFlags flags, void *userdata)
{
    struct avahi *b = userdata;
    (void)browser, (void)type, (void)domain, (void)flags;
    mdns_browsed(b->child, interface, protocol, event, name);
    if (event == AVAHI_BROWSER_FAILURE)
        mdns_child_failed(b->child, "browsing through the Avahi daemon failed");
}

static void avahi_browse(void *backend)
{
    struct avahi *b = backend;
    if (b->browser)
        (void)b->api.avahi_service_browser_free(b->browser);
    b->browser = b->api.avahi_service_browser_new(b->client, AVAHI_IF_UNSPEC, AVAHI_PROTO_UNSPEC,
                                                  MDNS_SERVICE_TYPE, NULL, 0, on_browse, b);
    if (!b->browser)
        mdns_child_failed(b->child, "browsing through the Avahi daemon cannot start");
}

/* ---- publishing ---- */

static void on_group(AvahiEntryGroup *group, AvahiEntryGroupState state, void *userdata)
{
    struct avahi *b = userdata;
    (void)group;
    if (state == AVAHI_ENTRY_GROUP_COLLISION)
        mdns_child_collision(b->child, b->service.instance);
    else if (state == AVAHI_ENTRY_GROUP_FAILURE)
        mdns_child_failed(b->child, "publishing through the Avahi daemon failed");
}

static enum err add_service(struct avahi *b)
{
    if (!b->group)
        b->group = b->api.avahi_entry_group_new(b->client, on_group, b);
    if (!b->group)
        return b->api.avahi_client_errno(b->client) == AVAHI_ERR_ACCESS_DENIED ? ERR_DENIED
                                                                               : ERR_IO;
    AvahiStringList *txt = mdns_avahi_txt(&b->service.txt);
    int e = b->api.avahi_entry_group_add_service_strlst(
        b->group, AVAHI_IF_UNSPEC, AVAHI_PROTO_UNSPEC, 0, b->service.instance, MDNS_SERVICE_TYPE,
        NULL, NULL, b->service.port, txt);
    avahi_string_list_free(txt);
    if (e == 0)
        e = b->api.avahi_entry_group_commit(b->group);
    b->published = e == 0;
    if (e == AVAHI_ERR_COLLISION) { /* of two agents that use one daemon */
        mdns_child_collision(b->child, b->service.instance);
        return ERR_OK;
    }
    if (e == AVAHI_ERR_NOT_PERMITTED || e == AVAHI_ERR_ACCESS_DENIED)
        return ERR_DENIED;
    return e == 0 ? ERR_OK : ERR_IO;
}

static enum err avahi_publish(void *backend, const struct mdns_service *service)
{
    struct avahi *b = backend;
    bool only_txt = b->published && strcmp(b->service.instance, service->instance) == 0 &&
                    b->service.port == service->port;
    b->service = *service;
    if (!b->running)
        return ERR_OK; /* when the daemon is ready */
    if (only_txt) {
        AvahiStringList *txt = mdns_avahi_txt(&service->txt);
        int e = b->api.avahi_entry_group_update_service_txt_strlst(
            b->group, AVAHI_IF_UNSPEC, AVAHI_PROTO_UNSPEC, 0, service->instance, MDNS_SERVICE_TYPE,
            NULL, txt);
        avahi_string_list_free(txt);
        if (e == 0)
            return ERR_OK;
    }
    if (b->group)
        (void)b->api.avahi_entry_group_reset(b->group);
    b->published = false;
    return add_service(b);
}

/* ---- life ---- */

static void on_running(struct avahi *b)
{
    b->running = true;
    if (!b->browser)
        avahi_browse(b);
    if (b->service.instance[0] && !b->published && add_service(b) != ERR_OK)
        mdns_child_failed(b->child, "publishing through the Avahi daemon failed");
}

static void on_client(AvahiClient *client, AvahiClientState state, void *userdata)
{
    struct avahi *b = userdata;
    b->client = client; /* also while it is made */
    switch (state) {
    case AVAHI_CLIENT_S_RUNNING:
        on_running(b);
        break;
    case AVAHI_CLIENT_S_REGISTERING:
    case AVAHI_CLIENT_S_COLLISION: /* its host name changes: ours to publish again then */
        b->running = b->published = false;
        if (b->group)
            (void)b->api.avahi_entry_group_reset(b->group);
        break;
    case AVAHI_CLIENT_FAILURE:
        mdns_child_failed(b->child, "the Avahi daemon is gone");
        break;
    case AVAHI_CLIENT_CONNECTING:
        break;
    }
}

static void avahi_interfaces_changed(void *backend)
{
    (void)backend; /* the daemon follows them itself */
}

static void avahi_stop(void *backend)
{
    struct avahi *b = backend;
    if (b->client)
        b->api.avahi_client_free(b->client); /* with its browser and group */
    free(b);
}

static enum err avahi_start(struct mdns_child *child, uv_loop_t *loop, void **ret)
{
    int e = 0;
    struct avahi *b = calloc(1, sizeof *b);
    if (!b)
        return ERR_NO_MEMORY;
    if (!open_library(&b->api)) {
        free(b);
        return ERR_NOT_FOUND;
    }
    b->child = child;
    mdns_uv_init(&b->poll, loop);
    *ret = b; /* things may be seen from the start */
    AvahiClient *client = b->api.avahi_client_new(&b->poll, 0, on_client, b, &e);
    if (!client) {
        free(b);
        return ERR_NOT_FOUND;
    }
    b->client = client;
    return ERR_OK;
}

const struct mdns_backend mdns_avahi_backend = {.kind = MDNS_BACKEND_AVAHI_DAEMON,
                                                .start = avahi_start,
                                                .stop = avahi_stop,
                                                .publish = avahi_publish,
                                                .interfaces_changed = avahi_interfaces_changed,
                                                .resolve = avahi_resolve,
                                                .resolve_stop = avahi_resolve_stop,
                                                .follow_txt = avahi_follow_txt,
                                                .follow_txt_stop = avahi_follow_txt_stop};
