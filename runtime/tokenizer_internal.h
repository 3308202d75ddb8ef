/* Inside of the tokenizer: private to runtime/tokenizer*.c. */
#ifndef COVEY_RUNTIME_TOKENIZER_INTERNAL_H
#define COVEY_RUNTIME_TOKENIZER_INTERNAL_H

#define PCRE2_CODE_UNIT_WIDTH 8

#include "runtime/tokenizer.h"

#include <pcre2.h>

/* -- strings ----------------------------------------------------------------------------------- */

struct slice {
    uint32_t offset, n;
};

/* Numbered byte strings with their bytes in one block, and a hash index over those that were
 * indexed. */
struct strings {
    char *bytes;
    size_t n_bytes, bytes_cap;
    struct slice *v;
    uint32_t n, cap;
    uint32_t *slots; /* number + 1, open addressing */
    size_t n_slots;
    uint32_t n_indexed;
};

void strings_deinit(struct strings *s);
struct text_view strings_at(const struct strings *s, uint32_t i);
/* Appends without indexing; its number is the old s->n. ERR_LIMIT, ERR_NO_MEMORY. */
enum err strings_add(struct strings *s, const char *p, size_t n);
#define STRINGS_NONE UINT32_MAX
/* Makes string i the one that is found; it replaces an equal one. ERR_CORRUPT when the strings were
 * made to collide. */
enum err strings_index(struct strings *s, uint32_t i);
uint32_t strings_find(const struct strings *s, const char *p, size_t n);

/* -- merges ------------------------------------------------------------------------------------ */

/* A symbol is a run of bytes that a merge may produce: token ids first, then runs that are no
 * tokens. */
struct merge {
    uint32_t left, right; /* symbols; left == UINT32_MAX: a free slot */
    uint32_t rank, result;
};

struct merges {
    struct merge *slots;
    size_t n_slots; /* a power of two */
};

enum err merges_init(struct merges *m, uint32_t n);
void merges_deinit(struct merges *m);
/* The first of two equal pairs counts. */
enum err merges_put(struct merges *m, const struct merge *merge);
const struct merge *merges_find(const struct merges *m, uint32_t left, uint32_t right);

struct bpe_symbol {
    uint32_t id;
    int32_t prev, next;
};
struct bpe_candidate {
    uint32_t rank, at; /* smallest first */
    uint32_t left, right;
};
/* Working memory of one call, reused from word to word. */
struct bpe_work {
    struct bpe_symbol *symbols;
    size_t symbols_cap;
    struct bpe_candidate *heap;
    size_t n_heap, heap_cap;
};
void bpe_work_deinit(struct bpe_work *w);
/* Room for n symbols. */
enum err bpe_reserve(struct bpe_work *w, size_t n);
/* Candidates by rank, then by place. */
enum err bpe_push(struct bpe_work *w, const struct bpe_candidate *c);
struct bpe_candidate bpe_pop(struct bpe_work *w);
enum { BPE_GONE = -2 }; /* `next` of a symbol that was merged into the one before it */
/* Leaves the word's final symbols as a list in w->symbols, starting at 0. O(n log n). */
enum err bpe_merge(const struct merges *m, const uint32_t byte_symbols[256], const uint8_t *word,
                   size_t n, struct bpe_work *w);

/* -- splitting --------------------------------------------------------------------------------- */

enum { SPLIT_PATTERNS_MAX = 4 };

struct split_rule {
    const char *names;                        /* as in tokenizer.ggml.pre, separated by blanks */
    const char *patterns[SPLIT_PATTERNS_MAX]; /* each splits what the one before left */
    bool whole_words;                         /* a word that is a token is taken without merging */
    bool add_bos;                             /* when the metadata does not say */
};
/* NULL when there is no such rule. */
const struct split_rule *split_rule_find(struct text_view name);

struct splitter {
    const struct split_rule *rule;
    pcre2_code *codes[SPLIT_PATTERNS_MAX];
    uint32_t n_codes;
    pcre2_match_context *context;
};
enum err splitter_init(struct splitter *s, const struct split_rule *rule, struct err_text *text);
void splitter_deinit(struct splitter *s);
/* Called for each word in order. */
typedef enum err split_fn(void *context, const char *word, size_t n);
/* `text` must be UTF-8. ERR_LIMIT when a pattern needs too long. */
enum err splitter_run(const struct splitter *s, pcre2_match_data *match, const char *text, size_t n,
                      split_fn *fn, void *context);

/* -- SentencePiece ----------------------------------------------------------------------------- */

struct tokenizer;
/* The blank of its vocabulary: U+2581. */
#define SPM_BLANK "\xe2\x96\x81"
enum { SPM_BLANK_BYTES = 3 };
/* What a token's text stands for: blanks for U+2581. `ret` has room for n bytes. */
void spm_bytes(const char *p, size_t n, char *ret, size_t *ret_n);
/* The byte that "<0xNN>" names, or -1. */
int spm_byte_of(struct text_view token);
/* A score as a rank: the lower the better, equal for equal scores. */
uint32_t spm_rank(float score);
/* Leaves the final symbols of a text (blanks written as U+2581) in w->symbols: symbol i begins at
 * byte i and `id` is its length in bytes. O(n log n). */
enum err spm_merge(const struct tokenizer *t, const char *text, size_t n, struct bpe_work *w);
/* The token with exactly this text that plain text may become, or STRINGS_NONE. */
uint32_t spm_token(const struct tokenizer *t, const char *p, size_t n);

/* -- the tokenizer ----------------------------------------------------------------------------- */

struct tokenizer {
    uint32_t n_tokens;
    uint8_t *types;       /* [n_tokens] enum token_type */
    struct strings text;  /* as the vocabulary writes them */
    struct strings bytes; /* what tokens stand for; gpt2: then symbols that are no tokens */
    struct merges merges;
    struct splitter splitter; /* gpt2 */
    uint32_t *ranks;          /* llama: [n_tokens]; else NULL */
    bool space_prefix;        /* llama */
    uint32_t byte_symbols[256];
    uint32_t *special; /* [n_special] tokens found in text before it is split, sorted by bytes */
    uint32_t n_special;
    uint32_t special_from[257]; /* where those of each first byte begin in `special` */
    int32_t bos, eos, unknown;
    bool adds_bos;
    int32_t ends[TOKENIZER_END_MAX];
    uint32_t n_ends;
};

/* The bytes that a text in GPT-2's alphabet stands for (at most n of them); false when it holds a
 * character outside of that alphabet. */
bool bytes_of_alphabet(const char *p, size_t n, char *ret, size_t *ret_n);

#endif
