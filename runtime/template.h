/* Chat templates: a small interpreter for the Jinja2 that model files carry, with the settings that
 * transformers uses (trim_blocks, lstrip_blocks, loop controls, tojson without HTML escapes).
 *
 * A template sees its inputs and nothing else: no files, no clock, no attributes of ours, no
 * imports. Every render is bounded (bytes, memory, steps, depth) and ends with its text or with a
 * sentence.
 *
 * User text stays marked. Strings of `user` carry a mark on each byte through every operation
 * (concatenation, slices, replace, join, tojson ...), so that the caller knows which bytes of the
 * result a user wrote and can keep special-token text in them plain.
 *
 * Source: the Jinja 3.1 template designer documentation; behaviour is compared with the Python
 * package (tests/reference/make_template_cases.py). Departures: whole numbers are 64 bits wide
 * (overflow is an error), list.append is allowed, generators can be read more than once, {% call
 * %},
 * {% block %}, recursive loops, imports and *args are refused. */
#ifndef COVEY_RUNTIME_TEMPLATE_H
#define COVEY_RUNTIME_TEMPLATE_H

#include "base/buf.h"
#include "base/err.h"
#include "runtime/text_span.h"

#include <jansson.h>
#include <time.h>

struct template;

enum { TEMPLATE_SOURCE_MAX = 1 << 20 };

/* Parses once; the result is immutable and may be rendered by several threads at a time.
 * ERR_LIMIT (too long, nested too deeply), ERR_CORRUPT (syntax; the sentence has the line),
 * ERR_UNSUPPORTED (a statement that we do not have; an unknown filter or test fails only when it is
 * reached), ERR_NO_MEMORY. */
enum err template_new(const char *source, size_t n, struct template **ret, struct err_text *text);
void template_free(struct template *t);

struct template_limits {
    size_t output_bytes_max;
    size_t memory_bytes_max; /* of one render, beside the output */
    uint64_t steps_max;      /* evaluated nodes, plus one per 16 bytes handled */
    uint32_t depth_max;      /* nested expressions, statements and macro calls */
};
/* A prompt of 128 Ki tokens is about 600 KiB; a long conversation takes some 100,000 steps. */
#define TEMPLATE_LIMITS_DEFAULT                                                                    \
    ((struct template_limits){.output_bytes_max = 16u << 20,                                       \
                              .memory_bytes_max = 256u << 20,                                      \
                              .steps_max = UINT64_C(50000000),                                     \
                              .depth_max = 200})

/* Variables of the render: objects whose keys are the names. Both may be NULL; `user` wins where
 * both have a name. Strings of `user`, keys included, are marked as the user's. */
struct template_input {
    const json_t *own;    /* add_generation_prompt, bos_token, eos_token ... */
    const json_t *user;   /* messages, tools ... */
    const struct tm *now; /* for strftime_now; NULL: that function is not defined */
};

/* Appends the text to `out`. `ret_user` (may be NULL) gets the marked runs of bytes, counted from
 * the first byte that this call appended. On failure `out` is as before.
 *   ERR_INVALID      the template called raise_exception: the sentence is its message, alone
 *   ERR_CORRUPT      the template does something that makes no sense (names its line)
 *   ERR_UNSUPPORTED  it wants something that we do not have
 *   ERR_LIMIT, ERR_NO_MEMORY */
enum err template_render(const struct template *t, const struct template_input *input,
                         const struct template_limits *limits, struct buf *out,
                         struct text_spans *ret_user, struct err_text *text);

#endif
