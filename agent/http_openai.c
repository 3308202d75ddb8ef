/* OpenAI's API (https://platform.openai.com/docs/api-reference/chat): /v1/models,
 * /v1/chat/completions. And, for the CLI and tests, /covey/generate: the same request with `raw`
 * prompts, token ids and timings, as JSON lines. A field that changes the output is honoured or
 * refused, never ignored. */
#include "agent/answer_text.h"
#include "agent/exchange.h"
#include "base/clock.h"
#include "base/util.h"
#include "runtime/gguf.h"

#include <errno.h>
#include <math.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEADLINE_MS = 30 * 60 * 1000, IDS_REPLY_MAX = 1 << 20 };

enum phase { PHASE_LOADING, PHASE_SUBMITTED, PHASE_STREAMING, PHASE_OVER };

struct chat_state {
    json_t *request;
    enum phase phase;
    bool generate; /* /covey/generate */
    bool stream, include_usage, echo_role;
    bool raw, ignore_eos, logprobs;
    int64_t keep_alive_s; /* -1: not given */
    struct sampler_params sampler;
    struct sampler_bias biases[CALL_BIASES_MAX];
    uint32_t n_biases;
    uint32_t max_tokens;
    struct served_model *served;
    struct request_id request_id;
    char id[48];
    uint64_t created_s;
    struct answer_text text;
    struct buf content; /* of an answer that is not streamed */
    json_t *ids, *logprob_items;
    uint32_t n_prompt, n_generated, n_cached;
    double prompt_ms, generate_ms;
    char finish[16];
    enum err error;
    char error_text[ERR_TEXT_MAX];
};

static void chat_state_free(void *p)
{
    struct chat_state *s = p;
    json_decref(s->request);
    json_decref(s->ids);
    json_decref(s->logprob_items);
    models_put(s->served);
    answer_text_deinit(&s->text);
    buf_deinit(&s->content);
    free(s);
}

/* ---- reading the request ---- */

static enum err number_field(const json_t *r, const char *key, double low, double high, float *ret,
                             struct err_text *text)
{
    const json_t *v = json_object_get(r, key);
    if (!v || json_is_null(v))
        return ERR_OK;
    double x = json_number_value(v);
    if (!json_is_number(v) || !(x >= low && x <= high))
        return err_set(text, ERR_INVALID, "'%s' must be a number from %g to %g", key, low, high);
    *ret = (float)x;
    return ERR_OK;
}

static enum err count_field(const json_t *r, const char *key, json_int_t high, uint64_t *ret,
                            struct err_text *text)
{
    const json_t *v = json_object_get(r, key);
    if (!v || json_is_null(v))
        return ERR_OK;
    if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) > high)
        return err_set(text, ERR_INVALID, "'%s' must be a whole number from 0 to %lld", key,
                       (long long)high);
    *ret = (uint64_t)json_integer_value(v);
    return ERR_OK;
}

/* Zero would mean "no limit" further on. */
static enum err limit_field(const json_t *r, const char *key, uint64_t *ret, struct err_text *text)
{
    const json_t *v = json_object_get(r, key);
    if (v && !json_is_null(v) && (!json_is_integer(v) || json_integer_value(v) < 1))
        return err_set(text, ERR_INVALID, "'%s' must be a whole number from 1 to %d", key, 1 << 20);
    return count_field(r, key, 1 << 20, ret, text);
}

static enum err switch_field(const json_t *r, const char *key, bool *ret, struct err_text *text)
{
    const json_t *v = json_object_get(r, key);
    if (!v || json_is_null(v))
        return ERR_OK;
    if (!json_is_boolean(v))
        return err_set(text, ERR_INVALID, "'%s' must be true or false", key);
    *ret = json_is_true(v);
    return ERR_OK;
}

static enum err read_stop(struct chat_state *s, struct err_text *text)
{
    const json_t *v = json_object_get(s->request, "stop");
    if (!v || json_is_null(v))
        return ERR_OK;
    size_t n = json_is_array(v) ? json_array_size(v) : 1;
    for (size_t i = 0; i < n; i++) {
        const char *word = json_string_value(json_is_array(v) ? json_array_get(v, i) : v);
        if (!word || answer_text_add_stop(&s->text, word) != ERR_OK)
            return err_set(text, ERR_INVALID,
                           "'stop' must be a string or up to %d strings of 1 to %d bytes",
                           STOPS_MAX, STOP_BYTES_MAX - 1);
    }
    return ERR_OK;
}

