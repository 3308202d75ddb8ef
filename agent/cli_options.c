/* The verbs, and which options each takes: one table that parsing and every help text come from. */
#include "agent/cli.h"

#include "base/util.h"
#include "planner/plan.h"

#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { HELP_COLUMNS = 96 };

/* A bit for each verb, in the order of `verbs`. */
enum {
    SERVE = 1 << 0,
    STATUS = 1 << 1,
    NODES = 1 << 2,
    INVITE = 1 << 3,
    JOIN = 1 << 4,
    PULL = 1 << 5,
    LS = 1 << 6,
    PLAN = 1 << 7,
    RUN = 1 << 8,
    LOAD = 1 << 9,
    STOP = 1 << 10,
    RM = 1 << 11,
    PING = 1 << 12,
    BENCH = 1 << 13,
    DOCTOR = 1 << 14,
    EVENTS = 1 << 15,
    LEAVE = 1 << 16,
    REVOKE = 1 << 17,
    DEBUG = 1 << 18,
    VERSION = 1 << 19,
    ALL = (1 << 20) - 1,
};

static const struct cli_verb verbs[] = {
    {"serve", "", 0, "run this machine's agent (ends with Ctrl-C)"},
    {"status", "", 0, "what this node does now"},
    {"nodes", "", 0, "who is here: members and other nodes that were found"},
    {"invite", "", 0, "print a token that lets one other machine join"},
    {"join", "TOKEN", 1, "join the cluster that printed the token"},
    {"pull", "MODEL|FILE", 1, "get smollm2, gemma3-270m or qwen2.5-coder-0.5b, or use a GGUF file"},
    {"ls", "", 0, "models that any member holds"},
    {"plan", "MODEL", 1, "who would run what, and what is predicted (--explain: and why)"},
    {"run", "MODEL \"PROMPT\"", 2, "ask and print the answer as it comes"},
    {"load", "MODEL", 1, "have a model run"},
    {"stop", "MODEL", 1, "have it run no longer"},
    {"rm", "MODEL", 1, "forget a model (and delete what was pulled)"},
    {"ping", "NODE", 1, "round trips and bandwidth to a member"},
    {"bench", "MODEL", 1, "how fast this machine alone computes a model (needs no agent)"},
    {"doctor", "", 0, "what is wrong, in plain words"},
    {"events", "", 0, "what happens, as it happens (Ctrl-C ends it)"},
    {"leave", "", 0, "leave the cluster for good"},
    {"revoke", "NODE", 1, "expel a member for ever"},
    {"debug", "logits MODEL FILE", 3, "SHA-256 of the logits for the token ids in FILE"},
    {"version", "", 0, "print the version"},
};

enum kind { OPTION_SWITCH, OPTION_WORD, OPTION_COUNT, OPTION_REAL, OPTION_WHOLE, OPTION_DURATION };

struct option_row {
    const char *name, *value; /* of a switch: NULL */
    size_t to, given;         /* offsets in struct cli; 0: none */
    enum kind kind;
    uint32_t verbs;
    const char *help;
};

#define TO(field) offsetof(struct cli, field)

/* Those of `serve` alone are settings, which agent/config.c reads; their kind says only that they
 * have a value. */
