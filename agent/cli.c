#include "agent/cli.h"

#include "agent/agent.h"
#include "agent/client.h"
#include "agent/discovery_shell.h"
#include "agent/serve.h"
#include "base/util.h"
#include "discovery/mdns.h"
#include "discovery/mdns_child.h"

#include <curl/curl.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char usage[] =
    "covey: the machines in a room as one machine for language models\n"
    "\n"
    "usage: covey VERB [ARGUMENTS] [OPTIONS]\n"
    "\n"
    "  serve                 run this machine's agent (ends with Ctrl-C)\n"
    "  status                what this node does now\n"
    "  nodes                 who is here: members and other nodes that were found\n"
    "  invite                print a token that lets one other machine join\n"
    "  join TOKEN            join the cluster that printed the token\n"
    "  pull MODEL|FILE       get a model by name (smollm2), or use a GGUF file where it lies\n"
    "  ls                    models that any member holds\n"
    "  plan MODEL            who would run what, and what is predicted (--explain: and why)\n"
    "  run MODEL \"PROMPT\"    ask and print the answer as it comes\n"
    "  load MODEL            have a model run\n"
    "  stop MODEL            have it run no longer\n"
    "  rm MODEL              forget a model (and delete what was pulled)\n"
    "  ping NODE             round trips and bandwidth to a member\n"
    "  bench MODEL           how fast this machine alone computes a model (needs no agent)\n"
    "  doctor                what is wrong, in plain words\n"
    "  events                what happens, as it happens (Ctrl-C ends it)\n"
    "  leave                 leave the cluster for good\n"
    "  revoke NODE           expel a member for ever\n"
    "  debug logits MODEL FILE  SHA-256 of the logits for the token ids in FILE\n"
    "  version               print the version\n"
    "\n"
    "options (each verb takes those that make sense for it)\n"
    "  --json                print JSON for programs\n"
    "  --help                this text\n"
    " serve:  --http HOST:PORT  --control-port N  --data-port N  --memory-limit SIZE (MiB when "
    "plain)  --threads N\n"
    "         --peer HOST[:PORT] (again for more)  --model NAME|FILE  --precision fast|f32  "
    "--context N\n"
    "         --name NAME  --api-key KEY  --hub URL  --mdns yes|no  --log-level "
    "error|warning|info|debug\n"
    "         --spare-copies on|off (second copies of models)  --spare-margin SIZE (disk they "
    "leave free)\n"
    "         ports given as 0 mean any free one; they are printed at the start\n"
    " run:    --temperature T  --top-p P  --max-tokens N  --seed N  --raw (no chat template)  "
    "--ignore-eos\n"
    " load:   --context N  --precision fast|f32      plan: --context N  --explain\n"
    " invite: --ttl SECONDS  --worker (may not admit others)\n"
    " join:   --peer HOST[:PORT]  --leave (leave the present cluster first)\n"
    " pull:   --name NAME  --quiet (no progress bar)\n"
    " bench:  --prompt N  --generate N  --depth N (positions filled before)  --batch N (sequences "
    "at "
    "once)\n"
    "         --threads N  --rounds N  --precision fast|f32\n"
    " debug logits:  --top K  --threads N  --chunk ROWS  --split FIRST,FIRST,… (layers where "
    "further stages begin)  --precision "
    "fast|f32\n"
    "\n"
    "environment: COVEY_HOME=DIR keeps config, data and socket of one agent under DIR.\n"
    "exit codes: 0 done, 1 failed, 2 usage, 3 no agent, 4 does not fit, 5 not trusted, 6 timed "
    "out\n";

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

/* ---- options ---- */

struct option_row {
    const char *name;
    enum { OPTION_SWITCH, OPTION_WORD, OPTION_COUNT, OPTION_REAL, OPTION_WHOLE } kind;
    void *to;
    bool *given;
};

static bool bad_option(const char *name, const char *why)
{
    (void)fprintf(stderr, "covey: %s: %s. `covey --help` lists what there is\n", name, why);
    return false;
}