/* {"TOKEN ID": BIAS, ...}; -100 bans a token as well as any number can. */
static enum err read_biases(struct chat_state *s, struct err_text *text)
{
    json_t *v = json_object_get(s->request, "logit_bias"), *bias;
    const char *key;
    if (!v || json_is_null(v))
        return ERR_OK;
    if (!json_is_object(v) || json_object_size(v) > CALL_BIASES_MAX)
        return err_set(text, ERR_INVALID, "'logit_bias' must be an object of up to %d tokens",
                       CALL_BIASES_MAX);
    json_object_foreach(v, key, bias)
    {
        char *end = NULL;
        errno = 0;
        long id = strtol(key, &end, 10);
        double x = json_number_value(bias);
        if (end == key || *end || errno || id < 0 || id > INT32_MAX || !json_is_number(bias) ||
            !(x >= -100 && x <= 100))
            return err_set(text, ERR_INVALID,
                           "'logit_bias' must give numbers from -100 to 100 to token ids");
        s->biases[s->n_biases++] = (struct sampler_bias){(int32_t)id, (float)x};
    }
    return ERR_OK;
}

static enum err read_sampler(struct chat_state *s, struct err_text *text)
{
    const json_t *r = s->request;
    struct sampler_params *p = &s->sampler;
    uint64_t top_k = 0, n_top = 0, max_tokens = 0;
    *p = SAMPLER_PARAMS_INIT;
    randombytes_buf(&p->seed, sizeof p->seed);
    TRY(number_field(r, "temperature", 0, 2, &p->temperature, text));
    TRY(number_field(r, "top_p", 0, 1, &p->top_p, text));
    TRY(number_field(r, "min_p", 0, 1, &p->min_p, text));
    TRY(number_field(r, "typical_p", 1e-6, 1, &p->typical_p, text));
    TRY(read_biases(s, text));
    TRY(number_field(r, "frequency_penalty", -2, 2, &p->frequency_penalty, text));
    TRY(number_field(r, "presence_penalty", -2, 2, &p->presence_penalty, text));
    TRY(number_field(r, "repetition_penalty", 0.01, 100, &p->repetition_penalty, text));
    TRY(count_field(r, "top_k", 1 << 20, &top_k, text));
    TRY(count_field(r, "top_logprobs", CALL_LOGPROBS_MAX, &n_top, text));
    TRY(switch_field(r, "logprobs", &s->logprobs, text));
    const json_t *seed = json_object_get(r, "seed");
    if (seed && !json_is_null(seed)) {
        if (!json_is_integer(seed))
            return err_set(text, ERR_INVALID, "'seed' must be a whole number");
        p->seed = (uint64_t)json_integer_value(seed);
    }
    if (p->top_p <= 0)
        p->top_p = 1e-6f; /* the likeliest token alone */
    if (n_top > 0 && !s->logprobs)
        return err_set(text, ERR_INVALID, "'top_logprobs' needs 'logprobs': true");
    p->top_k = (uint32_t)top_k;
    p->n_top = (uint32_t)n_top;
    p->want_logprob = s->logprobs;
    TRY(limit_field(r, "max_tokens", &max_tokens, text));
    TRY(limit_field(r, "max_completion_tokens", &max_tokens, text));
    s->max_tokens = (uint32_t)max_tokens;
    return read_stop(s, text);
}

/* Fields that we know and that change nothing here. */
static bool is_harmless(const char *key)
{
    static const char *const keys[] = {"model",
                                       "messages",
                                       "stream",
                                       "stream_options",
                                       "user",
                                       "metadata",
                                       "store",
                                       "service_tier",
                                       "temperature",
                                       "top_p",
                                       "min_p",
                                       "typical_p",
                                       "logit_bias",
                                       "top_k",
                                       "frequency_penalty",
                                       "presence_penalty",
                                       "repetition_penalty",
                                       "seed",
                                       "stop",
                                       "logprobs",
                                       "top_logprobs",
                                       "max_tokens",
                                       "max_completion_tokens",
                                       "safety_identifier",
                                       "prompt_cache_key"};
    for (size_t i = 0; i < ARRAY_LEN(keys); i++) {
        if (strcmp(key, keys[i]) == 0)
            return true;
    }
    return false;
}

