/* Chat prompts: template, conversation and tokenizer brought together.
 *
 * Requests come in OpenAI's shape and templates expect what transformers gives them, so two things
 * are turned round first. Content: some templates take text only, some take lists of parts only;
 * which is found out once, by rendering a conversation of one word. Tool calls: arguments that are
 * JSON in a string become the object. */
#include "runtime/chat.h"

#include "base/util.h"
#include "runtime/gguf.h"

#include <stdlib.h>
#include <string.h>

enum { CHAT_PROMPT_BYTES_MAX = 16 << 20 };

/* One template and the shapes of content that it shows. */
struct variant {
    struct template *template;
    bool takes_text, takes_parts;
};

struct chat {
    struct variant usual, tools; /* tools.template may be NULL */
    const struct tokenizer *tokenizer;
    json_t *own; /* bos_token, eos_token */
};

static void json_freep(json_t **p)
{
    json_decref(*p);
}

/* jansson counts references through mutable pointers. */
static json_t *borrow(const json_t *json)
{
    return json_incref((json_t *)(uintptr_t)json);
}

/* -- construction ------------------------------------------------------------------------------ */

static enum err render(const struct template *t, const json_t *own, const json_t *user,
                       const struct tm *now, struct buf *out, struct text_spans *ret_user,
                       struct err_text *text)
{
    const struct template_limits limits = TEMPLATE_LIMITS_DEFAULT;
    const struct template_input input = {.own = own, .user = user, .now = now};
    return template_render(t, &input, &limits, out, ret_user, text);
}

/* Whether a conversation of one word shows the word, and not as the notation of a list. */
static bool shows(const struct template *t, const json_t *own, json_t *take_content)
{
    static const char WORD[] = "Quokkawort";
    _cleanup_(json_freep) json_t *user =
        json_pack("{s:[{s:s,s:o}]}", "messages", "role", "user", "content", take_content);
    struct buf out = BUF_INIT(CHAT_PROMPT_BYTES_MAX);
    struct err_text ignored;
    bool shown = false;
    if (user && render(t, own, user, NULL, &out, NULL, &ignored) == ERR_OK) {
        const char *rendered = buf_cstr(&out);
        shown = rendered && strstr(rendered, WORD) && !strstr(rendered, "'Quokkawort'") &&
                !strstr(rendered, "\"Quokkawort\"");
    }
    buf_deinit(&out);
    return shown;
}

static enum err variant_init(struct variant *v, const json_t *own, const char *source, size_t n,
                             struct err_text *text)
{
    TRY(template_new(source, n, &v->template, text));
    v->takes_text = shows(v->template, own, json_string("Quokkawort"));
    v->takes_parts =
        shows(v->template, own, json_pack("[{s:s,s:s}]", "type", "text", "text", "Quokkawort"));
    if (!v->takes_text && !v->takes_parts) /* it wants something else: leave all as it is */
        v->takes_text = v->takes_parts = true;
    return ERR_OK;
}

static enum err add_token(json_t *own, const struct tokenizer *t, const char *name, int32_t id)
{
    struct text_view s;
    if (id < 0 || tokenizer_text(t, id, &s))
        return ERR_OK;
    return json_object_set_new(own, name, json_stringn_nocheck(s.p, s.n)) ? ERR_NO_MEMORY : ERR_OK;
}

static enum err chat_init(struct chat *chat, const struct tokenizer *t)
{
    chat->tokenizer = t;
    chat->own = json_object();
    if (!chat->own)
        return ERR_NO_MEMORY;
    TRY(add_token(chat->own, t, "bos_token", tokenizer_bos(t)));
    return add_token(chat->own, t, "eos_token", tokenizer_eos(t));
}

/* `tools`: the template for requests with tools, or with p == NULL. */
static enum err chat_new_texts(struct text_view usual, struct text_view tools,
                               const struct tokenizer *tokenizer, struct chat **ret,
                               struct err_text *text)
{
    struct chat *chat = calloc(1, sizeof *chat);
    if (!chat || chat_init(chat, tokenizer)) {
        chat_free(chat);
        return err_set(text, ERR_NO_MEMORY, "chat: out of memory");
    }
    enum err e = variant_init(&chat->usual, chat->own, usual.p, usual.n, text);
    if (!e && tools.p)
        e = variant_init(&chat->tools, chat->own, tools.p, tools.n, text);
    if (e)
        chat_free(chat);
    else
        *ret = chat;
    return e;
}

enum err chat_new_source(const char *source, size_t n, const struct tokenizer *tokenizer,
                         struct chat **ret, struct err_text *text)
{
    return chat_new_texts((struct text_view){source, n}, (struct text_view){NULL, 0}, tokenizer,
                          ret, text);
}

/* Gemma's layout, for its files that have no template (base models): no role of a system, whose
 * text goes before that of the first user; texts trimmed. As llama.cpp lays it out. */
