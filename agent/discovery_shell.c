#include "agent/discovery_shell.h"

#include "agent/agent.h"
#include "base/util.h"

#include <netdb.h>
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
    bool closing;
};

static void on_looked_up(uv_getaddrinfo_t *lookup, int status, struct addrinfo *list)
{
    struct peer_name *p = lookup->data;
    struct node_found f = {.given = true};
    p->busy = false;
    (void)snprintf(f.instance, sizeof f.instance, "peer:%.56s", p->text);
    (void)snprintf(f.name, sizeof f.name, "%.63s", p->text);
    for (const struct addrinfo *i = list; i && f.n_addresses < NODE_ADDRESSES_MAX; i = i->ai_next) {
        struct net_address a;
        struct sockaddr_storage s = {0};
        memcpy(&s, i->ai_addr, MIN_OF((size_t)i->ai_addrlen, sizeof s));
        if (net_address_of(&s, &a) != ERR_OK)
            continue;
        a.port = p->port;
        f.addresses[f.n_addresses++] = address_of_net(&a);
    }
    uv_freeaddrinfo(list);
    if (status == 0 && f.n_addresses > 0 && !p->shell->closing)
        (void)agent_step(p->shell->agent,
                         &(struct node_event){.type = NODE_EVENT_FOUND, .found = &f});
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

void discovery_shell_announce(struct discovery_shell *d)
{
    (void)d;
}

enum err discovery_shell_new(struct agent *a, struct discovery_shell **ret, struct err_text *text)
{
    struct discovery_shell *d = calloc(1, sizeof *d);
    (void)text;
    if (!d)
        return ERR_NO_MEMORY;
    d->agent = a;
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
    for (int i = 0; i < PEER_NAMES_MAX; i++) {
        if (d->names[i].busy)
            (void)uv_cancel((uv_req_t *)&d->names[i].lookup);
    }
    /* Lookups end within the loop's last run, before this memory goes: the caller runs the loop out
     * first. */
    free(d);
}