/* Fields that are fine as long as they ask for what happens anyway. */
static bool asks_for_nothing(const char *key, const json_t *v)
{
    if (json_is_null(v))
        return true;
    if (strcmp(key, "n") == 0)
        return json_is_integer(v) && json_integer_value(v) == 1;
    if (strcmp(key, "tools") == 0 || strcmp(key, "functions") == 0)
        return json_is_array(v) && json_array_size(v) == 0;
    if (strcmp(key, "tool_choice") == 0 || strcmp(key, "function_call") == 0)
        return json_is_string(v) && strcmp(json_string_value(v), "none") == 0;
    if (strcmp(key, "parallel_tool_calls") == 0)
        return json_is_boolean(v);
    if (strcmp(key, "response_format") == 0) {
        const char *type = json_string_value(json_object_get(v, "type"));
        return type && strcmp(type, "text") == 0;
    }
    if (strcmp(key, "modalities") == 0)
        return json_is_array(v) && json_array_size(v) == 1 &&
               json_string_value(json_array_get(v, 0)) &&
               strcmp(json_string_value(json_array_get(v, 0)), "text") == 0;
    return false;
}

static enum err check_fields(const struct chat_state *s, struct err_text *text)
{
    static const char *const own[] = {"prompt", "raw", "ignore_eos", "keep_alive_s"};
    const char *key;
    json_t *v;
    json_object_foreach(s->request, key, v)
    {
        bool known = is_harmless(key) || asks_for_nothing(key, v);
        for (size_t i = 0; s->generate && i < ARRAY_LEN(own); i++)
            known |= strcmp(key, own[i]) == 0;
        if (!known)
            return err_set(text, ERR_UNSUPPORTED,
                           "'%.64s' is not supported here (or not with this value)", key);
    }
    return ERR_OK;
}

/* Contents of messages may be lists of text parts; templates want strings. */
static enum err flatten_content(json_t *message, struct err_text *text)
{
    json_t *content = json_object_get(message, "content"), *part;
    size_t i;
    const char *role = json_string_value(json_object_get(message, "role"));
    if (!json_is_object(message) || !role)
        return err_set(text, ERR_INVALID, "each message needs a 'role'");
    if (!content || json_is_null(content))
        return err_set(text, ERR_INVALID, "each message needs a 'content'");
    if (json_is_string(content))
        return ERR_OK;
    if (!json_is_array(content))
        return err_set(text, ERR_INVALID, "'content' must be a string or a list of text parts");
    struct buf b = BUF_INIT(EXCHANGE_BODY_MAX);
    enum err e = ERR_OK;
    json_array_foreach(content, i, part)
    {
        const char *type = json_string_value(json_object_get(part, "type"));
        const json_t *words = json_object_get(part, "text");
        if (!type || strcmp(type, "text") != 0 || !json_is_string(words))
            e = err_set(text, ERR_UNSUPPORTED, "only text parts are supported in 'content'");
        else
            e = buf_append(&b, json_string_value(words), json_string_length(words));
        if (e != ERR_OK)
            break;
    }
    if (e == ERR_OK)
        (void)json_object_set_new(message, "content",
                                  json_stringn(b.data ? (char *)b.data : "", b.len));
    buf_deinit(&b);
    return e;
}

static enum err read_messages(const struct chat_state *s, struct err_text *text)
{
    json_t *messages = json_object_get(s->request, "messages"), *m;
    size_t i;
    if (s->generate && json_is_string(json_object_get(s->request, "prompt")))
        return ERR_OK;
    if (!json_is_array(messages) || json_array_size(messages) == 0)
        return err_set(text, ERR_INVALID, "'messages' must be a list of at least one message");
    json_array_foreach(messages, i, m) TRY(flatten_content(m, text));
    return ERR_OK;
}

