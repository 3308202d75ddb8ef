/* Tokenizers: text to token ids and back. Byte-level BPE ("gpt2" in GGUF) and SentencePiece's BPE
 * with scores ("llama"); other sources (tokenizer.json) come behind this same header.
 *
 * Immutable after construction: any number of threads may use one tokenizer at once. Everything in
 * the source is checked before it is believed. Input is bytes: where they are not UTF-8, each
 * offending byte is a piece of its own and comes back as itself when decoded. */
#ifndef COVEY_RUNTIME_TOKENIZER_H
#define COVEY_RUNTIME_TOKENIZER_H

#include "base/err.h"
#include "runtime/text_span.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct gguf;
struct tokenizer;

enum {
    TOKENIZER_VOCAB_MAX = 1 << 20,
    TOKENIZER_MERGES_MAX = 1 << 21,
    TOKENIZER_TOKEN_BYTES_MAX = 1 << 14,
    TOKENIZER_SPECIAL_BYTES_MAX = 512,   /* of a control or user-defined token */
    TOKENIZER_SCORED_BYTES_MAX = 512,    /* of any token with a score */
    TOKENIZER_VOCAB_BYTES_MAX = 1 << 28, /* all tokens together */
    TOKENIZER_WORD_MAX = 1 << 20,        /* a longer run without a split is cut here */
    TOKENIZER_END_MAX = 16,
    TOKENIZER_TEXT_MAX = 64 << 20, /* bytes of one text to encode */
};

/* Token types as GGUF numbers them. */
enum token_type {
    TOKEN_NORMAL = 1,
    TOKEN_UNKNOWN = 2,
    TOKEN_CONTROL = 3,
    TOKEN_USER_DEFINED = 4,
    TOKEN_UNUSED = 5,
    TOKEN_BYTE = 6,
};

struct text_view {
    const char *p; /* not NUL-terminated */
    size_t n;
};

/* What a tokenizer is made from, wherever it came from. Only read during tokenizer_new. */
struct tokenizer_source {
    struct text_view model;         /* "gpt2" or "llama" */
    struct text_view pre;           /* name of the splitting rule: "smollm" ... */
    const struct text_view *tokens; /* [n_tokens] */
    const int32_t *types;           /* [n_tokens] enum token_type, or NULL: all normal */
    uint32_t n_tokens;
    const struct text_view *merges; /* gpt2: [n_merges] "left right", best first */
    uint32_t n_merges;
    int64_t bos, eos, eot, eom, unknown; /* -1: none */
    int add_bos;         /* 0, 1, or -1: as the splitting rule usually does; llama: 1 */
    const float *scores; /* llama: [n_tokens], the highest is merged first */
    int space_prefix;    /* llama: a blank before text that begins, or follows a special token; 0,
                            1, or -1: 1 */
};
#define TOKENIZER_SOURCE_INIT                                                                      \
    ((struct tokenizer_source){.bos = -1,                                                          \
                               .eos = -1,                                                          \
                               .eot = -1,                                                          \
                               .eom = -1,                                                          \
                               .unknown = -1,                                                      \
                               .add_bos = -1,                                                      \
                               .space_prefix = -1})

/* ERR_CORRUPT (metadata that contradict themselves), ERR_UNSUPPORTED (a kind or splitting rule that
 * we do not have; the sentence names it), ERR_LIMIT, ERR_NO_MEMORY. */
enum err tokenizer_new(const struct tokenizer_source *source, struct tokenizer **ret,
                       struct err_text *text);
/* The same from the metadata of a GGUF file; ERR_NOT_FOUND when it has no tokenizer. */
enum err tokenizer_new_gguf(const struct gguf *gguf, struct tokenizer **ret, struct err_text *text);
void tokenizer_free(struct tokenizer *t);

/* A growing list of ids; `v` comes from malloc. */
struct token_ids {
    int32_t *v;
    size_t n, cap;
};
void token_ids_deinit(struct token_ids *ids);

struct tokenizer_options {
    bool add_bos;                  /* puts the model's BOS first, if the model wants one */
    bool parse_special;            /* text of special tokens becomes these tokens ... */
    const struct text_span *plain; /* ... unless it touches one of these runs (sorted, disjoint) */
    size_t n_plain;
    size_t tokens_max; /* 0: no limit but memory */
};

/* Appends the ids of `text` (n bytes, any bytes). User-defined tokens are found in any case, as
 * llama.cpp does; control tokens only with parse_special. O(n log n). On failure `ids` is as
 * before: ERR_LIMIT (tokens_max, or a text that the pattern cannot split within its limits),
 * ERR_INVALID (plain runs out of order or outside), ERR_NO_MEMORY. */
enum err tokenizer_encode(const struct tokenizer *t, const char *text, size_t n,
                          const struct tokenizer_options *options, struct token_ids *ids,
                          struct err_text *error);

/* The bytes that a token stands for in an answer: a view that lives as long as the tokenizer. They
 * need not be whole UTF-8 characters. Empty for control tokens. ERR_INVALID: no such id. */
enum err tokenizer_piece(const struct tokenizer *t, int32_t id, struct text_view *ret);
/* The token's readable text, control tokens included. ERR_INVALID: no such id. */
enum err tokenizer_text(const struct tokenizer *t, int32_t id, struct text_view *ret);
/* The id whose vocabulary entry is exactly this text, or -1. */
int32_t tokenizer_find(const struct tokenizer *t, const char *text, size_t n);

uint32_t tokenizer_n_tokens(const struct tokenizer *t);
enum token_type tokenizer_type(const struct tokenizer *t, int32_t id);
/* Tokens after which an answer is over (sorted): eos, eot, eom of the source, and control tokens
 * that are ends by their name. */
bool tokenizer_is_end(const struct tokenizer *t, int32_t id);
uint32_t tokenizer_end_tokens(const struct tokenizer *t, const int32_t **ret);
int32_t tokenizer_bos(const struct tokenizer *t); /* -1: none */
int32_t tokenizer_eos(const struct tokenizer *t); /* -1: none */
bool tokenizer_adds_bos(const struct tokenizer *t);

#endif
