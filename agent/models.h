/* The models whose header is here, opened once and shared: description, tokenizer, chat template.
 * HTTP threads look up and keep references; the loader adds. Immutable once added. */
#ifndef COVEY_AGENT_MODELS_H
#define COVEY_AGENT_MODELS_H

#include "base/err.h"
#include "base/id.h"
#include "runtime/chat.h"
#include "runtime/model.h"
#include "runtime/tokenizer.h"

struct models;

/* One opened model. `chat` is NULL when the file has no chat template. */
struct served_model {
    struct hash256 id;
    char name[96];
    struct model *model;
    struct tokenizer *tokenizer;
    struct chat *chat;
};

enum err models_new(struct models **ret);
void models_free(struct models *m);

/* Can the file be served: opens weights, tokenizer and chat template and closes them again. A
 * sentence that names the file when not. */
enum err models_check_file(const char *path, uint64_t *ret_header_bytes, struct err_text *text);

/* Opens the file (its header must be there) and adds it, or finds it added. The reference is the
 * caller's. */
enum err models_open(struct models *m, const struct hash256 *id, const char *name, const char *path,
                     struct served_model **ret, struct err_text *text);
/* NULL when it is not open. */
struct served_model *models_get(struct models *m, const struct hash256 *id);
void models_put(struct served_model *s);
/* Forgets it; users keep their references. */
void models_drop(struct models *m, const struct hash256 *id);

#endif