static enum err read_keep_alive(struct chat_state *s, struct err_text *text)
{
    const json_t *v = json_object_get(s->request, "keep_alive_s");
    s->keep_alive_s = -1;
    if (!v || json_is_null(v))
        return ERR_OK;
    json_int_t seconds = json_integer_value(v);
    bool sane =
        seconds == 0 || (seconds >= CONFIG_KEEP_ALIVE_MIN_S && seconds <= CONFIG_KEEP_ALIVE_MAX_S);
    if (!json_is_integer(v) || !sane)
        return err_set(text, ERR_INVALID, "'keep_alive_s' must be 0 (for ever) or at least %d",
                       (int)CONFIG_KEEP_ALIVE_MIN_S);
    s->keep_alive_s = seconds;
    return ERR_OK;
}

static enum err read_request(struct exchange *x, struct chat_state *s, struct err_text *text)
{
    TRY(exchange_json(x, &s->request, text));
    if (!json_is_string(json_object_get(s->request, "model")))
        return err_set(text, ERR_INVALID, "'model' must name a model");
    TRY(check_fields(s, text));
    TRY(read_sampler(s, text));
    TRY(read_messages(s, text));
    TRY(switch_field(s->request, "stream", &s->stream, text));
    if (s->generate) {
        TRY(switch_field(s->request, "raw", &s->raw, text));
        TRY(switch_field(s->request, "ignore_eos", &s->ignore_eos, text));
        TRY(read_keep_alive(s, text));
    }
    const json_t *options = json_object_get(s->request, "stream_options");
    if (options && !json_is_null(options) && !json_is_object(options))
        return err_set(text, ERR_INVALID, "'stream_options' must be an object");
    if (options && !json_is_null(options))
        TRY(switch_field(options, "include_usage", &s->include_usage, text));
    return ERR_OK;
}

/* ---- prompt ---- */

static enum err prompt_ids(struct chat_state *s, struct token_ids *ids, struct err_text *text)
{
    const json_t *prompt = json_object_get(s->request, "prompt");
    if (s->raw && json_is_string(prompt)) {
        struct tokenizer_options o = {.add_bos = true, .tokens_max = FRAME_TOKENS_MAX};
        return tokenizer_encode(s->served->tokenizer, json_string_value(prompt),
                                json_string_length(prompt), &o, ids, text);
    }
    if (!s->served->chat)
        return err_set(text, ERR_UNSUPPORTED,
                       "this model's file has no chat template: it can only continue raw text");
    json_t *one = NULL;
    if (json_is_string(prompt))
        one = json_pack("[{s:s, s:O}]", "role", "user", "content", prompt);
    struct chat_request r = {.messages = one ? one : json_object_get(s->request, "messages"),
                             .add_generation_prompt = true};
    enum err e = chat_prompt(s->served->chat, &r, FRAME_TOKENS_MAX, ids, text);
    json_decref(one);
    return e;
}

static enum exchange_next submit(struct exchange *x, struct chat_state *s, uint32_t context)
{
    struct token_ids ids = {NULL, 0, 0};
    struct err_text text = {""};
    enum err e = prompt_ids(s, &ids, &text);
    if (e == ERR_OK && ids.n == 0)
        e = err_set(&text, ERR_INVALID, "the prompt is empty");
    if (e == ERR_OK && ids.n >= context)
        e = err_set(&text, ERR_INVALID, "the prompt has %zu tokens, but the context holds %u",
                    ids.n, context);
    for (uint32_t i = 0; e == ERR_OK && i < s->n_biases; i++)
        if ((uint32_t)s->biases[i].id >= tokenizer_n_tokens(s->served->tokenizer))
            e = err_set(&text, ERR_INVALID, "'logit_bias' names the token %d, which is not there",
                        s->biases[i].id);
    struct call *c = e == ERR_OK ? call_new(CALL_CHAT, NULL, exchange_wake, x) : NULL;
    if (!c) {
        token_ids_deinit(&ids);
        return exchange_fail(x, e == ERR_OK ? ERR_NO_MEMORY : e, "messages", "%s",
                             text.text[0] ? text.text : err_name(e));
    }
    struct chat_submit *q = call_submit(c);
    q->request = s->request_id;
    q->model = s->served->id;
    q->prompt_ids = ids.v;
    q->n_prompt_ids = (uint32_t)ids.n;
    q->max_tokens = s->max_tokens;
    q->sampler = s->sampler;
    memcpy(q->biases, s->biases, sizeof q->biases);
    q->n_biases = s->n_biases;
    q->seed = s->sampler.seed;
    q->ignore_eos = s->ignore_eos;
    q->deadline_ms = DEADLINE_MS;
    const int32_t *ends;
    uint32_t n_ends = tokenizer_end_tokens(s->served->tokenizer, &ends);
    q->n_end_ids = MIN_OF(n_ends, (uint32_t)ARRAY_LEN(q->end_ids));
    memcpy(q->end_ids, ends, q->n_end_ids * sizeof ends[0]);
    s->n_prompt = (uint32_t)ids.n;
    s->phase = PHASE_SUBMITTED;
    return exchange_post(x, c);
}

