/* The command line. Exit codes: 0 done, 1 failed, 2 usage, 3 no agent, 4 does not fit, 5 not
 * trusted, 6 timed out.
 *
 * cli.c: verbs; cli_options.c: what each takes, and help; cli_show.c: tables for people; cli_run.c:
 * run, pull, events: streams and progress; cli_debug.c: debug logits; cli_bench.c: bench */
#ifndef COVEY_AGENT_CLI_H
#define COVEY_AGENT_CLI_H

#include "agent/config.h"
#include "agent/store.h"
#include "base/err.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

enum exit_code {
    EXIT_DONE = 0,
    EXIT_FAILED = 1,
    EXIT_USAGE = 2,
    EXIT_NO_AGENT = 3,
    EXIT_NO_FIT = 4,
    EXIT_NOT_TRUSTED = 5,
    EXIT_TIMED_OUT = 6,
};

enum { CLI_WORDS_MAX = 16 };

/* What was typed after the verb. */
struct cli {
    const char *verb;
    const char *words[CLI_WORDS_MAX]; /* arguments without dashes */
    unsigned n_words;
    struct folders folders;
    bool json, explain, raw, ignore_eos, leave, worker, quiet;
    const char *peer, *model, *file, *name;
    double temperature, top_p;
    bool has_temperature, has_top_p, has_seed, has_max_tokens;
    long long seed;
    uint32_t max_tokens, context, ttl_s, n_threads, chunk, top, count;
    uint32_t n_prompt, n_generate, n_depth, n_batch, n_rounds; /* bench */
    bool has_prompt, has_generate;
    uint32_t keep_alive_s; /* 0: for ever */
    bool has_keep_alive, has_ttl;
    const char *precision, *split;
};

int cli_main(int argc, char **argv);

/* Prints the sentence and gives the exit code that fits. */
int cli_fail(enum err e, bool no_agent, const struct err_text *text);
/* Asks the agent; on failure prints and returns false with *ret_code set. `args` is taken. */
bool cli_ask(const struct cli *c, const char *path, json_t *take_args, json_t **ret, int *ret_code);
void cli_print_json(const json_t *j);

/* cli_options.c */
struct cli_verb {
    const char *name, *words; /* its arguments, for people */
    unsigned n_words;
    const char *summary;
};
const struct cli_verb *cli_verb_find(const char *name); /* NULL: there is none */
void cli_usage(FILE *to);
void cli_verb_usage(FILE *to, const struct cli_verb *v);
/* False, and said on stderr, when the option in `word` ("--name" or "--name=value") is one of other
 * verbs alone. */
bool cli_takes(const struct cli_verb *v, const char *word);
/* What follows the verb. An option that the verb does not take, a value that it cannot have, and a
 * wrong number of arguments are said on stderr; then false. */
bool cli_parse(struct cli *c, const struct cli_verb *v, int argc, char **argv);

/* cli_show.c */
void show_status(const json_t *status);
void show_nodes(const json_t *nodes);
void show_models(const json_t *models);
void show_plan(const json_t *plan, bool explain);
/* doctor_alone.c: what can be said where no agent runs. */
json_t *doctor_alone_json(const struct folders *folders);
/* doctor_multicast.c: adds what is found; takes up to a second. */
void doctor_multicast(json_t *findings);
void show_findings(const json_t *doctor);
void show_ping(const json_t *ping);
void show_size(double bytes, char ret[32]);

/* cli_run.c */
int cli_run(const struct cli *c);
int cli_pull(const struct cli *c);
int cli_events(const struct cli *c);

/* cli_debug.c */
int cli_debug(const struct cli *c);
/* The file of a model that is named by a path or by its name in this node's store. ERR_NOT_FOUND
 * when it is neither, or not whole on this machine. */
enum err cli_model_path(const struct cli *c, const char *word, char ret[STORE_PATH_MAX],
                        struct err_text *text);

/* cli_bench.c */
int cli_bench(const struct cli *c);

#endif
