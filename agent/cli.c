#include "agent/cli.h"

#include "agent/agent.h"
#include "agent/client.h"
#include "agent/discovery_shell.h"
#include "agent/serve.h"
#include "base/util.h"
#include "discovery/mdns.h"
#include "discovery/mdns_child.h"

#include <curl/curl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int cli_fail(enum err e, bool no_agent, const struct err_text *text)
{
    (void)fprintf(stderr, "covey: %s\n", text->text[0] ? text->text : err_name(e));
    if (no_agent)
        return EXIT_NO_AGENT;
    switch (e) {
    case ERR_NO_FIT:
        return EXIT_NO_FIT;
    case ERR_DENIED:
        return EXIT_NOT_TRUSTED;
    case ERR_TIMEOUT:
        return EXIT_TIMED_OUT;
    default:
        return EXIT_FAILED;
    }
}

void cli_print_json(const json_t *j)
{
    char *text = json_dumps(j, JSON_INDENT(2));
    (void)printf("%s\n", text ? text : "{}");
    free(text);
}

bool cli_ask(const struct cli *c, const char *path, json_t *take_args, json_t **ret, int *ret_code)
{
    bool no_agent = false;
    struct err_text text = {""};
    enum err e = client_call(c->folders.socket, path, take_args, ret, &no_agent, &text);
    json_decref(take_args);
    if (e == ERR_OK)
        return true;
    *ret_code = cli_fail(e, no_agent, &text);
    return false;
}

/* Arguments travel as JSON, which is UTF-8. */
static bool words_are_text(int argc, char **argv)
{
    for (int i = 2; i < argc; i++) {
        json_t *word = json_string(argv[i]);
        if (!word) {
            (void)fprintf(stderr, "covey: %s: this is not valid UTF-8\n", argv[i]);
            return false;
        }
        json_decref(word);
    }
    return true;
}

/* ---- verbs ---- */

static int verb_serve(int argc, char **argv)
{
    struct config *config = malloc(sizeof *config);
    struct err_text text = {""};
    if (!config)
        return EXIT_FAILED;
    config_init(config);
    enum err e = folders_find(&config->folders, &text);
    if (e == ERR_OK)
        e = config_read_file(config, &text);
    for (int i = 2; e == ERR_OK && i < argc; i++) {
        char key[64];
        const char *word = argv[i], *equals = strchr(word, '=');
        if (strncmp(word, "--", 2) != 0) {
            e = err_set(&text, ERR_INVALID, "serve: '%s' is not an option", word);
            break;
        }
        if (!cli_takes(cli_verb_find("serve"), word)) {
            free(config);
            return EXIT_USAGE;
        }
        (void)snprintf(
            key, sizeof key, "%.*s",
            (int)MIN_OF(equals ? (size_t)(equals - word - 2) : strlen(word + 2), sizeof key - 1),
            word + 2);
        const char *value = equals ? equals + 1 : i + 1 < argc ? argv[++i] : NULL;
        if (!value)
            e = err_set(&text, ERR_INVALID, "--%s: a value is needed", key);
        else
            e = config_set(config, key, value, &text);
    }
    if (e != ERR_OK) {
        (void)cli_fail(e, false, &text);
        free(config);
        return EXIT_USAGE;
    }
    e = serve(config, &text);
    free(config);
    return e == ERR_OK ? EXIT_DONE : cli_fail(e, false, &text);
}

static int show_or_json(const struct cli *c, const char *path, json_t *take_args,
                        void (*show)(const json_t *))
{
    json_t *reply = NULL;
    int code = EXIT_FAILED;
    if (!cli_ask(c, path, take_args, &reply, &code))
        return code;
    if (c->json)
        cli_print_json(reply);
    else
        show(reply);
    json_decref(reply);
    return EXIT_DONE;
}

static void show_text(const json_t *j)
{
    const char *text = json_string_value(json_object_get(j, "text"));
    (void)printf("%s\n", text ? text : "done");
}

static void show_token(const json_t *j)
{
    const char *token = json_string_value(json_object_get(j, "token"));
    char for_long[32];
    int64_t left_s = json_integer_value(json_object_get(j, "ttl_s"));
    if (left_s >= 120 && left_s % 60 == 0)
        (void)snprintf(for_long, sizeof for_long, "%lld minutes", (long long)left_s / 60);
    else
        (void)snprintf(for_long, sizeof for_long, "%lld second%s", (long long)left_s,
                       left_s == 1 ? "" : "s");
    (void)printf("%s\n", token ? token : "");
    (void)fprintf(stderr, "On the other machine: covey join %s\nIt works once, and for %s.\n",
                  token ? token : "", for_long);
}

static void show_loaded(const json_t *j)
{
    json_t *plan = json_pack("{s:O}", "best", json_object_get(j, "plan"));
    show_plan(plan, false);
    json_decref(plan);
}

static int verb_plan(const struct cli *c)
{
    json_t *reply = NULL;
    int code = EXIT_FAILED;
    json_t *args = json_pack("{s:s, s:I, s:b}", "model", c->words[0], "context",
                             (json_int_t)c->context, "explain", c->explain || c->json);
    if (!cli_ask(c, "/covey/plan", args, &reply, &code))
        return code;
    if (c->json)
        cli_print_json(reply);
    else
        show_plan(reply, c->explain);
    json_decref(reply);
    return EXIT_DONE;
}