/* ---- answers ---- */

static json_t *usage_json(const struct chat_state *s)
{
    return json_pack("{s:i, s:i, s:i, s:{s:i}}", "prompt_tokens", (int)s->n_prompt,
                     "completion_tokens", (int)s->n_generated, "total_tokens",
                     (int)(s->n_prompt + s->n_generated), "prompt_tokens_details", "cached_tokens",
                     (int)s->n_cached);
}

static json_t *bytes_json(const struct text_view *piece)
{
    json_t *list = json_array();
    for (size_t i = 0; i < piece->n; i++)
        (void)json_array_append_new(list, json_integer((unsigned char)piece->p[i]));
    return list;
}

static json_t *token_json(const struct chat_state *s, int32_t id, float logprob)
{
    struct text_view piece = {"", 0};
    (void)tokenizer_piece(s->served->tokenizer, id, &piece);
    json_t *text = json_stringn(piece.p, piece.n);
    double value = isfinite(logprob) ? (double)logprob : -9999.0;
    return json_pack("{s:o, s:f, s:o}", "token", text ? text : json_string("\xef\xbf\xbd"),
                     "logprob", value, "bytes", bytes_json(&piece));
}

static json_t *logprob_json(const struct chat_state *s, const struct call_item *item)
{
    json_t *o = token_json(s, item->token_id, item->logprob), *top = json_array();
    for (uint32_t i = 0; i < item->n_top; i++)
        (void)json_array_append_new(top, token_json(s, item->top_ids[i], item->top_logprobs[i]));
    (void)json_object_set_new(o, "top_logprobs", top);
    return o;
}

static void write_event(struct exchange *x, json_t *take)
{
    const struct chat_state *s = x->state;
    char *line = take ? json_dumps(take, JSON_COMPACT) : NULL;
    json_decref(take);
    if (line)
        (void)buf_printf(&x->out, s->generate ? "%s\n" : "data: %s\n\n", line);
    free(line);
}

static json_t *chunk_json(const struct chat_state *s, json_t *take_delta, const char *finish,
                          json_t *take_logprobs)
{
    json_t *choice = json_pack("{s:i, s:o, s:o}", "index", 0, "delta", take_delta, "finish_reason",
                               finish ? json_string(finish) : json_null());
    if (s->logprobs)
        (void)json_object_set_new(choice, "logprobs", take_logprobs ? take_logprobs : json_null());
    else
        json_decref(take_logprobs);
    json_t *o =
        json_pack("{s:s, s:s, s:I, s:s, s:[o]}", "id", s->id, "object", "chat.completion.chunk",
                  "created", (json_int_t)s->created_s, "model", s->served->name, "choices", choice);
    if (s->include_usage)
        (void)json_object_set_new(o, "usage", json_null());
    return o;
}

static json_t *generate_end(struct chat_state *s)
{
    if (s->error != ERR_OK)
        return json_pack("{s:{s:s, s:s}}", "error", "message", s->error_text, "code",
                         err_name(s->error));
    return json_pack("{s:s, s:i, s:i, s:i, s:f, s:f, s:f}", "finish", s->finish, "prompt_tokens",
                     (int)s->n_prompt, "cached_tokens", (int)s->n_cached, "completion_tokens",
                     (int)s->n_generated, "prompt_ms", s->prompt_ms, "generate_ms", s->generate_ms,
                     "tokens_per_s",
                     s->generate_ms > 0 && s->n_generated > 1
                         ? (s->n_generated - 1) * 1e3 / s->generate_ms
                         : 0.0);
}

