/* Tables for people. Programs use --json. */
#include "agent/cli.h"

#include <stdio.h>
#include <string.h>

static const char *word(const json_t *o, const char *key)
{
    const char *s = json_string_value(json_object_get(o, key));
    return s ? s : "";
}

static double number(const json_t *o, const char *key)
{
    return json_number_value(json_object_get(o, key));
}

static void show_scaled(double x, double step, const char *const units[5], char ret[32])
{
    int i = 0;
    while (x >= step - 0.5 && i < 4) {
        x /= step;
        i++;
    }
    (void)snprintf(ret, 32, i == 0 || x >= 100 ? "%.0f %s" : "%.1f %s", x, units[i]);
}

/* Sizes of memory and files count in 1024, rates in 1000. */
void show_size(double bytes, char ret[32])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    show_scaled(bytes, 1024, units, ret);
}

static void show_rate(double bytes_per_s, char ret[32])
{
    if (bytes_per_s <= 0) {
        (void)snprintf(ret, 32, "-");
        return;
    }
    static const char *const units[] = {"B/s", "kB/s", "MB/s", "GB/s", "TB/s"};
    show_scaled(bytes_per_s, 1000, units, ret);
}

static void show_rtt(double us, char ret[32])
{
    if (us <= 0)
        (void)snprintf(ret, 32, "-");
    else if (us < 1000)
        (void)snprintf(ret, 32, "%.0f us", us);
    else
        (void)snprintf(ret, 32, "%.1f ms", us / 1000);
}

static void show_one_node(const json_t *n)
{
    const json_t *memory = json_object_get(n, "memory"), *compute = json_object_get(n, "compute"),
                 *p;
    char budget[32], total[32], stream[32], state[32], macs[32] = "-";
    size_t i;
    bool member = json_is_true(json_object_get(n, "member"));
    bool silent = strcmp(word(n, "state"), "no answer") == 0; /* perhaps no node at all */
    (void)snprintf(state, sizeof state, "%s%s", word(n, "state"),
                   member || silent ? "" : ", not a member");
    show_size(number(memory, "budget_bytes"), budget);
    show_size(number(memory, "total_bytes"), total);
    show_rate(number(compute, "stream_bytes_per_s"), stream);
    (void)printf("%-18.18s %-10.10s %-24s", word(n, "name"), *word(n, "id") ? word(n, "id") : "-",
                 state);
    if (number(compute, "macs_per_s") > 0)
        (void)snprintf(macs, sizeof macs, "%.1f G/s", number(compute, "macs_per_s") / 1e9);
    if (member)
        (void)printf(" %9s of %-9s %10s %10s", budget, total, stream, macs);
    (void)printf("%s\n", json_is_true(json_object_get(n, "self")) ? "  (this node)" : "");
    json_array_foreach(json_object_get(n, "paths"), i, p)
    {
        char rtt[32], rate[32];
        show_rtt(number(p, "rtt_us"), rtt);
        show_rate(number(p, "bytes_per_s"), rate);
        (void)printf("    %-44s %-5s round trip %-9s bandwidth %s\n", word(p, "address"),
                     !member                                  ? ""
                     : json_is_true(json_object_get(p, "up")) ? "up"
                                                              : "down",
                     rtt, rate);
    }
}

void show_nodes(const json_t *nodes)
{
    const json_t *n;
    size_t i;
    (void)printf("%-18s %-10s %-24s %22s %10s %10s\n", "NAME", "ID", "STATE", "MEMORY FOR MODELS",
                 "STREAMS", "COMPUTES");
    json_array_foreach(json_object_get(nodes, "nodes"), i, n) show_one_node(n);
}

static void show_stages(const json_t *stages, const char *indent)
{
    const json_t *s;
    size_t i;
    json_array_foreach(stages, i, s)
    {
        const char *name = json_string_value(json_array_get(json_object_get(s, "names"), 0));
        const char *id = json_string_value(json_array_get(json_object_get(s, "nodes"), 0));
        char memory[32];
        show_size(number(s, "memory_bytes"), memory);
        (void)printf("%slayers %3.0f to %3.0f on %s (%.10s), %s\n", indent,
                     number(s, "first_layer"), number(s, "last_layer"), name ? name : "?",
                     id ? id : "?", memory);
    }
}

/* "name (the id's first digits)"; an unknown node is its id alone. */
static void show_who(const json_t *names, const char *id, char ret[80])
{
    const char *name = word(names, id);
    if (*name)
        (void)snprintf(ret, 80, "%.64s (%.10s)", name, id);
    else
        (void)snprintf(ret, 80, "%.10s", id);
}

static void show_second_copy(const json_t *model, const json_t *names)
{
    const json_t *copy = json_object_get(model, "second_copy"), *t;
    const char *state = word(copy, "state");
    const json_t *takers = json_object_get(copy, "takers");
    size_t i;
    if (strcmp(state, "complete") == 0)
        (void)printf("           every byte is on two members or more\n");
    else if (*state && strcmp(state, "no other member") != 0)
        (void)printf("           second copy: %s, %.0f %%\n", state, number(copy, "percent"));
    json_array_foreach(takers, i, t)
    {
        char size[32], who[80];
        show_size(number(t, "bytes"), size);
        show_who(names, word(t, "node"), who);
        (void)printf("           %s more to be copied to %s\n", size, who);
    }
    if (number(copy, "no_room_bytes") > 0 && strcmp(state, "no other member") != 0) {
        char size[32];
        show_size(number(copy, "no_room_bytes"), size);
        (void)printf("           for %s no other member has disk to spare\n", size);
    }
    json_array_foreach(json_object_get(model, "fatal_losses"), i, t)
    {
        char who[80];
        show_who(names, json_string_value(t), who);
        (void)printf("           the loss of %s would end it: it alone holds some of the bytes\n",
                     who);
    }
}

