/* covey debug logits MODEL FILE: in this process, without an agent. */
#include "agent/cli.h"

#include "agent/store.h"
#include "planner/plan.h"
#include "runtime/logits_tool.h"

#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum err cli_model_path(const struct cli *c, const char *word, char ret[STORE_PATH_MAX],
                        struct err_text *text)
{
    char folder[CONFIG_PATH_MAX + 16];
    struct store *store = NULL;
    struct store_entry entry;
    if (access(word, R_OK) == 0) {
        (void)snprintf(ret, STORE_PATH_MAX, "%s", word);
        return ERR_OK;
    }
    (void)snprintf(folder, sizeof folder, "%s/models", c->folders.data);
    enum err e = store_open(folder, &store, text);
    if (e == ERR_OK)
        e = store_find(store, word, &entry);
    if (e == ERR_OK && !entry.complete)
        e = ERR_NOT_FOUND;
    if (e == ERR_OK)
        e = store_path(store, &entry.id, ret);
    store_close(store);
    if (e != ERR_OK)
        return err_set(text, e, "%s: neither a file nor a model that is whole on this machine",
                       word);
    return ERR_OK;
}

static enum err read_split(const char *word, struct logits_options *o, struct err_text *text)
{
    for (const char *p = word; *p;) {
        char *end;
        unsigned long first = strtoul(p, &end, 10);
        if (end == p || (*end && *end != ',') || o->n_cuts == LOGITS_CUTS_MAX || first > 65535)
            return err_set(text, ERR_INVALID,
                           "--split: layer numbers with commas between them are needed");
        o->cuts[o->n_cuts++] = (uint32_t)first;
        p = *end ? end + 1 : end;
    }
    return ERR_OK;
}

int cli_debug(const struct cli *c)
{
    struct err_text text = {""};
    char path[STORE_PATH_MAX];
    struct buf out = BUF_INIT((size_t)1 << 30);
    struct logits_options o = {.n_threads = c->n_threads, .chunk = c->chunk, .top = c->top};
    if (strcmp(c->words[0], "logits") != 0) {
        (void)fprintf(stderr, "covey: usage: covey debug logits MODEL FILE\n");
        return EXIT_USAGE;
    }
    uint8_t precision = PRECISION_FAST;
    if (c->precision && precision_parse(c->precision, &precision) == ERR_OK)
        o.precision = (enum stage_precision)precision;
    enum err e = sodium_init() < 0 ? ERR_IO : ERR_OK;
    if (e == ERR_OK && c->split)
        e = read_split(c->split, &o, &text);
    if (e == ERR_OK)
        e = cli_model_path(c, c->words[1], path, &text);
    if (e == ERR_OK)
        e = logits_run_file(path, c->words[2], &o, &out, &text);
    if (e == ERR_OK && out.len)
        (void)fwrite(out.data, 1, out.len, stdout);
    buf_deinit(&out);
    return e == ERR_OK ? EXIT_DONE : cli_fail(e, false, &text);
}