static void take_token(struct exchange *x, struct chat_state *s, const struct call_item *item)
{
    struct text_view piece = {"", 0};
    struct buf shown = BUF_INIT(ANSWER_BYTES_MAX);
    bool is_end = !s->ignore_eos && tokenizer_is_end(s->served->tokenizer, item->token_id);
    s->n_generated++;
    if (!is_end)
        (void)tokenizer_piece(s->served->tokenizer, item->token_id, &piece);
    bool was_stopped = s->text.stopped;
    (void)answer_text_push(&s->text, piece.p, piece.n, &shown);
    if (s->text.stopped && !was_stopped) /* the entry's own stop: nobody else needs to go on */
        agent_post_dropped(x->agent, &s->request_id);
    json_t *logprobs = s->logprobs && !is_end ? logprob_json(s, item) : NULL;
    const char *text = shown.len ? buf_cstr(&shown) : "";
    if (was_stopped) {
        json_decref(logprobs);
    } else if (!s->stream) {
        (void)buf_append(&s->content, shown.data, shown.len);
        if (json_array_size(s->ids) < IDS_REPLY_MAX)
            (void)json_array_append_new(s->ids, json_integer(item->token_id));
        if (logprobs)
            (void)json_array_append_new(s->logprob_items, logprobs);
    } else if (s->generate) {
        json_decref(logprobs);
        write_event(x, json_pack("{s:s, s:i}", "text", text, "id", (int)item->token_id));
    } else if (shown.len > 0 || logprobs) {
        json_t *wrapped = logprobs ? json_pack("{s:[o]}", "content", logprobs) : NULL;
        write_event(x, chunk_json(s, json_pack("{s:s}", "content", text), NULL, wrapped));
    }
    buf_deinit(&shown);
}

static void take_end(struct exchange *x, struct chat_state *s, const struct call_item *item)
{
    bool stopped = s->text.stopped;
    s->phase = PHASE_OVER;
    s->error = stopped ? ERR_OK : item->error;
    s->prompt_ms = item->prompt_ms;
    s->n_cached = item->n_cached;
    s->generate_ms = item->generate_ms;
    (void)snprintf(s->finish, sizeof s->finish, "%s", stopped ? "stop" : item->finish);
    (void)snprintf(s->error_text, sizeof s->error_text, "%s",
                   item->text[0] ? item->text : err_name(item->error));
    struct buf *to = &s->content;
    struct buf rest = BUF_INIT(ANSWER_BYTES_MAX);
    if (s->stream)
        to = &rest;
    (void)answer_text_end(&s->text, to);
    if (s->stream && s->generate) {
        if (rest.len)
            write_event(x, json_pack("{s:s}", "text", buf_cstr(&rest)));
        write_event(x, generate_end(s));
    } else if (s->stream && s->error != ERR_OK) {
        /* Never a silent end: the error is an event, in the shape that OpenAI's clients raise. */
        write_event(x, json_pack("{s:{s:s, s:s, s:n, s:s}}", "error", "message", s->error_text,
                                 "type", "server_error", "param", "code", err_name(s->error)));
    } else if (s->stream) {
        if (rest.len)
            write_event(x,
                        chunk_json(s, json_pack("{s:s}", "content", buf_cstr(&rest)), NULL, NULL));
        write_event(x, chunk_json(s, json_object(), s->finish, NULL));
        if (s->include_usage)
            write_event(x, json_pack("{s:s, s:s, s:I, s:s, s:[], s:o}", "id", s->id, "object",
                                     "chat.completion.chunk", "created", (json_int_t)s->created_s,
                                     "model", s->served->name, "choices", "usage", usage_json(s)));
        (void)buf_printf(&x->out, "data: [DONE]\n\n");
    }
    buf_deinit(&rest);
}

/* Takes what the call has; false once the end was taken. */
static bool pull_items(struct exchange *x, struct chat_state *s)
{
    struct call_item item;
    while (s->phase != PHASE_OVER && x->out.len < EXCHANGE_OUT_MAX / 2 &&
           call_next(x->call, &item)) {
        if (item.kind == CALL_ITEM_TOKEN)
            take_token(x, s, &item);
        else if (item.kind == CALL_ITEM_END)
            take_end(x, s, &item);
    }
    if (s->phase != PHASE_OVER && call_is_done(x->call) && !call_next(x->call, &item)) {
        /* Refused before it began: there is no END item then. */
        struct call_item end = {.kind = CALL_ITEM_END};
        struct err_text text = {""};
        end.error = call_result(x->call, NULL, &text);
        if (end.error == ERR_OK)
            end.error = ERR_CLOSED;
        (void)snprintf(end.text, sizeof end.text, "%s", text.text);
        take_end(x, s, &end);
    }
    return s->phase != PHASE_OVER;
}