static bool set_option(const struct option_row *o, const char *value)
{
    char *end = NULL;
    errno = 0;
    if (o->given)
        *o->given = true;
    switch (o->kind) {
    case OPTION_SWITCH:
        *(bool *)o->to = true;
        return true;
    case OPTION_WORD:
        *(const char **)o->to = value;
        return true;
    case OPTION_COUNT: {
        unsigned long v = strtoul(value, &end, 10);
        *(uint32_t *)o->to = (uint32_t)v;
        return (*end == 0 && end != value && v <= UINT32_MAX && value[0] != '-' && errno == 0) ||
               bad_option(o->name, "a whole number is needed");
    }
    case OPTION_REAL:
        *(double *)o->to = strtod(value, &end);
        return (*end == 0 && end != value && isfinite(*(double *)o->to)) ||
               bad_option(o->name, "a number is needed");
    case OPTION_WHOLE:
        *(long long *)o->to = strtoll(value, &end, 10);
        return (*end == 0 && end != value && errno == 0) ||
               bad_option(o->name, "a whole number is needed");
    }
    return false;
}

/* Arguments travel as JSON, which is UTF-8. */
static bool words_are_text(int argc, char **argv)
{
    for (int i = 2; i < argc; i++) {
        json_t *word = json_string(argv[i]);
        if (!word)
            return bad_option(argv[i], "this is not valid UTF-8");
        json_decref(word);
    }
    return true;
}

static bool parse(struct cli *c, int argc, char **argv)
{
    const struct option_row rows[] = {
        {"json", OPTION_SWITCH, &c->json, NULL},
        {"explain", OPTION_SWITCH, &c->explain, NULL},
        {"raw", OPTION_SWITCH, &c->raw, NULL},
        {"ignore-eos", OPTION_SWITCH, &c->ignore_eos, NULL},
        {"leave", OPTION_SWITCH, &c->leave, NULL},
        {"worker", OPTION_SWITCH, &c->worker, NULL},
        {"quiet", OPTION_SWITCH, &c->quiet, NULL},
        {"peer", OPTION_WORD, &c->peer, NULL},
        {"name", OPTION_WORD, &c->name, NULL},
        {"precision", OPTION_WORD, &c->precision, NULL},
        {"split", OPTION_WORD, &c->split, NULL},
        {"temperature", OPTION_REAL, &c->temperature, &c->has_temperature},
        {"top-p", OPTION_REAL, &c->top_p, &c->has_top_p},
        {"seed", OPTION_WHOLE, &c->seed, &c->has_seed},
        {"max-tokens", OPTION_COUNT, &c->max_tokens, &c->has_max_tokens},
        {"context", OPTION_COUNT, &c->context, NULL},
        {"ttl", OPTION_COUNT, &c->ttl_s, NULL},
        {"threads", OPTION_COUNT, &c->n_threads, NULL},
        {"chunk", OPTION_COUNT, &c->chunk, NULL},
        {"top", OPTION_COUNT, &c->top, NULL},
        {"prompt", OPTION_COUNT, &c->n_prompt, &c->has_prompt},
        {"generate", OPTION_COUNT, &c->n_generate, &c->has_generate},
        {"depth", OPTION_COUNT, &c->n_depth, NULL},
        {"batch", OPTION_COUNT, &c->n_batch, NULL},
        {"rounds", OPTION_COUNT, &c->n_rounds, NULL},
    };
    bool only_words = false;
    for (int i = 2; i < argc; i++) {
        const char *word = argv[i];
        if (only_words || strncmp(word, "--", 2) != 0) {
            if (c->n_words == CLI_WORDS_MAX)
                return bad_option(word, "too many arguments");
            c->words[c->n_words++] = word;
            continue;
        }
        if (word[2] == 0) {
            only_words = true;
            continue;
        }
        const char *equals = strchr(word, '=');
        size_t n = equals ? (size_t)(equals - word - 2) : strlen(word + 2);
        const struct option_row *row = NULL;
        for (size_t k = 0; k < ARRAY_LEN(rows); k++) {
            if (strlen(rows[k].name) == n && memcmp(rows[k].name, word + 2, n) == 0)
                row = &rows[k];
        }
        if (!row)
            return bad_option(word, "there is no such option");
        const char *value = equals ? equals + 1 : NULL;
        if (row->kind != OPTION_SWITCH && !value) {
            if (i + 1 == argc)
                return bad_option(word, "a value is needed");
            value = argv[++i];
        }
        if (!set_option(row, value))
            return false;
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
    (void)printf("%s\n", token ? token : "");
    (void)fprintf(stderr,
                  "On the other machine: covey join %s\nIt works once, and for ten minutes unless "
                  "--ttl says otherwise.\n",
                  token ? token : "");
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
    return show_or_json(c, "/covey/invite",
                        json_pack("{s:I, s:b}", "ttl_s", (json_int_t)c->ttl_s, "worker", c->worker),
                        show_token);
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
        return code;
    }
    if (c->json)
        cli_print_json(reply);
    else
        show_findings(reply);
    json_decref(reply);
    return EXIT_DONE;
}

