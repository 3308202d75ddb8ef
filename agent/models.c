#include "agent/models.h"

#include "agent/mapping_guard.h"
#include "base/util.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

enum { OPEN_MODELS_MAX = 64 };

struct counted {
    atomic_uint refs;
    uint64_t n_holes; /* pages that no file could give, in the whole process, when it was mapped */
    struct served_model is;
};

struct models {
    pthread_mutex_t mutex;
    struct counted *list[OPEN_MODELS_MAX];
    uint32_t n;
};

enum err models_new(struct models **ret)
{
    struct models *m = calloc(1, sizeof *m);
    if (!m)
        return ERR_NO_MEMORY;
    (void)pthread_mutex_init(&m->mutex, NULL);
    *ret = m;
    return ERR_OK;
}

static struct counted *counted_of(struct served_model *s)
{
    return (struct counted *)(void *)((char *)s - offsetof(struct counted, is));
}

void models_put(struct served_model *s)
{
    if (!s)
        return;
    struct counted *c = counted_of(s);
    if (atomic_fetch_sub(&c->refs, 1) != 1)
        return;
    chat_free(c->is.chat);
    tokenizer_free(c->is.tokenizer);
    model_unref(c->is.model);
    free(c);
}

void models_free(struct models *m)
{
    if (!m)
        return;
    for (uint32_t i = 0; i < m->n; i++)
        models_put(&m->list[i]->is);
    (void)pthread_mutex_destroy(&m->mutex);
    free(m);
}

/* With the mutex held. */
static struct served_model *find(struct models *m, const struct hash256 *id)
{
    for (uint32_t i = 0; i < m->n; i++) {
        if (hash256_eq(&m->list[i]->is.id, id)) {
            (void)atomic_fetch_add(&m->list[i]->refs, 1);
            return &m->list[i]->is;
        }
    }
    return NULL;
}

struct served_model *models_get(struct models *m, const struct hash256 *id)
{
    (void)pthread_mutex_lock(&m->mutex);
    struct served_model *s = find(m, id);
    (void)pthread_mutex_unlock(&m->mutex);
    return s;
}

void models_drop(struct models *m, const struct hash256 *id)
{
    struct served_model *gone = NULL;
    (void)pthread_mutex_lock(&m->mutex);
    for (uint32_t i = 0; i < m->n && !gone; i++) {
        if (hash256_eq(&m->list[i]->is.id, id)) {
            gone = &m->list[i]->is;
            m->list[i] = m->list[--m->n];
        }
    }
    (void)pthread_mutex_unlock(&m->mutex);
    models_put(gone);
}

static enum err open_parts(struct served_model *s, const char *path, struct err_text *text)
{
    TRY(model_open(path, &s->model, text));
    TRY(tokenizer_new_gguf(model_gguf(s->model), &s->tokenizer, text));
    enum err e = chat_new(model_gguf(s->model), s->tokenizer, &s->chat, text);
    return e == ERR_NOT_FOUND ? ERR_OK : e; /* a base model: completions without a template */
}

enum err models_check_file(const char *path, uint64_t *ret_header_bytes, struct err_text *text)
{
    struct counted *c = calloc(1, sizeof *c);
    if (!c)
        return ERR_NO_MEMORY;
    atomic_init(&c->refs, 1);
    enum err e = open_parts(&c->is, path, text);
    if (e == ERR_OK)
        *ret_header_bytes = model_info(c->is.model)->header_bytes;
    models_put(&c->is);
    return e;
}

enum err models_open(struct models *m, const struct hash256 *id, const char *name, const char *path,
                     struct served_model **ret, struct err_text *text)
{
    *ret = models_get(m, id);
    if (*ret && counted_of(*ret)->n_holes == mapping_guard_count())
        return ERR_OK;
    if (*ret) { /* its mapping may have holes where the file was cut short: zeros, not weights */
        models_put(TAKE(*ret));
        models_drop(m, id);
    }
    struct counted *c = calloc(1, sizeof *c);
    if (!c)
        return ERR_NO_MEMORY;
    atomic_init(&c->refs, 1);
    c->n_holes = mapping_guard_count();
    c->is.id = *id;
    (void)snprintf(c->is.name, sizeof c->is.name, "%s", name);
    enum err e = open_parts(&c->is, path, text);
    if (e != ERR_OK) {
        models_put(&c->is);
        return e;
    }
    (void)pthread_mutex_lock(&m->mutex);
    struct served_model *other = find(m, id);
    if (!other && m->n < OPEN_MODELS_MAX) {
        (void)atomic_fetch_add(&c->refs, 1);
        m->list[m->n++] = c;
    }
    (void)pthread_mutex_unlock(&m->mutex);
    if (other) {
        models_put(&c->is);
        *ret = other;
    } else {
        *ret = &c->is;
    }
    return ERR_OK;
}
