/* run, pull, events: answers as they come, progress on stderr when it is a terminal. */
#include "agent/cli.h"

#include "agent/client.h"
#include "base/util.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BAR_CELLS = 30 };

struct output {
    const struct cli *cli;
    json_t *ids, *end, *result, *error;
    char *text;
    size_t n_text;
    bool bar_shown;
};

/* ---- run ---- */

static bool on_answer(void *context, json_t *line)
{
    struct output *o = context;
    const json_t *error = json_object_get(line, "error");
    const json_t *text = json_object_get(line, "text");
    const json_t *id = json_object_get(line, "id");
    if (error) {
        o->error = json_incref((json_t *)error);
        return true;
    }
    if (json_object_get(line, "finish"))
        o->end = json_incref(line);
    if (id)
        (void)json_array_append(o->ids, (json_t *)id);
    if (json_is_string(text)) {
        size_t n = json_string_length(text);
        char *grown = realloc(o->text, o->n_text + n + 1);
        if (!grown)
            return false;
        o->text = grown;
        memcpy(o->text + o->n_text, json_string_value(text), n + 1);
        o->n_text += n;
        if (!o->cli->json) {
            (void)fwrite(json_string_value(text), 1, n, stdout);
            (void)fflush(stdout);
        }
    }
    return true;
}

static json_t *run_request(const struct cli *c)
{
    json_t *r = json_pack("{s:s, s:s, s:b, s:b, s:b}", "model", c->words[0], "prompt", c->words[1],
                          "stream", 1, "raw", c->raw, "ignore_eos", c->ignore_eos);
    if (c->has_temperature)
        (void)json_object_set_new(r, "temperature", json_real(c->temperature));
    if (c->has_top_p)
        (void)json_object_set_new(r, "top_p", json_real(c->top_p));
    if (c->has_seed)
        (void)json_object_set_new(r, "seed", json_integer(c->seed));
    if (c->has_keep_alive)
        (void)json_object_set_new(r, "keep_alive_s", json_integer(c->keep_alive_s));
    if (c->has_max_tokens)
        (void)json_object_set_new(r, "max_tokens", json_integer(c->max_tokens));
    return r;
}

static void report_run(const struct output *o)
{
    const json_t *e = o->end;
    if (o->cli->json) {
        json_t *all = json_pack("{s:s, s:O}", "text", o->text ? o->text : "", "token_ids", o->ids);
        (void)json_object_update(all, (json_t *)e);
        cli_print_json(all);
        json_decref(all);
        return;
    }
    (void)printf("\n");
    if (isatty(STDERR_FILENO))
        (void)fprintf(stderr, "[%lld tokens, first after %.0f ms, %.1f tokens/s]\n",
                      (long long)json_integer_value(json_object_get(e, "completion_tokens")),
                      json_number_value(json_object_get(e, "prompt_ms")),
                      json_number_value(json_object_get(e, "tokens_per_s")));
}

int cli_run(const struct cli *c)
{
    struct output o = {.cli = c, .ids = json_array()};
    struct err_text text = {""};
    bool no_agent = false;
    int code = EXIT_DONE;
    json_t *request = run_request(c);
    enum err e = request ? client_stream(c->folders.socket, "/covey/generate", request, on_answer,
                                         &o, &no_agent, &text)
                         : err_set(&text, ERR_INVALID, "the prompt is not valid UTF-8");
    json_decref(request);
    if (e == ERR_OK && o.error) {
        const char *message = json_string_value(json_object_get(o.error, "message"));
        const char *name = json_string_value(json_object_get(o.error, "code"));
        bool late = name && strcmp(name, err_name(ERR_TIMEOUT)) == 0;
        bool short_of = name && strcmp(name, err_name(ERR_NO_FIT)) == 0;
        e = err_set(&text,
                    late       ? ERR_TIMEOUT
                    : short_of ? ERR_NO_FIT
                               : ERR_CLOSED,
                    "the answer ended early: %.300s", message ? message : "?");
    } else if (e == ERR_OK && !o.end) {
        e = err_set(&text, ERR_CLOSED, "the answer ended early: the connection to the agent broke");
    }
    if (e != ERR_OK) {
        if (o.n_text && !c->json)
            (void)printf("\n");
        code = cli_fail(e, no_agent, &text);
    } else {
        report_run(&o);
    }
    json_decref(o.ids);
    json_decref(o.end);
    json_decref(o.error);
    free(o.text);
    return code;
}

/* ---- pull ---- */