static const struct option_row rows[] = {
    {"http", "HOST:PORT", 0, 0, OPTION_WORD, SERVE, "where the API listens (127.0.0.1:26839)"},
    {"control-port", "N", 0, 0, OPTION_WORD, SERVE, "26840; 0, here and elsewhere: any free one"},
    {"data-port", "N", 0, 0, OPTION_WORD, SERVE, "26841"},
    {"memory-limit", "SIZE", 0, 0, OPTION_WORD, SERVE, "the most for models; MiB when plain"},
    {"model", "NAME|FILE", 0, 0, OPTION_WORD, SERVE, "have this model run from the start"},
    {"api-key", "KEY", 0, 0, OPTION_WORD, SERVE, "what clients of the API must send"},
    {"hub", "URL", 0, 0, OPTION_WORD, SERVE, "the model hub"},
    {"mdns", "yes|no", 0, 0, OPTION_WORD, SERVE, "announce and browse"},
    {"spare-copies", "on|off", 0, 0, OPTION_WORD, SERVE, "fetch second copies of wanted models"},
    {"spare-margin", "SIZE", 0, 0, OPTION_WORD, SERVE, "disk that second copies leave free"},
    {"log-level", "LEVEL", 0, 0, OPTION_WORD, SERVE, "error, warning, info or debug"},
    {"peer", "HOST[:PORT]", TO(peer), 0, OPTION_WORD, SERVE | JOIN,
     "a node to try where multicast is blocked"},
    {"name", "NAME", TO(name), 0, OPTION_WORD, SERVE | PULL,
     "what people call this node, or the model"},
    {"leave", NULL, TO(leave), 0, OPTION_SWITCH, JOIN, "leave the present cluster first"},
    {"ttl", "SECONDS", TO(ttl_s), TO(has_ttl), OPTION_COUNT, INVITE,
     "how long the token is good (600)"},
    {"worker", NULL, TO(worker), 0, OPTION_SWITCH, INVITE, "the new member may not admit others"},
    {"quiet", NULL, TO(quiet), 0, OPTION_SWITCH, PULL, "no progress bar"},
    {"explain", NULL, TO(explain), 0, OPTION_SWITCH, PLAN, "the alternatives, and why not"},
    {"temperature", "T", TO(temperature), TO(has_temperature), OPTION_REAL, RUN,
     "0: the likeliest token each time"},
    {"top-p", "P", TO(top_p), TO(has_top_p), OPTION_REAL, RUN,
     "the likeliest tokens of this share"},
    {"max-tokens", "N", TO(max_tokens), TO(has_max_tokens), OPTION_COUNT, RUN, "end after so many"},
    {"seed", "N", TO(seed), TO(has_seed), OPTION_WHOLE, RUN, "the same answer again"},
    {"raw", NULL, TO(raw), 0, OPTION_SWITCH, RUN, "no chat template"},
    {"ignore-eos", NULL, TO(ignore_eos), 0, OPTION_SWITCH, RUN, "go on after end tokens"},
    {"context", "N", TO(context), 0, OPTION_COUNT, SERVE | PLAN | LOAD,
     "tokens of prompt and answer; by default the most that fits"},
    {"keep-alive", "DURATION", TO(keep_alive_s), TO(has_keep_alive), OPTION_DURATION,
     SERVE | LOAD | RUN, "unload when unused so long: 90s, 10m, 2h, 1d, forever"},
    {"precision", "fast|f32", TO(precision), 0, OPTION_WORD, SERVE | LOAD | BENCH | DEBUG,
     "fast rounds activations to 8 bits"},
    {"threads", "N", TO(n_threads), 0, OPTION_COUNT, SERVE | BENCH | DEBUG, "compute threads"},
    {"prompt", "N", TO(n_prompt), TO(has_prompt), OPTION_COUNT, BENCH, "tokens of the prompt"},
    {"generate", "N", TO(n_generate), TO(has_generate), OPTION_COUNT, BENCH, "tokens after it"},
    {"depth", "N", TO(n_depth), 0, OPTION_COUNT, BENCH, "positions filled before"},
    {"batch", "N", TO(n_batch), 0, OPTION_COUNT, BENCH, "sequences at once"},
    {"rounds", "N", TO(n_rounds), 0, OPTION_COUNT, BENCH, "times that it is measured"},
    {"top", "K", TO(top), 0, OPTION_COUNT, DEBUG, "also the K largest at each position"},
    {"chunk", "ROWS", TO(chunk), 0, OPTION_COUNT, DEBUG, "rows computed at once"},
    {"split", "FIRST,...", TO(split), 0, OPTION_WORD, DEBUG, "layers where further stages begin"},
    {"json", NULL, TO(json), 0, OPTION_SWITCH, ALL & ~(SERVE | DEBUG), "print JSON for programs"},
};

const struct cli_verb *cli_verb_find(const char *name)
{
    for (size_t i = 0; i < ARRAY_LEN(verbs); i++) {
        if (strcmp(verbs[i].name, name) == 0)
            return &verbs[i];
    }
    return NULL;
}

static uint32_t bit_of(const struct cli_verb *v)
{
    return UINT32_C(1) << (v - verbs);
}

/* ---- help ---- */

static int option_text(const struct option_row *o, char *to, size_t size)
{
    return snprintf(to, size, "--%s%s%s", o->name, o->value ? " " : "", o->value ? o->value : "");
}

/* All options of a verb but --json in a few lines. */
static void print_options(FILE *to, const struct cli_verb *v)
{
    int column = 0;
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        char text[64];
        if (!(rows[i].verbs & bit_of(v)) || strcmp(rows[i].name, "json") == 0)
            continue;
        int n = option_text(&rows[i], text, sizeof text);
        if (column > 0 && column + 2 + n > HELP_COLUMNS) {
            (void)fprintf(to, "\n");
            column = 0;
        } else if (column > 0) {
            column += fprintf(to, "  ");
        } else {
            column = fprintf(to, "  %-8s", v->name);
            column += fprintf(to, "%s", text);
            continue;
        }
        if (column == 0)
            column = fprintf(to, "  %-8s", "");
        column += fprintf(to, "%s", text);
    }
    if (column > 0)
        (void)fprintf(to, "\n");
}