static int dispatch(const struct cli *c)
{
    static const struct {
        const char *verb;
        unsigned n_words;
        const char *needs;
    } arity[] = {{"status", 0, ""},
                 {"nodes", 0, ""},
                 {"invite", 0, ""},
                 {"join", 1, "TOKEN"},
                 {"pull", 1, "MODEL or FILE"},
                 {"ls", 0, ""},
                 {"plan", 1, "MODEL"},
                 {"run", 2, "MODEL and \"PROMPT\""},
                 {"load", 1, "MODEL"},
                 {"stop", 1, "MODEL"},
                 {"rm", 1, "MODEL"},
                 {"ping", 1, "NODE"},
                 {"doctor", 0, ""},
                 {"events", 0, ""},
                 {"leave", 0, ""},
                 {"revoke", 1, "NODE"},
                 {"bench", 1, "MODEL"},
                 {"debug", 3, "logits MODEL FILE"}};
    size_t i = 0;
    while (i < ARRAY_LEN(arity) && strcmp(arity[i].verb, c->verb) != 0)
        i++;
    if (i == ARRAY_LEN(arity)) {
        (void)fprintf(stderr, "covey: there is no verb '%s'. `covey --help` lists them\n", c->verb);
        return EXIT_USAGE;
    }
    if (c->n_words != arity[i].n_words) {
        (void)fprintf(stderr, "covey: usage: covey %s %s\n", c->verb, arity[i].needs);
        return EXIT_USAGE;
    }
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

int cli_main(int argc, char **argv)
{
    if (argc < 2) {
        (void)fputs(usage, stderr);
        return EXIT_USAGE;
    }
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--") == 0)
            break;
        if (strcmp(argv[i], "--help") == 0 ||
            (i == 1 && (strcmp(argv[i], "help") == 0 || strcmp(argv[i], "-h") == 0))) {
            (void)fputs(usage, stdout);
            return EXIT_DONE;
        }
    }
    if (strcmp(argv[1], "version") == 0 || strcmp(argv[1], "--version") == 0) {
        bool json = argc > 2 && strcmp(argv[2], "--json") == 0;
        (void)printf(json ? "{\"version\": \"%s\"}\n" : "covey %s\n", COVEY_VERSION);
        return EXIT_DONE;
    }
    if (strcmp(argv[1], DISCOVERY_CHILD_VERB) == 0) /* started by an agent, not by people */
        return mdns_child_main(MDNS_CHILD_FD);
    (void)curl_global_init(CURL_GLOBAL_DEFAULT);
    if (strcmp(argv[1], "serve") == 0)
        return verb_serve(argc, argv);
    struct cli c = {.verb = argv[1]};
    struct err_text text = {""};
    if (!words_are_text(argc, argv) || !parse(&c, argc, argv))
        return EXIT_USAGE;
    if (c.precision && strcmp(c.precision, "fast") != 0 && strcmp(c.precision, "f32") != 0) {
        (void)bad_option("precision", "'fast' or 'f32' is needed");
        return EXIT_USAGE;
    }
    enum err e = folders_find(&c.folders, &text);
    if (e != ERR_OK)
        return cli_fail(e, false, &text);
    return dispatch(&c);
}
