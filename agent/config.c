#include "agent/config.h"

#include "base/util.h"
#include "discovery/mdns_txt.h"
#include "planner/plan.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ini.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

void config_init(struct config *c)
{
    *c = (struct config){.http_port = DEFAULT_HTTP_PORT,
                         .control_port = DEFAULT_CONTROL_PORT,
                         .data_port = DEFAULT_DATA_PORT,
                         .precision = PRECISION_FAST,
                         .log_level = LOG_INFO,
                         .mdns = true,
                         .spare_copies = true,
                         .spare_margin = UINT64_MAX};
    (void)snprintf(c->http_host, sizeof c->http_host, "127.0.0.1");
    const char *hub = getenv("COVEY_HUB");
    (void)snprintf(c->hub, sizeof c->hub, "%s", hub && *hub ? hub : "https://huggingface.co");
    if (gethostname(c->name, sizeof c->name - 1) != 0 || !c->name[0])
        (void)snprintf(c->name, sizeof c->name, "covey");
    c->name[sizeof c->name - 1] = 0;
    char *dot = strchr(c->name, '.');
    if (dot)
        *dot = 0;
}

enum err folders_find(struct folders *ret, struct err_text *text)
{
    const char *home = getenv("COVEY_HOME");
    if (!home || !*home)
        return folders_of_system(ret) == ERR_OK
                   ? ERR_OK
                   : err_set(text, ERR_NOT_FOUND,
                             "no home folder is known: set HOME or COVEY_HOME");
    char base[CONFIG_PATH_MAX - 64] = "";
    if (home[0] != '/' && !getcwd(base, sizeof base))
        return err_set(text, ERR_IO, "the current folder cannot be read: %s", strerror(errno));
    size_t n = strlen(base);
    int k = snprintf(base + n, sizeof base - n, "%s%s", n ? "/" : "", home);
    if (k < 0 || (size_t)k >= sizeof base - n)
        return err_set(text, ERR_LIMIT, "COVEY_HOME is too long");
    (void)snprintf(ret->config, sizeof ret->config, "%s/config", base);
    (void)snprintf(ret->data, sizeof ret->data, "%s/data", base);
    (void)snprintf(ret->socket, sizeof ret->socket, "%s/agent.sock", base);
    return ERR_OK;
}

enum err config_parse_size(const char *word, uint64_t *ret)
{
    char *end;
    errno = 0;
    double v = strtod(word, &end);
    if (end == word || errno != 0 || !(v >= 0))
        return ERR_INVALID;
    while (*end == ' ')
        end++;
    static const struct {
        const char *suffix;
        double factor;
    } units[] = {{"", 1},         {"B", 1},       {"K", 0x1p10},   {"KB", 0x1p10}, {"KiB", 0x1p10},
                 {"M", 0x1p20},   {"MB", 0x1p20}, {"MiB", 0x1p20}, {"G", 0x1p30},  {"GB", 0x1p30},
                 {"GiB", 0x1p30}, {"T", 0x1p40},  {"TB", 0x1p40},  {"TiB", 0x1p40}};
    for (size_t i = 0; i < ARRAY_LEN(units); i++) {
        if (strcasecmp(end, units[i].suffix) == 0) {
            if (v * units[i].factor > 0x1p62)
                return ERR_LIMIT;
            *ret = (uint64_t)(v * units[i].factor);
            return ERR_OK;
        }
    }
    return ERR_INVALID;
}

static enum err parse_number(const char *word, uint64_t max, uint64_t *ret)
{
    char *end;
    errno = 0;
    unsigned long long v = strtoull(word, &end, 10);
    if (end == word || *end || errno != 0 || word[0] == '-' || v > max)
        return ERR_INVALID;
    *ret = v;
    return ERR_OK;
}