void cli_usage(FILE *to)
{
    (void)fprintf(to, "covey: the machines in a room as one machine for language models\n\n"
                      "usage: covey VERB [ARGUMENTS] [OPTIONS]\n\n");
    for (size_t i = 0; i < ARRAY_LEN(verbs); i++) {
        char text[64];
        (void)snprintf(text, sizeof text, "%s %s", verbs[i].name, verbs[i].words);
        (void)fprintf(to, "  %-21s %s\n", text, verbs[i].summary);
    }
    (void)fprintf(to, "\noptions (`covey VERB --help` says what they mean; --json prints JSON for "
                      "programs)\n");
    for (size_t i = 0; i < ARRAY_LEN(verbs); i++)
        print_options(to, &verbs[i]);
    (void)fprintf(
        to, "\nenvironment: COVEY_HOME=DIR keeps config, data and socket of one agent under DIR.\n"
            "exit codes: 0 done, 1 failed, 2 usage, 3 no agent, 4 does not fit, 5 not trusted, 6 "
            "timed out\n");
}

void cli_verb_usage(FILE *to, const struct cli_verb *v)
{
    (void)fprintf(to, "covey %s: %s\n\nusage: covey %s%s%s [OPTIONS]\n\n", v->name, v->summary,
                  v->name, v->words[0] ? " " : "", v->words);
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        char text[64];
        if (!(rows[i].verbs & bit_of(v)))
            continue;
        (void)option_text(&rows[i], text, sizeof text);
        (void)fprintf(to, "  %-24s %s\n", text, rows[i].help);
    }
    (void)fprintf(to, "  %-24s %s\n", "--help", "this text");
}

/* ---- parsing ---- */

static bool bad_option(const char *name, const char *why)
{
    (void)fprintf(stderr, "covey: %s: %s. `covey --help` lists what there is\n", name, why);
    return false;
}

static bool not_of_verb(const struct cli_verb *v, const char *word, size_t n)
{
    (void)fprintf(stderr,
                  "covey: %.*s: `covey %s` has no such option. `covey %s --help` lists those that "
                  "it takes\n",
                  (int)n, word, v->name, v->name);
    return false;
}

static bool set_option(struct cli *c, const struct option_row *o, const char *value)
{
    char *end = NULL;
    void *to = (char *)c + o->to;
    errno = 0;
    if (o->given)
        *(bool *)((char *)c + o->given) = true;
    switch (o->kind) {
    case OPTION_SWITCH:
        *(bool *)to = true;
        return true;
    case OPTION_WORD:
        *(const char **)to = value;
        return true;
    case OPTION_COUNT: {
        unsigned long v = strtoul(value, &end, 10);
        *(uint32_t *)to = (uint32_t)v;
        return (*end == 0 && end != value && v <= UINT32_MAX && value[0] != '-' && errno == 0) ||
               bad_option(o->name, "a whole number is needed");
    }
    case OPTION_REAL:
        *(double *)to = strtod(value, &end);
        return (*end == 0 && end != value && isfinite(*(double *)to)) ||
               bad_option(o->name, "a number is needed");
    case OPTION_WHOLE:
        *(long long *)to = strtoll(value, &end, 10);
        return (*end == 0 && end != value && errno == 0) ||
               bad_option(o->name, "a whole number is needed");
    case OPTION_DURATION:
        return config_parse_keep_alive(value, to) == ERR_OK ||
               bad_option(o->name, "10s or more is needed, as in 90s, 10m, 2h, 1d, or 'forever'");
    }
    return false;
}

static const struct option_row *find_row(const struct cli_verb *v, const char *name, size_t n)
{
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        if (strlen(rows[i].name) == n && memcmp(rows[i].name, name, n) == 0)
            return rows[i].verbs & bit_of(v) ? &rows[i] : NULL;
    }
    return NULL;
}

bool cli_takes(const struct cli_verb *v, const char *word)
{
    size_t n = strcspn(word, "=");
    bool of_others = false;
    for (size_t i = 0; i < ARRAY_LEN(rows); i++)
        of_others |= strlen(rows[i].name) == n - 2 && memcmp(rows[i].name, word + 2, n - 2) == 0 &&
                     !(rows[i].verbs & bit_of(v));
    return !of_others || not_of_verb(v, word, n);
}

bool cli_parse(struct cli *c, const struct cli_verb *v, int argc, char **argv)
{
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
        size_t n = equals ? (size_t)(equals - word) : strlen(word);
        const struct option_row *row = find_row(v, word + 2, n - 2);
        if (!row)
            return not_of_verb(v, word, n);
        const char *value = equals ? equals + 1 : NULL;
        if (row->kind == OPTION_SWITCH && value)
            return bad_option(row->name, "this option has no value");
        if (row->kind != OPTION_SWITCH && !value) {
            if (i + 1 == argc)
                return bad_option(word, "a value is needed");
            value = argv[++i];
        }
        if (!set_option(c, row, value))
            return false;
    }
    uint8_t precision;
    if (c->precision && precision_parse(c->precision, &precision) != ERR_OK)
        return bad_option("precision", "'fast', 'f32' or 'fast-kv8' is needed");
    if (c->has_ttl && c->ttl_s == 0)
        return bad_option("ttl", "a token is good for at least one second");
    if (c->n_words == v->n_words)
        return true;
    (void)fprintf(stderr, "covey: usage: covey %s %s\n", v->name, v->words);
    return false;
}
