/* From a conversation to the ids of a prompt: renders the template of the model file and tokenises
 * the result. Special tokens come from the template alone: what a user (or a tool) wrote stays
 * plain text, even where it spells "<|im_end|>". Immutable after construction; several threads may
 * use one. */
#ifndef COVEY_RUNTIME_CHAT_H
#define COVEY_RUNTIME_CHAT_H

#include "base/buf.h"
#include "base/err.h"
#include "runtime/template.h"
#include "runtime/tokenizer.h"

#include <jansson.h>
#include <stdbool.h>

struct gguf;
struct chat;

/* Takes tokenizer.chat_template (and the one named "tool_use", for requests with tools). Borrows
 * the tokenizer. ERR_NOT_FOUND: the file has no template; else as template_new. */
enum err chat_new(const struct gguf *gguf, const struct tokenizer *tokenizer, struct chat **ret,
                  struct err_text *text);
/* The same with a template given as text. */
enum err chat_new_source(const char *source, size_t n, const struct tokenizer *tokenizer,
                         struct chat **ret, struct err_text *text);
void chat_free(struct chat *chat);

struct chat_request {
    const json_t *messages;  /* array of {"role", "content", ...} */
    const json_t *tools;     /* array, or NULL */
    const json_t *variables; /* further template variables of the caller, or NULL */
    bool add_generation_prompt;
    const struct tm *now; /* for templates that write the date; may be NULL */
};

/* Appends the prompt's ids. ERR_INVALID: the template refuses the conversation (the sentence is the
 * template's own); ERR_LIMIT over tokens_max (0: none); else as template_render. */
enum err chat_prompt(const struct chat *chat, const struct chat_request *request, size_t tokens_max,
                     struct token_ids *ids, struct err_text *text);
/* The rendered text, and the runs of it that the user wrote (may be NULL): for tests and debugging.
 */
enum err chat_render_text(const struct chat *chat, const struct chat_request *request,
                          struct buf *out, struct text_spans *ret_user, struct err_text *text);

#endif