static void draw_bar(struct output *o, double done, double total)
{
    char have[32], all[32], bar[BAR_CELLS + 1];
    int full = total > 0 ? (int)(done / total * BAR_CELLS) : 0;
    for (int i = 0; i < BAR_CELLS; i++)
        bar[i] = i < full ? '#' : '.';
    bar[BAR_CELLS] = 0;
    show_size(done, have);
    show_size(total, all);
    (void)fprintf(stderr, "\r[%s] %s of %s ", bar, have, all);
    (void)fflush(stderr);
    o->bar_shown = true;
}

static bool on_progress(void *context, json_t *line)
{
    struct output *o = context;
    if (json_object_get(line, "result"))
        o->result = json_incref(json_object_get(line, "result"));
    else if (json_object_get(line, "error"))
        o->error = json_incref(json_object_get(line, "error"));
    else if (isatty(STDERR_FILENO) && !o->cli->quiet)
        draw_bar(o, json_number_value(json_object_get(line, "done")),
                 json_number_value(json_object_get(line, "total")));
    return true;
}

/* "/a", "./a", "../a" and "a.gguf" name files; "OWNER/REPOSITORY/a.gguf" is one of the hub. */
static bool names_a_file(const char *word)
{
    const char *slash = strchr(word, '/');
    size_t n = strlen(word);
    bool ends = n > 5 && strcmp(word + n - 5, ".gguf") == 0;
    return word[0] == '/' || strncmp(word, "./", 2) == 0 || strncmp(word, "../", 3) == 0 ||
           (ends && (!slash || !strchr(slash + 1, '/')));
}

static void say_pulled(const json_t *result)
{
    static const char *const ways[][2] = {{"hub", "is here, from the model hub"},
                                          {"package", "is here, from a Python package"},
                                          {"file", "is here, from the file"},
                                          {"store", "was here already"}};
    const char *from = json_string_value(json_object_get(result, "from")), *way = "is here";
    for (size_t i = 0; from && i < ARRAY_LEN(ways); i++) {
        if (strcmp(from, ways[i][0]) == 0)
            way = ways[i][1];
    }
    (void)printf("%s %s\n", json_string_value(json_object_get(result, "name")), way);
}

int cli_pull(const struct cli *c)
{
    struct output o = {.cli = c};
    struct err_text text = {""};
    bool no_agent = false;
    char absolute[PATH_MAX];
    bool is_file = access(c->words[0], R_OK) == 0 && realpath(c->words[0], absolute);
    if (!is_file && names_a_file(c->words[0])) {
        (void)err_set(&text, ERR_NOT_FOUND, "%.300s: %s", c->words[0], strerror(errno));
        return cli_fail(ERR_NOT_FOUND, false, &text);
    }
    json_t *args = json_pack("{s:s}", is_file ? "path" : "name", is_file ? absolute : c->words[0]);
    if (is_file && c->name)
        (void)json_object_set_new(args, "name", json_string(c->name));
    enum err e = client_stream(c->folders.socket, is_file ? "/covey/add" : "/covey/pull", args,
                               on_progress, &o, &no_agent, &text);
    json_decref(args);
    if (o.bar_shown)
        (void)fprintf(stderr, "\n");
    if (e == ERR_OK && !o.result) {
        const char *message = json_string_value(json_object_get(o.error, "message"));
        e = err_set(&text, ERR_IO, "%.380s", message ? message : "the agent broke off");
    }
    int code = e == ERR_OK ? EXIT_DONE : cli_fail(e, no_agent, &text);
    if (e == ERR_OK && c->json)
        cli_print_json(o.result);
    else if (e == ERR_OK)
        say_pulled(o.result);
    json_decref(o.result);
    json_decref(o.error);
    return code;
}

/* ---- events ---- */

static bool on_event(void *context, json_t *line)
{
    const struct cli *c = context;
    if (c->json) {
        char *text = json_dumps(line, JSON_COMPACT);
        (void)printf("%s\n", text ? text : "{}");
        free(text);
    } else {
        const char *kind = json_string_value(json_object_get(line, "event"));
        const char *text = json_string_value(json_object_get(line, "text"));
        (void)printf("%-10s %s\n", kind ? kind : "", text ? text : "");
    }
    (void)fflush(stdout);
    return true;
}

int cli_events(const struct cli *c)
{
    struct err_text text = {""};
    bool no_agent = false;
    enum err e = client_stream(c->folders.socket, "/covey/events", NULL, on_event, (void *)c,
                               &no_agent, &text);
    return e == ERR_OK ? EXIT_DONE : cli_fail(e, no_agent, &text);
}