static bool more(struct exchange *x)
{
    return pull_items(x, x->state);
}

static enum exchange_next whole_answer(struct exchange *x, struct chat_state *s)
{
    if (s->error != ERR_OK)
        return exchange_fail(x, s->error, NULL, "%s", s->error_text);
    json_t *content = json_stringn(s->content.data ? (char *)s->content.data : "", s->content.len);
    if (s->generate) {
        json_t *o = generate_end(s);
        (void)json_object_set_new(o, "text", content ? content : json_string(""));
        (void)json_object_set(o, "token_ids", s->ids);
        return exchange_reply(x, 200, o);
    }
    json_t *logprobs = s->logprobs ? json_pack("{s:O}", "content", s->logprob_items) : json_null();
    return exchange_reply(
        x, 200,
        json_pack("{s:s, s:s, s:I, s:s, s:[{s:i, s:{s:s, s:o, s:n}, s:o, s:s}], s:o}", "id", s->id,
                  "object", "chat.completion", "created", (json_int_t)s->created_s, "model",
                  s->served->name, "choices", "index", 0, "message", "role", "assistant", "content",
                  content ? content : json_string(""), "refusal", "logprobs", logprobs,
                  "finish_reason", s->finish, "usage", usage_json(s)));
}

/* ---- the handler ---- */

static enum exchange_next loaded(struct exchange *x, struct chat_state *s)
{
    json_t *body = NULL;
    struct err_text text = {""};
    enum err e = exchange_result(x, &body, &text);
    if (e == ERR_AGAIN)
        return EXCHANGE_WAIT;
    struct hash256 id;
    const char *hex = json_string_value(json_object_get(body, "id"));
    if (e == ERR_OK && hex && hex_decode(hex, id.bytes, sizeof id.bytes))
        s->served = models_get(x->agent->models, &id);
    uint32_t context = (uint32_t)json_integer_value(json_object_get(body, "context"));
    json_decref(body);
    if (e != ERR_OK)
        return exchange_fail(x, e, "model", "%s", text.text[0] ? text.text : err_name(e));
    if (!s->served)
        return exchange_fail(x, ERR_AGAIN, "model",
                             "the model is being opened here: try again in a moment");
    return submit(x, s, context);
}

static enum exchange_next handle(struct exchange *x)
{
    struct chat_state *s = x->state;
    if (s->phase == PHASE_LOADING)
        return loaded(x, s);
    if (!s->stream)
        return pull_items(x, s) ? EXCHANGE_WAIT : whole_answer(x, s);
    /* Until the first token an error is still an HTTP status. */
    struct call_item item;
    if (!call_next(x->call, &item)) {
        if (!call_is_done(x->call))
            return EXCHANGE_WAIT;
        if (!call_next(x->call, &item)) {
            struct err_text text = {""};
            enum err e = call_result(x->call, NULL, &text);
            return exchange_fail(x, e == ERR_OK ? ERR_CLOSED : e, NULL, "%s", text.text);
        }
    }
    if (item.kind == CALL_ITEM_END && item.error != ERR_OK)
        return exchange_fail(x, item.error, NULL, "%s",
                             item.text[0] ? item.text : err_name(item.error));
    if (!s->generate)
        write_event(x, chunk_json(s, json_pack("{s:s, s:s}", "role", "assistant", "content", ""),
                                  NULL, NULL));
    s->phase = PHASE_STREAMING;
    if (item.kind == CALL_ITEM_TOKEN)
        take_token(x, s, &item);
    else
        take_end(x, s, &item);
    x->content_type = s->generate ? "application/x-ndjson" : "text/event-stream";
    x->more = more;
    return EXCHANGE_STREAM;
}

static struct chat_state *chat_state_new(bool generate)
{
    struct chat_state *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    answer_text_init(&s->text);
    s->content = BUF_INIT(ANSWER_BYTES_MAX);
    s->generate = generate;
    s->ids = json_array();
    s->logprob_items = json_array();
    return s;
}