enum err config_parse_host_port(const char *word, char host[CONFIG_WORD_MAX], uint16_t *port)
{
    const char *start = word, *end, *colon;
    if (word[0] == '[') {
        start = word + 1;
        end = strchr(start, ']');
        if (!end)
            return ERR_INVALID;
        colon = end[1] == ':' ? end + 1 : NULL;
        if (end[1] && !colon)
            return ERR_INVALID;
    } else {
        colon = strrchr(word, ':');
        if (colon && strchr(word, ':') != colon)
            colon = NULL; /* a bare IPv6 address */
        end = colon ? colon : word + strlen(word);
    }
    size_t n = (size_t)(end - start);
    if (n == 0 || n >= CONFIG_WORD_MAX)
        return ERR_INVALID;
    uint64_t number = 0;
    if (colon) {
        TRY(parse_number(colon + 1, 65535, &number));
        *port = (uint16_t)number;
    }
    memcpy(host, start, n);
    host[n] = 0;
    return ERR_OK;
}

enum err config_parse_keep_alive(const char *word, uint32_t *ret_s)
{
    static const struct {
        const char *suffix;
        uint64_t s;
    } units[] = {{"", 1}, {"s", 1}, {"m", 60}, {"h", 3600}, {"d", 86400}};
    char *end;
    if (strcmp(word, "forever") == 0) {
        *ret_s = 0;
        return ERR_OK;
    }
    errno = 0;
    unsigned long long v = strtoull(word, &end, 10);
    if (end == word || word[0] < '0' || word[0] > '9' || errno != 0)
        return ERR_INVALID;
    for (size_t i = 0; i < ARRAY_LEN(units); i++) {
        if (strcmp(end, units[i].suffix) != 0)
            continue;
        if (v > CONFIG_KEEP_ALIVE_MAX_S / units[i].s || v * units[i].s < CONFIG_KEEP_ALIVE_MIN_S)
            return ERR_INVALID;
        *ret_s = (uint32_t)(v * units[i].s);
        return ERR_OK;
    }
    return ERR_INVALID;
}

static enum err set_word(char *to, size_t size, const char *value)
{
    if (strlen(value) >= size)
        return ERR_LIMIT;
    (void)snprintf(to, size, "%s", value);
    return ERR_OK;
}

static enum err set_port(uint16_t *to, const char *value)
{
    uint64_t v;
    TRY(parse_number(value, 65535, &v));
    *to = (uint16_t)v;
    return ERR_OK;
}

static enum err set_u32(uint32_t *to, const char *value, uint32_t max)
{
    uint64_t v;
    TRY(parse_number(value, max, &v));
    *to = (uint32_t)v;
    return ERR_OK;
}

static enum err set_switch(bool *to, const char *value)
{
    bool yes = strcasecmp(value, "yes") == 0 || strcasecmp(value, "on") == 0 ||
               strcasecmp(value, "true") == 0;
    bool no = strcasecmp(value, "no") == 0 || strcasecmp(value, "off") == 0 ||
              strcasecmp(value, "false") == 0;
    if (!yes && !no)
        return ERR_INVALID;
    *to = yes;
    return ERR_OK;
}

static enum err set_precision(uint8_t *to, const char *value)
{
    return precision_parse(value, to);
}

/* A plain number is MiB (PROTOCOL 5.3). */
static enum err set_memory_limit(uint64_t *to, const char *value)
{
    uint64_t mib;
    if (parse_number(value, UINT64_C(1) << 40, &mib) != ERR_OK)
        return config_parse_size(value, to);
    *to = mib << 20;
    return ERR_OK;
}

