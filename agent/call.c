#include "agent/call.h"

#include "base/util.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct call {
    atomic_uint refs;
    enum call_kind kind;
    json_t *args;
    struct chat_submit submit;
    void (*wake)(void *ctx);
    void *wake_ctx;

    pthread_mutex_t mutex;
    struct call_item *items; /* ring, grown up to CALL_ITEMS_MAX */
    uint32_t first, n, cap;
    bool done, dropped;
    enum err result;
    json_t *body;
    struct err_text text;
};

struct call *call_new(enum call_kind kind, json_t *args, void (*wake)(void *ctx), void *wake_ctx)
{
    struct call *c = calloc(1, sizeof *c);
    if (!c) {
        json_decref(args);
        return NULL;
    }
    atomic_init(&c->refs, 1);
    c->kind = kind;
    c->args = args;
    c->wake = wake;
    c->wake_ctx = wake_ctx;
    (void)pthread_mutex_init(&c->mutex, NULL);
    return c;
}

struct call *call_ref(struct call *c)
{
    (void)atomic_fetch_add(&c->refs, 1);
    return c;
}

void call_unref(struct call *c)
{
    if (!c || atomic_fetch_sub(&c->refs, 1) != 1)
        return;
    for (uint32_t i = 0; i < c->n; i++)
        json_decref(c->items[(c->first + i) % c->cap].json);
    free(c->items);
    free(c->submit.prompt_ids);
    json_decref(c->args);
    json_decref(c->body);
    (void)pthread_mutex_destroy(&c->mutex);
    free(c);
}

enum call_kind call_kind(const struct call *c)
{
    return c->kind;
}

json_t *call_args(const struct call *c)
{
    return c->args;
}

struct chat_submit *call_submit(struct call *c)
{
    return &c->submit;
}

/* With the mutex held, which it gives back. `wake` runs inside, so that after call_drop it is never
 * called again. */
static void signal_change(struct call *c)
{
    if (c->wake)
        c->wake(c->wake_ctx);
    (void)pthread_mutex_unlock(&c->mutex);
}

static void finish(struct call *c, enum err e, json_t *body, const char *sentence)
{
    (void)pthread_mutex_lock(&c->mutex);
    if (c->done) {
        (void)pthread_mutex_unlock(&c->mutex);
        json_decref(body);
        return;
    }
    c->done = true;
    c->result = e;
    c->body = body;
    if (sentence)
        (void)snprintf(c->text.text, sizeof c->text.text, "%s", sentence);
    signal_change(c);
}

void call_reply(struct call *c, enum err e, json_t *take_body)
{
    finish(c, e, take_body, NULL);
}

void call_fail(struct call *c, enum err e, const char *format, ...)
{
    char sentence[ERR_TEXT_MAX];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(sentence, sizeof sentence, format, args);
    va_end(args);
    finish(c, e, NULL, sentence);
}

/* With the mutex held. */
static enum err grow(struct call *c)
{
    if (c->n < c->cap)
        return ERR_OK;
    if (c->cap == CALL_ITEMS_MAX)
        return ERR_BUSY;
    uint32_t cap = c->cap ? c->cap * 2 : 16;
    struct call_item *items = malloc(cap * sizeof *items);
    if (!items)
        return ERR_NO_MEMORY;
    for (uint32_t i = 0; c->cap && i < c->n; i++)
        items[i] = c->items[(c->first + i) % c->cap];
    free(c->items);
    c->items = items;
    c->cap = cap;
    c->first = 0;
    return ERR_OK;
}

enum err call_push(struct call *c, const struct call_item *item)
{
    (void)pthread_mutex_lock(&c->mutex);
    enum err e = c->dropped || c->done ? ERR_CANCELLED : grow(c);
    if (e != ERR_OK) {
        (void)pthread_mutex_unlock(&c->mutex);
        return e;
    }
    c->items[(c->first + c->n) % c->cap] = *item;
    c->n++;
    signal_change(c);
    return ERR_OK;
}

bool call_is_dropped(struct call *c)
{
    (void)pthread_mutex_lock(&c->mutex);
    bool dropped = c->dropped;
    (void)pthread_mutex_unlock(&c->mutex);
    return dropped;
}

bool call_next(struct call *c, struct call_item *ret)
{
    (void)pthread_mutex_lock(&c->mutex);
    bool some = c->n > 0;
    if (some) {
        *ret = c->items[c->first];
        c->first = (c->first + 1) % c->cap;
        c->n--;
    }
    (void)pthread_mutex_unlock(&c->mutex);
    return some;
}

bool call_is_done(struct call *c)
{
    (void)pthread_mutex_lock(&c->mutex);
    bool done = c->done;
    (void)pthread_mutex_unlock(&c->mutex);
    return done;
}

enum err call_result(struct call *c, json_t **ret_body, struct err_text *text)
{
    (void)pthread_mutex_lock(&c->mutex);
    enum err e = c->done ? c->result : ERR_AGAIN;
    if (ret_body)
        *ret_body = c->done && c->body ? json_incref(c->body) : NULL;
    if (text)
        *text = c->text;
    (void)pthread_mutex_unlock(&c->mutex);
    return e;
}

void call_drop(struct call *c)
{
    (void)pthread_mutex_lock(&c->mutex);
    c->dropped = true;
    c->wake = NULL;
    (void)pthread_mutex_unlock(&c->mutex);
}