void show_status(const json_t *s)
{
    const json_t *names = json_object_get(s, "node_names"), *m;
    size_t i;
    char resident[32];
    show_size(number(s, "resident_bytes"), resident);
    (void)printf("%s (%.10s), covey %s\n", word(s, "name"), word(s, "id"), word(s, "version"));
    (void)printf("API        %s/v1\n", word(s, "http"));
    if (*word(s, "planner")) {
        char who[80];
        show_who(names, word(s, "planner"), who);
        (void)printf("planner    %s, term %.0f\n", who, number(s, "term"));
    } else
        (void)printf("planner    none yet\n");
    if (json_is_true(json_object_get(s, "disk_full")))
        (void)printf(
            "disk       the data folder cannot be written (see `covey doctor`): no election "
            "is joined and no new planner followed until there is room\n");
    (void)printf("memory     %s resident, up for %.0f s\n", resident, number(s, "uptime_s"));
    (void)printf("requests   %zu\n", json_array_size(json_object_get(s, "requests")));
    json_array_foreach(json_object_get(s, "models"), i, m)
    {
        (void)printf("model      %s: %s%s%s\n", word(m, "name"), word(m, "state"),
                     *word(m, "why") ? ": " : "", word(m, "why"));
        show_stages(json_object_get(m, "stages"), "           ");
        show_second_copy(m, names);
    }
}

void show_models(const json_t *models)
{
    const json_t *m;
    size_t i;
    (void)printf("%-36s %-10s %10s %10s %s\n", "NAME", "ID", "SIZE", "HERE", "");
    json_array_foreach(json_object_get(models, "models"), i, m)
    {
        char size[32], here[32];
        show_size(number(m, "bytes"), size);
        show_size(number(m, "here_bytes"), here);
        (void)printf("%-36.36s %-10.10s %10s %10s %s", word(m, "name"), word(m, "id"), size, here,
                     json_is_true(json_object_get(m, "running")) ? "running" : "");
        const json_t *copy = json_object_get(m, "second_copy");
        if (*word(copy, "state"))
            (void)printf("  second copy: %s, %.0f %%", word(copy, "state"),
                         number(copy, "percent"));
        (void)printf("\n");
    }
}

static void show_candidate(const json_t *c)
{
    const json_t *stages = json_object_get(c, "stages"), *s;
    size_t i;
    (void)printf("  %-15s ", word(c, "verdict"));
    json_array_foreach(stages, i, s)
    {
        const char *name = json_string_value(json_array_get(json_object_get(s, "names"), 0));
        (void)printf("%s%s %.0f to %.0f", i ? ", " : "", name ? name : "?",
                     number(s, "first_layer"), number(s, "last_layer"));
    }
    if (json_array_size(stages) == 0)
        (void)printf("%.0f node%s", number(c, "n_nodes"), number(c, "n_nodes") == 1 ? "" : "s");
    (void)printf("\n                  %s\n", word(c, "why"));
}

void show_plan(const json_t *plan, bool explain)
{
    const json_t *best = json_object_get(plan, "best"), *c;
    size_t i;
    (void)printf("%s, context %.0f, KV cache of %.0f positions, precision %s\n",
                 word(best, "model"), number(best, "context"), number(best, "kv_positions"),
                 word(best, "precision"));
    show_stages(json_object_get(best, "stages"), "  ");
    double token_ms = number(best, "predicted_token_ms");
    (void)printf("  predicted: %.2f ms a token (%.1f tokens/s), %.3f ms a prompt token\n", token_ms,
                 token_ms > 0 ? 1000 / token_ms : 0, number(best, "predicted_prefill_ms"));
    const json_t *measured = json_object_get(plan, "measured");
    if (measured && number(measured, "token_ms") > 0)
        (void)printf("  measured:  %.2f ms a token in the last long answer from here\n",
                     number(measured, "token_ms"));
    if (!explain)
        return;
    (void)printf("what was considered:\n");
    json_array_foreach(json_object_get(plan, "candidates"), i, c) show_candidate(c);
}

void show_findings(const json_t *doctor)
{
    const json_t *f;
    size_t i;
    json_array_foreach(json_object_get(doctor, "findings"), i, f)
    {
        (void)printf("%-8s %s\n", word(f, "level"), word(f, "text"));
        if (*word(f, "hint"))
            (void)printf("         %s\n", word(f, "hint"));
    }
}

void show_ping(const json_t *ping)
{
    const json_t *p;
    size_t i;
    char rtt[32];
    show_rtt(number(ping, "rtt_us"), rtt);
    (void)printf("%s: %s, best round trip %s\n", word(ping, "name"), word(ping, "state"), rtt);
    json_array_foreach(json_object_get(ping, "paths"), i, p)
    {
        char p50[32], p99[32], rate[32];
        show_rtt(number(p, "rtt_us"), p50);
        show_rtt(number(p, "rtt_p99_us"), p99);
        show_rate(number(p, "bytes_per_s"), rate);
        (void)printf("  %-44s %-5s p50 %s, p99 %s, %s\n", word(p, "address"),
                     json_is_true(json_object_get(p, "up")) ? "up" : "down", p50, p99, rate);
    }
}