enum err openai_check(struct exchange *x, bool generate, struct err_text *text)
{
    struct chat_state *s = chat_state_new(generate);
    if (!s)
        return ERR_NO_MEMORY;
    enum err e = read_request(x, s, text);
    chat_state_free(s);
    return e;
}

static enum exchange_next begin(struct exchange *x, bool generate)
{
    struct chat_state *s = chat_state_new(generate);
    struct err_text text = {""};
    if (!s)
        return exchange_fail(x, ERR_NO_MEMORY, NULL, "out of memory");
    s->created_s = clock_wall_ms() / 1000;
    x->state = s;
    x->free_state = chat_state_free;
    char hex[33];
    randombytes_buf(s->request_id.bytes, sizeof s->request_id.bytes);
    hex_encode(s->request_id.bytes, sizeof s->request_id.bytes, hex);
    (void)snprintf(s->id, sizeof s->id, "chatcmpl-%s", hex);
    enum err e = read_request(x, s, &text);
    if (e != ERR_OK)
        return exchange_fail(x, e, NULL, "%s", text.text);
    x->handle = handle;
    json_t *args = json_pack("{s:O}", "model", json_object_get(s->request, "model"));
    if (s->generate && s->keep_alive_s >= 0)
        (void)json_object_set_new(args, "keep_alive_s", json_integer(s->keep_alive_s));
    return exchange_call(x, CALL_LOAD, args);
}

static enum exchange_next begin_chat(struct exchange *x)
{
    return begin(x, false);
}

static enum exchange_next begin_generate(struct exchange *x)
{
    return begin(x, true);
}

static enum exchange_next models_done(struct exchange *x)
{
    json_t *body = NULL, *m, *data = json_array();
    struct err_text text = {""};
    size_t i;
    enum err e = exchange_result(x, &body, &text);
    if (e == ERR_AGAIN) {
        json_decref(data);
        return EXCHANGE_WAIT;
    }
    json_array_foreach(json_object_get(body, "models"), i, m)
    {
        json_t *entry = json_pack("{s:O, s:s, s:i, s:s}", "id", json_object_get(m, "name"),
                                  "object", "model", "created", 0, "owned_by", "covey");
        json_t *kv_type = json_object_get(m, "kv_type"); /* not known of every model */
        if (kv_type)
            (void)json_object_set(entry, "kv_type", kv_type);
        (void)json_array_append_new(data, entry);
    }
    json_decref(body);
    if (e != ERR_OK) {
        json_decref(data);
        return exchange_fail(x, e, NULL, "%s", text.text);
    }
    const char *one = strlen(x->path) > 11 ? x->path + 11 : NULL; /* "/v1/models/NAME" */
    if (!one)
        return exchange_reply(x, 200, json_pack("{s:s, s:o}", "object", "list", "data", data));
    json_array_foreach(data, i, m)
    {
        if (strcmp(json_string_value(json_object_get(m, "id")), one) == 0) {
            json_t *found = json_incref(m);
            json_decref(data);
            return exchange_reply(x, 200, found);
        }
    }
    json_decref(data);
    return exchange_fail(x, ERR_NOT_FOUND, "model", "no member has a model named '%.100s'", one);
}

static enum exchange_next begin_models(struct exchange *x)
{
    x->handle = models_done;
    return exchange_call(x, CALL_MODELS, NULL);
}

static enum exchange_next wrong_method(struct exchange *x)
{
    return exchange_reply(x, 405,
                          json_pack("{s:{s:s, s:s, s:n, s:s}}", "error", "message",
                                    "this path wants another HTTP method", "type",
                                    "invalid_request_error", "param", "code",
                                    "method_not_allowed"));
}

bool openai_route(struct exchange *x)
{
    bool get = strcmp(x->method, "GET") == 0, post = strcmp(x->method, "POST") == 0;
    if (strcmp(x->path, "/v1/chat/completions") == 0)
        x->handle = post ? begin_chat : wrong_method;
    else if (strcmp(x->path, "/covey/generate") == 0)
        x->handle = post ? begin_generate : wrong_method;
    else if (strcmp(x->path, "/v1/models") == 0 || strncmp(x->path, "/v1/models/", 11) == 0)
        x->handle = get ? begin_models : wrong_method;
    else
        return false;
    return true;
}
