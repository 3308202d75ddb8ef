#include "agent/discovery_shell.h"

#include "agent/agent.h"
#include "base/util.h"
#include "discovery/mdns.h"
#include "transport/loop_net.h"

#include <netdb.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PEER_NAMES_MAX = 32 };

struct peer_name {
    struct discovery_shell *shell;
    uv_getaddrinfo_t lookup;
    bool used, busy;
    char text[CONFIG_WORD_MAX];
    char host[CONFIG_WORD_MAX];
    uint16_t port;
};

struct discovery_shell {
    struct agent *agent;
    struct peer_name names[PEER_NAMES_MAX];
    int n_lookups; /* that have not come back */
    struct mdns *mdns;
    struct net_watch *watch;
    char program[CONFIG_PATH_MAX];
    bool closing;
};

/* ---- names that people gave ---- */

static void on_looked_up(uv_getaddrinfo_t *lookup, int status, struct addrinfo *list)
{
    struct peer_name *p = lookup->data;
    struct node_found f = {.given = true};
    struct discovery_shell *d = p->shell;
    p->busy = false;
    d->n_lookups--;
    if (d->closing) {
        uv_freeaddrinfo(list);
        if (d->n_lookups == 0)
            free(d);
        return;
    }
    (void)snprintf(f.instance, sizeof f.instance, "peer:%.56s", p->text);
    (void)snprintf(f.name, sizeof f.name, "%.63s", p->text);
    for (const struct addrinfo *i = list; i && f.n_addresses < NODE_ADDRESSES_MAX; i = i->ai_next) {
        struct address a;
        struct sockaddr_storage s = {0};
        memcpy(&s, i->ai_addr, MIN_OF((size_t)i->ai_addrlen, sizeof s));
        if (net_address_of(&s, &a) != ERR_OK)
            continue;
        a.port = p->port;
        net_address_name(&a);
        f.addresses[f.n_addresses++] = a;
    }
    uv_freeaddrinfo(list);
    if (status == 0 && f.n_addresses > 0)
        (void)agent_step(d->agent, &(struct node_event){.type = NODE_EVENT_FOUND, .found = &f});
}

static void look_up(struct peer_name *p)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
    char port[8];
    if (p->busy)
        return;
    (void)snprintf(port, sizeof port, "%u", p->port);
    p->lookup.data = p;
    p->busy = uv_getaddrinfo(&p->shell->agent->loop, &p->lookup, on_looked_up, p->host, port,
                             &hints) == 0;
    if (p->busy)
        p->shell->n_lookups++;
}

void discovery_shell_add_peer(struct discovery_shell *d, const char *host_port)
{
    for (int i = 0; i < PEER_NAMES_MAX; i++) {
        struct peer_name *p = &d->names[i];
        if (p->used && strcmp(p->text, host_port) == 0) {
            look_up(p);
            return;
        }
        if (p->used)
            continue;
        p->port = DEFAULT_CONTROL_PORT;
        if (config_parse_host_port(host_port, p->host, &p->port) != ERR_OK)
            return;
        p->shell = d;
        p->used = true;
        (void)snprintf(p->text, sizeof p->text, "%s", host_port);
        look_up(p);
        return;
    }
}

void discovery_shell_refresh(struct discovery_shell *d)
{
    for (int i = 0; i < PEER_NAMES_MAX; i++) {
        if (d->names[i].used)
            look_up(&d->names[i]);
    }
}

/* ---- mDNS ---- */

static void on_found(void *context, const struct mdns_record *record)
{
    struct discovery_shell *d = context;
    struct node_found f = {.gone = record->gone,
                           .n_cluster_tag = record->txt.n_cluster_tag,
                           .n_invite_tag = record->txt.n_invite_tag};
    (void)snprintf(f.instance, sizeof f.instance, "%s", record->instance);
    (void)snprintf(f.name, sizeof f.name, "%s",
                   record->txt.name[0] ? record->txt.name : record->instance);
    memcpy(f.cluster_tag, record->txt.cluster_tag, f.n_cluster_tag);
    memcpy(f.invite_tag, record->txt.invite_tag, f.n_invite_tag);
    for (uint32_t i = 0; i < record->n_addresses && i < NODE_ADDRESSES_MAX; i++)
        f.addresses[f.n_addresses++] = record->addresses[i];
    log_debug(&d->agent->log, "mDNS: %s (%s) %s, %u addresses", f.instance, f.name,
              f.gone ? "gone" : "seen", f.n_addresses);
    (void)agent_step(d->agent, &(struct node_event){.type = NODE_EVENT_FOUND, .found = &f});
}