static const char GEMMA_LAYOUT[] =
    "{%- set ns = namespace(system='') -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}"
    "{%- set ns.system = ns.system + (message['content'] | trim) -%}"
    "{%- else -%}"
    "{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}"
    "{{ '<start_of_turn>' + role + '\\n' }}"
    "{%- if ns.system and role != 'model' -%}"
    "{{ ns.system + '\\n\\n' }}{%- set ns.system = '' -%}"
    "{%- endif -%}"
    "{{ (message['content'] | trim) + '<end_of_turn>\\n' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}";

/* Whether both of the layout's tokens are control tokens of the vocabulary. */
static bool knows_turns(const struct tokenizer *t)
{
    static const char *const NAMES[] = {"<start_of_turn>", "<end_of_turn>"};
    for (size_t i = 0; i < ARRAY_LEN(NAMES); i++) {
        int32_t id = tokenizer_find(t, NAMES[i], strlen(NAMES[i]));
        if (id < 0 || tokenizer_type(t, id) != TOKEN_CONTROL)
            return false;
    }
    return true;
}

enum err chat_new(const struct gguf *gguf, const struct tokenizer *tokenizer, struct chat **ret,
                  struct err_text *text)
{
    struct gguf_string usual, tools = {NULL, 0};
    enum err e = gguf_get_string(gguf, "tokenizer.chat_template", &usual);
    if (e == ERR_NOT_FOUND && knows_turns(tokenizer)) {
        usual = (struct gguf_string){GEMMA_LAYOUT, sizeof GEMMA_LAYOUT - 1};
        e = ERR_OK;
    }
    if (e == ERR_NOT_FOUND)
        return err_set(text, e, "%s: the file has no chat template", gguf_path(gguf));
    if (e)
        return err_set(text, ERR_CORRUPT, "%s: tokenizer.chat_template is not a string",
                       gguf_path(gguf));
    if (gguf_get_string(gguf, "tokenizer.chat_template.tool_use", &tools))
        tools.data = NULL;
    struct err_text inner = {""};
    e = chat_new_texts((struct text_view){usual.data, usual.n},
                       (struct text_view){tools.data, tools.n}, tokenizer, ret, &inner);
    return e ? err_set(text, e, "%s: %s", gguf_path(gguf), inner.text) : ERR_OK;
}

void chat_free(struct chat *chat)
{
    if (!chat)
        return;
    template_free(chat->usual.template);
    template_free(chat->tools.template);
    json_decref(chat->own);
    free(chat);
}

/* -- the shape of messages --------------------------------------------------------------------- */

/* The texts of a list of parts, one after the other. */
static enum err text_of_parts(const json_t *parts, json_t **ret, struct err_text *text)
{
    struct buf joined = BUF_INIT(CHAT_PROMPT_BYTES_MAX);
    enum err e = ERR_OK;
    for (size_t i = 0; i < json_array_size(parts) && !e; i++) {
        const json_t *part = json_array_get(parts, i), *s = json_object_get(part, "text");
        if (json_is_string(part))
            s = part;
        e = json_is_string(s) ? buf_append(&joined, json_string_value(s), json_string_length(s))
                              : ERR_UNSUPPORTED;
    }
    if (!e) {
        *ret = json_stringn_nocheck(joined.len ? (const char *)joined.data : "", joined.len);
        e = *ret ? ERR_OK : ERR_NO_MEMORY;
    }
    buf_deinit(&joined);
    if (e == ERR_UNSUPPORTED)
        return err_set(text, e,
                       "this model takes text only, and a message has a part without text");
    if (e == ERR_NO_MEMORY)
        return err_set(text, e, "out of memory");
    return e ? err_set(text, e, "a message is too long") : ERR_OK;
}

static enum err shape_content(const struct variant *v, json_t *message, struct err_text *text)
{
    const json_t *content = json_object_get(message, "content");
    json_t *shaped = NULL;
    if (json_is_array(content) && !v->takes_parts)
        TRY(text_of_parts(content, &shaped, text));
    else if (json_is_string(content) && !v->takes_text)
        shaped = json_pack("[{s:s,s:O}]", "type", "text", "text", content);
    else
        return ERR_OK;
    if (json_object_set_new(message, "content", shaped))
        return err_set(text, ERR_NO_MEMORY, "out of memory");
    return ERR_OK;
}

/* A copy of one tool call with its arguments as an object; NULL when out of memory. */
static json_t *shape_call(const json_t *call)
{
    json_t *copy = json_copy((json_t *)(uintptr_t)call);
    const json_t *function = json_object_get(call, "function");
    const json_t *arguments = json_object_get(function, "arguments");
    if (!copy || !json_is_string(arguments))
        return copy;
    _cleanup_(json_freep) json_t *object =
        json_loadb(json_string_value(arguments), json_string_length(arguments),
                   JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, NULL);
    if (!json_is_object(object))
        return copy;
    json_t *shaped = json_copy((json_t *)(uintptr_t)function);
    if (!shaped || json_object_set(shaped, "arguments", object) ||
        json_object_set(copy, "function", shaped)) {
        json_decref(copy);
        copy = NULL;
    }
    json_decref(shaped);
    return copy;
}

