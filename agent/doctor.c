/* What is wrong, in plain words, and what to do next. What can be seen without an agent is in
 * agent/doctor_alone.c. */
#include "agent/agent.h"

#include "base/clock.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HELD_MAX = 256, CLOCKS_DIFFER_MS = 60 * 1000 };

static void say(json_t *findings, const char *level, const char *text, const char *hint)
{
    (void)json_array_append_new(
        findings, json_pack("{s:s, s:s, s:s}", "level", level, "text", text, "hint", hint));
}

static void check_memory(const struct agent *a, json_t *findings)
{
    char text[160];
    (void)snprintf(text, sizeof text, "%.2f GiB of %.1f GiB may be used for models",
                   (double)a->local.budget_bytes / 0x1p30,
                   (double)a->local.memory_total_bytes / 0x1p30);
    if (a->local.budget_bytes < (UINT64_C(64) << 20))
        say(findings, "problem", text,
            a->config.memory_limit ? "raise --memory-limit"
                                   : "close other programs: too little memory is free");
    else
        say(findings, "ok", text, "");
}

/* An address that a person gave, where no node has answered yet. */
static void say_silent(const struct node_view *v, json_t *findings)
{
    char text[160];
    (void)snprintf(text, sizeof text, "no answer from %s", v->name);
    say(findings, "problem", text,
        "is an agent running there, and is that its control port? A firewall may be in between");
}

/* A member that is heard, but to which a connection cannot be made as it should be. */
static void check_paths(const struct node_view *v, json_t *findings)
{
    char text[200];
    uint32_t n_up = 0;
    double fastest = 0;
    for (uint32_t i = 0; i < v->n_paths; i++) {
        n_up += v->paths[i].up;
        fastest = fastest > v->paths[i].bytes_per_s ? fastest : v->paths[i].bytes_per_s;
    }
    if (v->n_paths > 0 && n_up == 0) {
        (void)snprintf(text, sizeof text, "%s is heard of, but datagrams reach it by no path",
                       v->name);
        say(findings, "problem", text, "a firewall must let its control port through by UDP too");
    } else if (n_up > 0 && v->data_port && fastest <= 0) {
        (void)snprintf(text, sizeof text,
                       "%s answers on its control port; its data port, %u, has not yet", v->name,
                       v->data_port);
        say(findings, "note", text,
            "this lasts for a moment after a start; else a firewall blocks that port (TCP)");
    }
}

/* Tokens and certificates mind minutes, not seconds. */
static void check_clock_of(struct agent *a, const struct node_view *v, json_t *findings)
{
    char text[200];
    int64_t ahead_ms = 0;
    if (!control_clock_ahead(node_control(a->node), &v->id, &ahead_ms) ||
        (ahead_ms > -CLOCKS_DIFFER_MS && ahead_ms < CLOCKS_DIFFER_MS))
        return;
    (void)snprintf(text, sizeof text, "the clocks differ: that of %s is %lld s %s this machine's",
                   v->name, (long long)(ahead_ms < 0 ? -ahead_ms : ahead_ms) / 1000,
                   ahead_ms < 0 ? "behind" : "ahead of");
    say(findings, "problem", text, "set the one that is wrong: let both follow a time server");
}

static void check_peers(struct agent *a, json_t *findings)
{
    struct node_view views[64];
    uint32_t n = node_views(a->node, views, 64);
    uint32_t n_members = 0, n_alive = 0, n_away = 0, n_found = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (strcmp(views[i].state, "no answer") == 0) {
            say_silent(&views[i], findings);
            continue;
        }
        bool other = views[i].member && !views[i].self;
        n_members += other;
        n_alive += other && strcmp(views[i].state, "alive") == 0;
        n_away +=
            other && (strcmp(views[i].state, "left") == 0 || strcmp(views[i].state, "asleep") == 0);
        n_found += !views[i].member;
        if (views[i].member && !views[i].self && strcmp(views[i].state, "alive") == 0)
            check_paths(&views[i], findings);
        if (views[i].member && !views[i].self)
            check_clock_of(a, &views[i], findings);
    }
    char text[160];
    (void)snprintf(text, sizeof text,
                   "%u other member(s): %u alive, %u stopped or asleep; %u other node(s) found",
                   n_members, n_alive, n_away, n_found);
    if (n_members > n_alive + n_away)
        say(findings, "problem", text,
            "a member does not answer: is it running and on this network? A firewall must let the "
            "control port (TCP "
            "and UDP) and the data port (TCP) through");
    else if (n_members == 0 && n_found > 0)
        say(findings, "note", text,
            "to make one cluster of two: `covey invite` on the one, `covey join TOKEN` on the "
            "other");
    else if (n_members + n_found == 0)
        say(findings, "note", text,
            "start `covey serve` on another machine; where multicast is blocked (guest Wi-Fi, "
            "VLANs, containers) "
            "name it with --peer HOST");
    else
        say(findings, "ok", text, "");
}

static bool is_held(const struct node_held *held, uint32_t n, const struct hash256 *model)
{
    for (uint32_t i = 0; i < n; i++)
        if (hash256_eq(&held[i].model, model))
            return true;
    return false;
}

static void check_models(struct agent *a, json_t *findings)
{
    struct node_held *held = calloc(HELD_MAX, sizeof *held);
    uint32_t n = held ? node_held(a->node, held, HELD_MAX) : 0;
    if (n == 0)
        say(findings, "note", "no member holds a model",
            "`covey pull smollm2` fetches a small one");
    else
        say(findings, "ok", "there is a model", "");
    uint32_t n_wanted = control_n_models(node_control(a->node));
    for (uint32_t i = 0; i < n_wanted; i++) {
        struct control_model m;
        control_model_at(node_control(a->node), i, &m);
        if (!is_held(held, n, &m.model)) {
            char text[192];
            (void)snprintf(text, sizeof text, "%s is wanted, and no member that is here holds it",
                           m.name);
            say(findings, "problem", text,
                "start the machine that has it, `covey pull` it again, or `covey stop` it");
        }
        if (m.no_fit[0])
            say(findings, "problem", m.no_fit,
                m.refused ? "put that right, then `covey load` the model: it is tried again"
                          : "add a machine, raise a memory limit or ask for a shorter context");
    }
    free(held);
}

static void check_clock(json_t *findings)
{
    const uint64_t built_ms = UINT64_C(1735689600000); /* 2025-01-01: no true clock is behind it */
    if (clock_wall_ms() < built_ms)
        say(findings, "problem", "this machine's clock is far in the past",
            "set it: model hubs refuse connections from the past");
    else
        say(findings, "ok", "the clock is plausible", "");
}

static void check_disk(const struct agent *a, json_t *findings)
{
    char text[CONFIG_PATH_MAX + 64];
    if (!a->disk_full)
        return;
    (void)snprintf(text, sizeof text, "%s cannot be written: is the disk full?",
                   a->config.folders.data);
    say(findings, "problem", text,
        "make room: until then this node takes part in no election and follows no new planner");
}

static void check_speed(const struct agent *a, json_t *findings)
{
    if (a->local.stream_bytes_per_s <= 0)
        say(findings, "note", "the speed of this machine is not measured yet", "wait two seconds");
    else
        say(findings, "ok", "the speed of this machine is known", "");
}

json_t *doctor_json(struct agent *a)
{
    json_t *findings = json_array();
    check_memory(a, findings);
    check_speed(a, findings);
    check_disk(a, findings);
    check_peers(a, findings);
    check_models(a, findings);
    check_clock(findings);
    return json_pack("{s:o}", "findings", findings);
}