static bool is_trusted(void *context, const char *instance)
{
    const struct discovery_shell *d = context;
    return node_trusts_found(d->agent->node, instance);
}

static void draw_instance(struct agent *a)
{
    uint8_t bytes[4];
    char hex[2 * sizeof bytes + 1];
    randombytes_buf(bytes, sizeof bytes);
    hex_encode(bytes, sizeof bytes, hex);
    (void)snprintf(a->instance, sizeof a->instance, "covey-%s", hex);
}

static void service_of(const struct agent *a, struct mdns_service *ret)
{
    uint32_t n_cluster = 0, n_invite = 0;
    *ret = (struct mdns_service){.port = control_net_port(a->control),
                                 .txt = {.version = MDNS_VERSION}};
    (void)snprintf(ret->instance, sizeof ret->instance, "%s", a->instance);
    if (mdns_text_ok(a->config.name, strlen(a->config.name)))
        (void)snprintf(ret->txt.name, sizeof ret->txt.name, "%s", a->config.name);
    node_tags(a->node, a->instance, ret->txt.cluster_tag, &n_cluster, ret->txt.invite_tag,
              &n_invite);
    ret->txt.n_cluster_tag = (uint8_t)n_cluster;
    ret->txt.n_invite_tag = (uint8_t)n_invite;
}

void discovery_shell_announce(struct discovery_shell *d)
{
    struct mdns_service service;
    if (!d || !d->mdns)
        return;
    service_of(d->agent, &service);
    mdns_publish(d->mdns, &service);
}

static void on_collision(void *context)
{
    struct discovery_shell *d = context;
    log_info(&d->agent->log, "another node announces itself as %s: taking a new name",
             d->agent->instance);
    draw_instance(d->agent);
    discovery_shell_announce(d);
}

static void on_interfaces(void *context, const struct net_interfaces *now)
{
    struct discovery_shell *d = context;
    (void)now;
    mdns_interfaces_changed(d->mdns);
}

static enum err start_mdns(struct discovery_shell *d, struct err_text *text)
{
    struct agent *a = d->agent;
    static const char *const args[] = {"covey", DISCOVERY_CHILD_VERB, NULL};
    size_t n = sizeof d->program;
    /* The first way also works when the file was replaced meanwhile. */
    (void)snprintf(d->program, sizeof d->program, "/proc/self/exe");
    if (access(d->program, X_OK) != 0 && uv_exepath(d->program, &n) != 0)
        return err_set(text, ERR_IO, "this program cannot find itself to start its mDNS part");
    struct mdns_options o = {.loop = &a->loop,
                             .log = &a->log,
                             .child_file = d->program,
                             .child_args = args,
                             .context = d,
                             .on_found = on_found,
                             .is_trusted = is_trusted,
                             .on_collision = on_collision};
    draw_instance(a);
    service_of(a, &o.service);
    TRY(mdns_new(&o, &d->mdns, text));
    return net_watch_new(&a->loop, d, on_interfaces, &d->watch);
}

const char *discovery_shell_backend(const struct discovery_shell *d)
{
    return d->mdns ? mdns_backend(d->mdns) : "off";
}

/* ---- life ---- */

enum err discovery_shell_new(struct agent *a, struct discovery_shell **ret, struct err_text *text)
{
    struct discovery_shell *d = calloc(1, sizeof *d);
    if (!d)
        return ERR_NO_MEMORY;
    d->agent = a;
    if (a->config.mdns && start_mdns(d, text) != ERR_OK) /* --peer still works */
        log_warning(&a->log, "no mDNS: %s", text->text);
    for (uint32_t i = 0; i < a->config.n_peers; i++)
        discovery_shell_add_peer(d, a->config.peers[i]);
    *ret = d;
    return ERR_OK;
}

void discovery_shell_free(struct discovery_shell *d)
{
    if (!d)
        return;
    d->closing = true;
    net_watch_close(d->watch);
    mdns_close(d->mdns);
    for (int i = 0; i < PEER_NAMES_MAX; i++) {
        if (d->names[i].busy)
            (void)uv_cancel((uv_req_t *)&d->names[i].lookup);
    }
    if (d->n_lookups == 0) /* else the last lookup that comes back frees it */
        free(d);
}