static enum err shape_calls(json_t *message, struct err_text *text)
{
    const json_t *calls = json_object_get(message, "tool_calls");
    if (!json_is_array(calls))
        return ERR_OK;
    _cleanup_(json_freep) json_t *shaped = json_array();
    bool ok = shaped != NULL;
    for (size_t i = 0; i < json_array_size(calls) && ok; i++)
        ok = json_array_append_new(shaped, shape_call(json_array_get(calls, i))) == 0;
    if (!ok || json_object_set(message, "tool_calls", shaped))
        return err_set(text, ERR_NO_MEMORY, "out of memory");
    return ERR_OK;
}

/* A copy of the conversation as the template expects it. */
static enum err shape_messages(const struct variant *v, const json_t *messages, json_t **ret,
                               struct err_text *text)
{
    if (!json_is_array(messages) || json_array_size(messages) == 0)
        return err_set(text, ERR_INVALID, "messages must be a list with at least one message");
    _cleanup_(json_freep) json_t *shaped = json_array();
    for (size_t i = 0; i < json_array_size(messages); i++) {
        const json_t *message = json_array_get(messages, i);
        if (!json_is_object(message) || !json_is_string(json_object_get(message, "role")))
            return err_set(text, ERR_INVALID, "message %zu has no role", i);
        json_t *copy = json_copy((json_t *)(uintptr_t)message);
        if (json_array_append_new(shaped, copy))
            return err_set(text, ERR_NO_MEMORY, "out of memory");
        TRY(shape_content(v, copy, text));
        TRY(shape_calls(copy, text));
    }
    *ret = TAKE(shaped);
    return ERR_OK;
}

/* -- requests ---------------------------------------------------------------------------------- */

static enum err render_request(const struct chat *chat, const struct chat_request *request,
                               struct buf *out, struct text_spans *ret_user, struct err_text *text)
{
    bool has_tools = json_array_size(request->tools) > 0;
    const struct variant *v = has_tools && chat->tools.template ? &chat->tools : &chat->usual;
    _cleanup_(json_freep) json_t *messages = NULL;
    TRY(shape_messages(v, request->messages, &messages, text));
    _cleanup_(json_freep) json_t *user =
        request->variables ? json_copy((json_t *)(uintptr_t)request->variables) : json_object();
    _cleanup_(json_freep) json_t *own = json_copy(chat->own);
    if (!json_is_object(user) ||
        json_object_set_new(user, "tools", has_tools ? borrow(request->tools) : json_null()) ||
        json_object_set(user, "messages", messages) ||
        json_object_set_new(own, "add_generation_prompt",
                            json_boolean(request->add_generation_prompt)))
        return err_set(text, ERR_NO_MEMORY, "out of memory");
    (void)json_object_del(user, "add_generation_prompt");
    return render(v->template, own, user, request->now, out, ret_user, text);
}

enum err chat_render_text(const struct chat *chat, const struct chat_request *request,
                          struct buf *out, struct text_spans *ret_user, struct err_text *text)
{
    return render_request(chat, request, out, ret_user, text);
}

/* Whether the template itself wrote the model's BOS first. */
static bool starts_with_bos(const struct tokenizer *t, const struct buf *rendered,
                            const struct text_spans *user)
{
    struct text_view bos;
    if (tokenizer_bos(t) < 0 || tokenizer_text(t, tokenizer_bos(t), &bos) || !bos.n)
        return false;
    return rendered->len >= bos.n && memcmp(rendered->data, bos.p, bos.n) == 0 &&
           (user->n == 0 || user->v[0].begin >= bos.n);
}

enum err chat_prompt(const struct chat *chat, const struct chat_request *request, size_t tokens_max,
                     struct token_ids *ids, struct err_text *text)
{
    struct buf rendered = BUF_INIT(CHAT_PROMPT_BYTES_MAX);
    struct text_spans user = {0};
    enum err e = render_request(chat, request, &rendered, &user, text);
    if (!e) {
        const struct tokenizer_options options = {
            .add_bos = !starts_with_bos(chat->tokenizer, &rendered, &user),
            .parse_special = true,
            .plain = user.v,
            .n_plain = user.n,
            .tokens_max = tokens_max,
        };
        e = tokenizer_encode(chat->tokenizer, rendered.len ? (const char *)rendered.data : "",
                             rendered.len, &options, ids, text);
    }
    text_spans_deinit(&user);
    buf_deinit(&rendered);
    return e;
}