static int verb_load(const struct cli *c)
{
    json_t *args = json_pack("{s:s, s:I}", "model", c->words[0], "context", (json_int_t)c->context);
    if (c->precision)
        (void)json_object_set_new(args, "precision", json_string(c->precision));
    if (c->has_keep_alive)
        (void)json_object_set_new(args, "keep_alive_s", json_integer(c->keep_alive_s));
    return show_or_json(c, "/covey/load", args, show_loaded);
}

static int verb_join(const struct cli *c)
{
    json_t *args = json_pack("{s:s, s:b}", "token", c->words[0], "leave", c->leave);
    if (c->peer)
        (void)json_object_set_new(args, "peer", json_string(c->peer));
    return show_or_json(c, "/covey/join", args, show_text);
}

static int verb_invite(const struct cli *c)
{
    json_t *args = json_pack("{s:b}", "worker", c->worker);
    if (c->has_ttl)
        (void)json_object_set_new(args, "ttl_s", json_integer((json_int_t)c->ttl_s));
    return show_or_json(c, "/covey/invite", args, show_token);
}

static int with_model(const struct cli *c, const char *path)
{
    return show_or_json(c, path, json_pack("{s:s}", "model", c->words[0]), show_text);
}

static int verb_doctor(const struct cli *c)
{
    json_t *reply = NULL;
    int code = EXIT_FAILED;
    if (!cli_ask(c, "/covey/doctor", NULL, &reply, &code)) {
        if (code == EXIT_NO_AGENT)
            (void)fprintf(stderr, "looked for it at %s\n", c->folders.socket);
        reply = code == EXIT_NO_AGENT ? doctor_alone_json(&c->folders) : NULL;
        if (!reply)
            return code;
    } else {
        code = EXIT_DONE;
    }
    doctor_multicast(json_object_get(reply, "findings"));
    if (c->json)
        cli_print_json(reply);
    else
        show_findings(reply);
    json_decref(reply);
    return code;
}

static int dispatch(const struct cli *c)
{
    const char *v = c->verb;
    if (strcmp(v, "status") == 0)
        return show_or_json(c, "/covey/status", NULL, show_status);
    if (strcmp(v, "nodes") == 0)
        return show_or_json(c, "/covey/nodes", NULL, show_nodes);
    if (strcmp(v, "ls") == 0)
        return show_or_json(c, "/covey/models", NULL, show_models);
    if (strcmp(v, "invite") == 0)
        return verb_invite(c);
    if (strcmp(v, "join") == 0)
        return verb_join(c);
    if (strcmp(v, "pull") == 0)
        return cli_pull(c);
    if (strcmp(v, "plan") == 0)
        return verb_plan(c);
    if (strcmp(v, "run") == 0)
        return cli_run(c);
    if (strcmp(v, "load") == 0)
        return verb_load(c);
    if (strcmp(v, "stop") == 0)
        return with_model(c, "/covey/unload");
    if (strcmp(v, "rm") == 0)
        return with_model(c, "/covey/remove");
    if (strcmp(v, "ping") == 0)
        return show_or_json(c, "/covey/ping", json_pack("{s:s}", "node", c->words[0]), show_ping);
    if (strcmp(v, "doctor") == 0)
        return verb_doctor(c);
    if (strcmp(v, "events") == 0)
        return cli_events(c);
    if (strcmp(v, "leave") == 0)
        return show_or_json(c, "/covey/leave", json_object(), show_text);
    if (strcmp(v, "revoke") == 0)
        return show_or_json(c, "/covey/revoke", json_pack("{s:s}", "node", c->words[0]), show_text);
    if (strcmp(v, "bench") == 0)
        return cli_bench(c);
    return cli_debug(c);
}

static bool asks_for_help(int argc, char **argv)
{
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++) {
        if (strcmp(argv[i], "--help") == 0 ||
            (i == 1 && (strcmp(argv[i], "help") == 0 || strcmp(argv[i], "-h") == 0)))
            return true;
    }
    return false;
}

static int print_version(const struct cli *c)
{
    (void)printf(c->json ? "{\"version\": \"%s\"}\n" : "covey %s\n", COVEY_VERSION);
    return EXIT_DONE;
}

int cli_main(int argc, char **argv)
{
    if (argc < 2) {
        cli_usage(stderr);
        return EXIT_USAGE;
    }
    const char *name = strcmp(argv[1], "--version") == 0 ? "version" : argv[1];
    const struct cli_verb *verb = cli_verb_find(name);
    if (asks_for_help(argc, argv)) {
        if (verb)
            cli_verb_usage(stdout, verb);
        else
            cli_usage(stdout);
        return EXIT_DONE;
    }
    if (strcmp(name, DISCOVERY_CHILD_VERB) == 0) /* started by an agent, not by people */
        return mdns_child_main(MDNS_CHILD_FD);
    if (!verb) {
        (void)fprintf(stderr, "covey: there is no verb '%s'. `covey --help` lists them\n", name);
        return EXIT_USAGE;
    }
    (void)curl_global_init(CURL_GLOBAL_DEFAULT);
    if (strcmp(name, "serve") == 0)
        return verb_serve(argc, argv);
    struct cli c = {.verb = name};
    struct err_text text = {""};
    if (!words_are_text(argc, argv) || !cli_parse(&c, verb, argc, argv))
        return EXIT_USAGE;
    if (strcmp(name, "version") == 0)
        return print_version(&c);
    enum err e = folders_find(&c.folders, &text);
    if (e != ERR_OK) {
        (void)cli_fail(e, false, &text);
        return EXIT_USAGE; /* as `serve` says of its settings */
    }
    return dispatch(&c);
}