/* Could it be a host's name or an address? Whether there is such a host only a look-up tells. */
static bool is_host(const char *host)
{
    unsigned char ip[16];
    if (strchr(host, ':')) {
        char plain[CONFIG_WORD_MAX];
        (void)snprintf(plain, sizeof plain, "%.*s", (int)strcspn(host, "%"), host);
        return inet_pton(AF_INET6, plain, ip) == 1;
    }
    return strspn(host, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_") ==
           strlen(host);
}

static enum err add_peer(struct config *c, const char *value)
{
    char host[CONFIG_WORD_MAX];
    uint16_t port = 0;
    if (c->n_peers == CONFIG_PEERS_MAX)
        return ERR_LIMIT;
    TRY(config_parse_host_port(value, host, &port));
    if (!is_host(host))
        return ERR_INVALID;
    TRY(set_word(c->peers[c->n_peers], sizeof c->peers[0], value));
    c->n_peers++;
    return ERR_OK;
}

/* Others see it, in JSON and on terminals. */
static enum err set_name(struct config *c, const char *value)
{
    if (!value[0] || !mdns_text_ok(value, strlen(value)))
        return ERR_INVALID;
    return set_word(c->name, sizeof c->name, value);
}

/* 0: the most that fits. */
static enum err set_context(struct config *c, const char *value)
{
    uint32_t v;
    TRY(set_u32(&v, value, 1u << 24));
    if (v > 0 && v < CONFIG_CONTEXT_MIN)
        return ERR_INVALID;
    c->context = v;
    return ERR_OK;
}

static enum err set_by_key(struct config *c, const char *key, const char *value)
{
    if (strcmp(key, "http") == 0)
        return config_parse_host_port(value, c->http_host, &c->http_port);
    if (strcmp(key, "control-port") == 0)
        return set_port(&c->control_port, value);
    if (strcmp(key, "data-port") == 0)
        return set_port(&c->data_port, value);
    if (strcmp(key, "memory-limit") == 0)
        return set_memory_limit(&c->memory_limit, value);
    if (strcmp(key, "threads") == 0)
        return set_u32(&c->n_threads, value, 1024);
    if (strcmp(key, "peer") == 0)
        return add_peer(c, value);
    if (strcmp(key, "model") == 0)
        return set_word(c->model, sizeof c->model, value);
    if (strcmp(key, "precision") == 0)
        return set_precision(&c->precision, value);
    if (strcmp(key, "context") == 0)
        return set_context(c, value);
    if (strcmp(key, "keep-alive") == 0)
        return config_parse_keep_alive(value, &c->keep_alive_s);
    if (strcmp(key, "log-level") == 0)
        return log_level_parse(value, &c->log_level) ? ERR_OK : ERR_INVALID;
    if (strcmp(key, "api-key") == 0)
        return set_word(c->api_key, sizeof c->api_key, value);
    if (strcmp(key, "hub") == 0)
        return set_word(c->hub, sizeof c->hub, value);
    if (strcmp(key, "name") == 0)
        return set_name(c, value);
    if (strcmp(key, "mdns") == 0)
        return set_switch(&c->mdns, value);
    if (strcmp(key, "spare-copies") == 0)
        return set_switch(&c->spare_copies, value);
    if (strcmp(key, "spare-margin") == 0)
        return config_parse_size(value, &c->spare_margin);
    return ERR_NOT_FOUND;
}

enum err config_set(struct config *c, const char *key, const char *value, struct err_text *text)
{
    enum err e = set_by_key(c, key, value);
    if (e == ERR_NOT_FOUND)
        return err_set(text, e, "there is no setting named '%s'", key);
    if (e == ERR_LIMIT)
        return err_set(text, e, "%s: '%s' is too long or one too many", key, value);
    if (e != ERR_OK)
        return err_set(text, e, "%s: '%s' is not a value that this setting can have", key, value);
    return ERR_OK;
}

struct reading {
    struct config *config;
    struct err_text *text;
};

static int on_line(void *user, const char *section, const char *key, const char *value)
{
    struct reading *r = user;
    (void)section; /* sections group lines for people; keys are unique without them */
    return config_set(r->config, key, value, r->text) == ERR_OK;
}

enum err config_read_file(struct config *c, struct err_text *text)
{
    char path[CONFIG_PATH_MAX + 16];
    (void)snprintf(path, sizeof path, "%s/covey.ini", c->folders.config);
    struct stat st;
    if (stat(path, &st) != 0 && errno == ENOENT)
        return ERR_OK;
    if (stat(path, &st) == 0 && S_ISDIR(st.st_mode))
        return err_set(text, ERR_INVALID, "%s: this is a folder; a file of settings is needed",
                       path);
    struct err_text inner = {""};
    struct reading r = {c, &inner};
    int line = ini_parse(path, on_line, &r);
    if (line < 0)
        return err_set(text, ERR_IO, "%s: cannot be read", path);
    if (line > 0)
        return err_set(text, ERR_INVALID, "%s, line %d: %.200s", path, line,
                       inner.text[0] ? inner.text : "not of the form key = value");
    return ERR_OK;
}
