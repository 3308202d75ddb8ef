/* `covey doctor` where no agent runs: whether one could start here. Its ports are bound for a
 * moment and given back. Source of the rules: what `covey serve` needs (agent/serve.c). */
#include "agent/cli.h"

#include "agent/config.h"
#include "agent/sysinfo.h"
#include "base/file.h"

#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum { DISK_LITTLE_MIB = 64, MEMORY_LITTLE_MIB = 64 };

static void say(json_t *findings, const char *level, const char *text, const char *hint)
{
    (void)json_array_append_new(
        findings, json_pack("{s:s, s:s, s:s}", "level", level, "text", text, "hint", hint));
}

/* 0, or why the port cannot be had: an errno. */
static int bind_fails(const char *host, uint16_t port, int kind)
{
    struct addrinfo hints = {.ai_socktype = kind, .ai_flags = AI_PASSIVE}, *list = NULL;
    char word[8];
    int why = EADDRNOTAVAIL, on = 1;
    (void)snprintf(word, sizeof word, "%u", port);
    if (getaddrinfo(host, word, &hints, &list) != 0 || !list)
        return why;
    int fd = socket(list->ai_family, kind | SOCK_CLOEXEC, 0);
    if (fd >= 0) {
        if (kind == SOCK_STREAM) /* connections that are over do not count, as for an agent */
            (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        why = bind(fd, list->ai_addr, list->ai_addrlen) != 0 ||
                      (kind == SOCK_STREAM && listen(fd, 1) != 0)
                  ? errno
                  : 0;
        (void)close(fd);
    }
    freeaddrinfo(list);
    return why;
}

static void check_port(const char *option, const char *host, uint16_t port, int kind,
                       json_t *findings)
{
    char text[200], hint[120];
    int why = port ? bind_fails(host, port, kind) : 0; /* 0: any free one */
    if (!why)
        return;
    (void)snprintf(text, sizeof text, "%s port %u (%s) cannot be had: %s",
                   kind == SOCK_STREAM ? "TCP" : "UDP", port, option, strerror(why));
    (void)snprintf(hint, sizeof hint,
                   why == EADDRINUSE ? "another program has it: end that, or give another with %s"
                                     : "give another with %s",
                   option);
    say(findings, "problem", text, hint);
}

static void check_ports(const struct config *c, json_t *findings)
{
    size_t before = json_array_size(findings);
    check_port("--http", c->http_host, c->http_port, SOCK_STREAM, findings);
    check_port("--control-port", "::", c->control_port, SOCK_STREAM, findings);
    check_port("--control-port", "::", c->control_port, SOCK_DGRAM, findings);
    check_port("--data-port", "::", c->data_port, SOCK_STREAM, findings);
    if (json_array_size(findings) == before)
        say(findings, "ok", "the three ports are free", "");
}

static void check_folder(const char *folder, json_t *findings)
{
    char text[CONFIG_PATH_MAX + 80];
    struct statvfs v;
    if (file_make_folder(folder) != ERR_OK || access(folder, R_OK | W_OK | X_OK) != 0) {
        (void)snprintf(text, sizeof text, "%s cannot be written: %s", folder, strerror(errno));
        say(findings, "problem", text, "change its owner or rights, or set COVEY_HOME");
        return;
    }
    if (statvfs(folder, &v) != 0)
        return;
    uint64_t free_mib = (uint64_t)v.f_bavail * v.f_frsize >> 20;
    (void)snprintf(text, sizeof text, "%llu MiB of disk are free at %s",
                   (unsigned long long)free_mib, folder);
    if (free_mib < DISK_LITTLE_MIB)
        say(findings, "problem", text, "an agent must be able to write down what it promised");
    else
        say(findings, "ok", text, "");
}

static void check_memory(json_t *findings)
{
    struct sysinfo_memory m;
    char text[120];
    sysinfo_read_memory(&m);
    (void)snprintf(text, sizeof text, "%.2f GiB of %.1f GiB of memory are available",
                   (double)m.available_bytes / 0x1p30, (double)m.total_bytes / 0x1p30);
    if (m.available_bytes >> 20 < MEMORY_LITTLE_MIB)
        say(findings, "problem", text, "close other programs: too little memory is free");
    else
        say(findings, "ok", text, "");
}

json_t *doctor_alone_json(const struct folders *folders)
{
    json_t *findings = json_array();
    struct config *c = malloc(sizeof *c);
    struct err_text text = {""};
    say(findings, "problem", "no agent runs here", "start one with `covey serve`");
    if (c) {
        config_init(c);
        c->folders = *folders;
        if (config_read_file(c, &text) != ERR_OK)
            say(findings, "problem", text.text, "`covey serve` would not start with it");
        check_ports(c, findings);
    }
    free(c);
    check_folder(folders->data, findings);
    check_memory(findings);
    return json_pack("{s:o}", "findings", findings);
}
