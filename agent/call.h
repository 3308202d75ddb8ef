/* A call: how an HTTP thread asks the loop thread for something and gets one reply, or a stream of
 * items.
 *
 * Made and released by an HTTP thread, sent to the loop's mailbox as an owned reference; the loop
 * replies or pushes items and drops its reference. Everything inside is guarded by the call's
 * mutex; `wake` (which resumes the connection) is called, inside the mutex,
 * whenever something new is there to take. The item ring is bounded: a client that does not read
 * loses its request (ERR_BUSY), it never stalls the loop. */
#ifndef COVEY_AGENT_CALL_H
#define COVEY_AGENT_CALL_H

#include "base/err.h"
#include "base/id.h"
#include "runtime/sampler.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

enum call_kind {
    CALL_STATUS, /* reply: the object of `covey status --json` */
    CALL_NODES,  /* reply: {"nodes": […]} */
    CALL_MODELS, /* reply: {"models": […]}: what any member holds, what is wanted and what runs */
    CALL_PLAN,   /* args {"model", "context", "explain"}; reply: plan, prediction, candidates */
    CALL_INVITE, /* args {"ttl_s", "worker"}; reply {"token", "expires_at", "ttl_s"} */
    CALL_JOIN,   /* args {"token", "peer", "leave"}; replies when joined or failed */
    CALL_REVOKE, /* args {"node"} */
    CALL_LEAVE,  /* leave the cluster for good */
    CALL_ADD_FILE, /* args {"path", "name"}; items: {"done","total"}; reply {"id","name"} */
    CALL_PULL,     /* args {"name"}; the same items and reply */
    CALL_REMOVE,   /* args {"model"} */
    CALL_LOAD,   /* args {"model", "context", "precision"}: wants the model; replies when it runs or
                    cannot */
    CALL_UNLOAD, /* args {"model"} */
    CALL_PING,   /* args {"node"}; reply {"rtt_us", "paths": […]} */
    CALL_DOCTOR, /* reply {"findings": [{"level","text","hint"}]} */
    CALL_EVENTS, /* items: event objects, until the client goes */
    CALL_CHAT,   /* `submit` holds the request; items: tokens and the end */
    CALL_STOP,   /* leave politely and exit */
    CALL_KIND_N
};

enum { CALL_BIASES_MAX = 300 };

/* A request to be answered by a model, tokenised already. */
struct chat_submit {
    struct request_id request;
    struct hash256 model;
    int32_t *prompt_ids;
    uint32_t n_prompt_ids;
    uint32_t max_tokens;           /* 0: as many as the context allows */
    struct sampler_params sampler; /* without its biases, which are these */
    struct sampler_bias biases[CALL_BIASES_MAX];
    uint32_t n_biases;
    uint64_t seed;
    int32_t end_ids[16];
    uint32_t n_end_ids;
    bool ignore_eos;
    uint32_t deadline_ms; /* 0: the default */
};

enum call_item_kind { CALL_ITEM_TOKEN, CALL_ITEM_END, CALL_ITEM_JSON };

enum { CALL_LOGPROBS_MAX = 20 };

struct call_item {
    enum call_item_kind kind;
    /* token */
    int32_t token_id;
    uint32_t position; /* of generated tokens: 0, 1, … */
    float logprob;
    uint32_t n_top;
    int32_t top_ids[CALL_LOGPROBS_MAX];
    float top_logprobs[CALL_LOGPROBS_MAX];
    /* end */
    enum err error;          /* ERR_OK: finished */
    char finish[16];         /* "stop", "length" */
    char text[ERR_TEXT_MAX]; /* when failed: a sentence */
    uint32_t n_prompt, n_generated;
    uint32_t n_cached;             /* of the prompt: not computed, their KV was held already */
    double prompt_ms, generate_ms; /* until the first token; from the first to the last */
    /* JSON: taken by call_next's caller, who drops it */
    json_t *json;
};

struct call;

enum { CALL_ITEMS_MAX = 16384 };

/* One reference, owned by the maker. `args` is taken (may be NULL). */
struct call *call_new(enum call_kind kind, json_t *args, void (*wake)(void *ctx), void *wake_ctx);
struct call *call_ref(struct call *c);
void call_unref(struct call *c);

enum call_kind call_kind(const struct call *c);
json_t *call_args(const struct call *c); /* borrowed */
struct chat_submit *
call_submit(struct call *c); /* owned by the call; prompt_ids are freed with it */

/* Loop side. */
void call_reply(struct call *c, enum err e, json_t *take_body); /* once; ends a stream as well */
void call_fail(struct call *c, enum err e, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
enum err
call_push(struct call *c,
          const struct call_item *item); /* ERR_BUSY when full, ERR_CANCELLED when dropped */
bool call_is_dropped(struct call *c);

/* HTTP side. */
bool call_next(struct call *c, struct call_item *ret); /* false: nothing just now */
bool call_is_done(struct call *c);                     /* replied (items may still be waiting) */
enum err call_result(struct call *c, json_t **ret_body,
                     struct err_text *text); /* after done; body is a new reference */
/* The client is gone: the loop is told by call_is_dropped at its next push, and by a wake-up of its
 * mailbox. */
void call_drop(struct call *c);

#endif
