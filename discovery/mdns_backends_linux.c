#include "discovery/mdns_backends.h"

#include <avahi-common/domain.h>
#include <stdlib.h>

const struct mdns_backend *const *mdns_backends(void)
{
    static const struct mdns_backend *const list[] = {&mdns_avahi_backend, &mdns_core_backend,
                                                      NULL};
    return list;
}

AvahiProtocol mdns_avahi_protocol(uint8_t family)
{
    return family == 4 ? AVAHI_PROTO_INET : AVAHI_PROTO_INET6;
}

AvahiStringList *mdns_avahi_txt(const struct mdns_txt *txt)
{
    uint8_t bytes[MDNS_TXT_BYTES_MAX];
    AvahiStringList *list = NULL;
    size_t n = mdns_txt_build(txt, bytes);
    return avahi_string_list_parse(bytes, n, &list) == 0 ? list : NULL;
}

struct mdns_resolver *mdns_resolver_new(void *backend, struct mdns_child *child,
                                        struct mdns_seen *seen, uint8_t family)
{
    struct mdns_resolver *k = calloc(1, sizeof *k);
    if (k)
        *k = (struct mdns_resolver){
            .backend = backend, .child = child, .seen = seen, .family = family};
    return k;
}

struct mdns_resolver *mdns_resolver_started(struct mdns_resolver *take_k)
{
    if (take_k->handle)
        return take_k;
    free(take_k);
    return NULL;
}

void mdns_browsed(struct mdns_child *child, AvahiIfIndex interface, AvahiProtocol protocol,
                  AvahiBrowserEvent event, const char *name)
{
    uint8_t family = protocol == AVAHI_PROTO_INET ? 4 : 6;
    if (event == AVAHI_BROWSER_NEW && interface > 0)
        mdns_child_seen(child, (uint32_t)interface, family, name);
    else if (event == AVAHI_BROWSER_REMOVE && interface > 0)
        mdns_child_lost(child, (uint32_t)interface, family, name);
}

void mdns_resolver_found(struct mdns_resolver *r, const AvahiAddress *a, uint16_t port)
{
    uint8_t ip[16] = {0};
    if (a->proto != mdns_avahi_protocol(r->family))
        return;
    for (int i = 0; i < (r->family == 4 ? 4 : 16); i++)
        ip[i] = a->data.data[i];
    mdns_child_resolved(r->child, r->seen, r->family, ip, port);
}

bool mdns_service_name(const char *instance, char ret[MDNS_SERVICE_NAME_MAX])
{
    return avahi_service_name_join(ret, MDNS_SERVICE_NAME_MAX, instance, MDNS_SERVICE_TYPE,
                                   "local") == 0;
}
