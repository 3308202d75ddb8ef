/* covey bench MODEL: in this process, without an agent. */
#include "agent/cli.h"

#include "agent/store.h"
#include "planner/plan.h"
#include "runtime/speed_tool.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { PROMPT = 128, GENERATE = 64, ROUNDS = 5 };

static void show_progress(void *context, uint32_t round, uint32_t n_rounds)
{
    (void)context;
    if (round == 0)
        (void)fprintf(stderr, "\rwarming up    ");
    else
        (void)fprintf(stderr, "\rround %u of %u ", round, n_rounds);
}

static void clear_progress(void)
{
    (void)fprintf(stderr, "\r                \r");
}

static void print_json(const char *model, const struct speed_options *o, const struct speed *s)
{
    json_t *j = json_pack("{s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:s, s:s, s:I, s:I}", "model", model,
                          "prompt", (int)o->n_prompt, "generate", (int)o->n_generate, "depth",
                          (int)o->n_depth, "batch", (int)o->n_batch, "threads", (int)s->n_threads,
                          "rounds", (int)o->n_rounds, "precision", precision_name(o->precision),
                          "kernels", s->kernels, "weight_bytes", (json_int_t)s->weight_bytes,
                          "memory_bytes", (json_int_t)s->memory_bytes);
    json_t *prompt = o->n_prompt ? json_real(s->prompt) : json_null();
    json_t *generate = o->n_generate ? json_real(s->generate) : json_null();
    (void)json_object_set_new(j, "prompt_tokens_per_s", prompt);
    (void)json_object_set_new(j, "generate_tokens_per_s", generate);
    cli_print_json(j);
    json_decref(j);
}

static void print_line(const char *what, uint32_t n, double median, double low, double high)
{
    (void)printf("%-9s %6u tokens  %9.1f tokens/s  (%.1f to %.1f)\n", what, n, median, low, high);
}

static void print_text(const struct speed_options *o, const struct speed *s)
{
    (void)printf("%u thread%s, %s kernels, precision %s, %u sequence%s at once, depth %u; medians "
                 "of %u\n",
                 s->n_threads, s->n_threads == 1 ? "" : "s", s->kernels,
                 precision_name(o->precision), o->n_batch, o->n_batch == 1 ? "" : "s", o->n_depth,
                 o->n_rounds);
    if (o->n_prompt)
        print_line("prompt", o->n_prompt, s->prompt, s->prompt_low, s->prompt_high);
    if (!o->n_generate)
        return;
    print_line("generate", o->n_generate, s->generate, s->generate_low, s->generate_high);
    (void)printf("weights read per step %.0f MiB: %.1f GB/s\n", (double)s->weight_bytes / (1 << 20),
                 (double)s->weight_bytes * s->generate / o->n_batch / 1e9);
}

int cli_bench(const struct cli *c)
{
    struct err_text text = {""};
    char path[STORE_PATH_MAX];
    struct speed speed;
    struct speed_options o = {
        .n_threads = c->n_threads,
        .n_prompt = c->has_prompt ? c->n_prompt : PROMPT,
        .n_generate = c->has_generate ? c->n_generate : GENERATE,
        .n_depth = c->n_depth,
        .n_batch = c->n_batch ? c->n_batch : 1,
        .n_rounds = c->n_rounds ? c->n_rounds : ROUNDS,
        .progress = isatty(STDERR_FILENO) ? show_progress : NULL,
    };
    uint8_t precision = PRECISION_FAST;
    if (c->precision && precision_parse(c->precision, &precision) == ERR_OK)
        o.precision = (enum stage_precision)precision;
    enum err e = cli_model_path(c, c->words[0], path, &text);
    if (e == ERR_OK)
        e = speed_run(path, &o, &speed, &text);
    if (o.progress)
        clear_progress();
    if (e != ERR_OK)
        return cli_fail(e, false, &text);
    if (c->json)
        print_json(c->words[0], &o, &speed);
    else
        print_text(&o, &speed);
    return EXIT_DONE;
}
