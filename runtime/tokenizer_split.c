/* Splitting of text into words before byte-pair encoding: one row for each rule, by the names that
 * GGUF files use.
 *
 * The patterns are those of the models' own tokenizer.json files (GPT-2, Llama 3, Qwen 2, GPT-4o,
 * Tekken); where there are several, each splits the pieces that the one before left, and what no
 * pattern matches is a piece of its own. Matching has limits: a text that exceeds them is refused.
 * PCRE2 with UTF and UCP, so that \s, \p{L} and \p{N} are Unicode's. */
#include "runtime/tokenizer_internal.h"

#include "base/util.h"

#include <string.h>

#define GPT2 "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
#define CONTRACTIONS "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
#define LINE_ENDS "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define LLAMA3                                                                                     \
    CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}"                                      \
                 "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|" LINE_ENDS
#define QWEN2                                                                                      \
    CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}"                                           \
                 "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|" LINE_ENDS
#define UPPER "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define LOWER "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define GPT4O                                                                                      \
    "[^\\r\\n\\p{L}\\p{N}]?" UPPER "*" LOWER "+" CONTRACTIONS "?"                                  \
    "|[^\\r\\n\\p{L}\\p{N}]?" UPPER "+" LOWER "*" CONTRACTIONS "?"                                 \
    "|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|" LINE_ENDS
#define TEKKEN                                                                                     \
    "[^\\r\\n\\p{L}\\p{N}]?" UPPER "*" LOWER "+"                                                   \
    "|[^\\r\\n\\p{L}\\p{N}]?" UPPER "+" LOWER "*"                                                  \
    "|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|" LINE_ENDS

static const struct split_rule RULES[] = {
    {"smollm starcoder refact command-r codeshell exaone minerva-7b",
     {"\\p{N}", GPT2},
     false,
     false},
    {"default", {"[\\p{P}\\$\\+<=>\\^~\\|]+", GPT2, "\\p{N}+", "[0-9][0-9][0-9]"}, false, false},
    {"gpt-2 gpt2 phi-2 mpt olmo jais roberta-bpe", {GPT2}, false, false},
    {"qwen2 stablelm2 deepseek-r1-qwen megrez hunyuan", {QWEN2}, false, false},
    {"llama-bpe llama3 llama-v3 dbrx smaug-bpe falcon3 pixtral chatglm-bpe", {LLAMA3}, true, true},
    {"gpt-4o llama4 kanana2", {GPT4O}, false, false},
    {"tekken", {TEKKEN}, true, true},
    {"falcon", {"[\\p{P}\\$\\+<=>\\^~\\|`]+", GPT2, "[0-9][0-9][0-9]"}, false, false},
    {"bloom poro-chat gpt3-finnish", {" ?[^(\\s|.,!?…。，、।۔،)]+"}, false, false},
};

const struct split_rule *split_rule_find(struct text_view name)
{
    for (size_t i = 0; i < ARRAY_LEN(RULES) && name.n; i++)
        for (const char *p = RULES[i].names; *p;) {
            size_t n = strcspn(p, " ");
            if (n == name.n && memcmp(p, name.p, n) == 0)
                return &RULES[i];
            p += n;
            p += strspn(p, " ");
        }
    return NULL;
}

/* For one match: the interpreter's steps (a run of a million blanks takes about as many), and KiB
 * of its heap. */
enum { MATCH_STEPS_MAX = 20 * 1000 * 1000, MATCH_HEAP_KIB_MAX = 64 * 1024 };

enum err splitter_init(struct splitter *s, const struct split_rule *rule, struct err_text *text)
{
    s->rule = rule;
    s->context = pcre2_match_context_create(NULL);
    if (!s->context)
        return err_set(text, ERR_NO_MEMORY, "tokenizer: out of memory");
    (void)pcre2_set_match_limit(s->context, MATCH_STEPS_MAX);
    (void)pcre2_set_heap_limit(s->context, MATCH_HEAP_KIB_MAX);
    for (; s->n_codes < SPLIT_PATTERNS_MAX && rule->patterns[s->n_codes]; s->n_codes++) {
        int error;
        PCRE2_SIZE at;
        pcre2_code *code =
            pcre2_compile((PCRE2_SPTR)rule->patterns[s->n_codes], PCRE2_ZERO_TERMINATED,
                          PCRE2_UTF | PCRE2_UCP, &error, &at, NULL);
        if (!code)
            return err_set(text, ERR_UNSUPPORTED,
                           "tokenizer: this PCRE2 does not take the pattern of '%s' (error %d)",
                           rule->names, error);
        (void)pcre2_jit_compile(code, PCRE2_JIT_COMPLETE); /* else it is interpreted */
        s->codes[s->n_codes] = code;
    }
    return ERR_OK;
}

void splitter_deinit(struct splitter *s)
{
    for (uint32_t i = 0; i < s->n_codes; i++)
        pcre2_code_free(s->codes[i]);
    pcre2_match_context_free(s->context);
    *s = (struct splitter){0};
}

struct split_call {
    const struct splitter *s;
    pcre2_match_data *match;
    split_fn *fn;
    void *context;
};

static int match_at(const struct split_call *c, uint32_t level, const char *text, size_t n,
                    size_t at)
{
    const pcre2_code *code = c->s->codes[level];
    int found =
        pcre2_match(code, (PCRE2_SPTR)text, n, at, PCRE2_NO_UTF_CHECK, c->match, c->s->context);
    if (found == PCRE2_ERROR_JIT_STACKLIMIT) /* the interpreter keeps its stack on the heap */
        found = pcre2_match(code, (PCRE2_SPTR)text, n, at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT,
                            c->match, c->s->context);
    return found;
}

/* Splits at one level and hands the pieces to the next one; depth is at most SPLIT_PATTERNS_MAX. */
static enum err split_level(const struct split_call *c, uint32_t level, const char *text, size_t n)
{
    if (n == 0)
        return ERR_OK;
    if (level == c->s->n_codes)
        return c->fn(c->context, text, n);
    size_t at = 0;
    while (at < n) {
        int found = match_at(c, level, text, n, at);
        if (found == PCRE2_ERROR_NOMATCH)
            break;
        if (found < 0)
            return found == PCRE2_ERROR_NOMEMORY ? ERR_NO_MEMORY : ERR_LIMIT;
        const PCRE2_SIZE *ends = pcre2_get_ovector_pointer(c->match);
        size_t from = ends[0], to = ends[1];
        if (to <= from)
            break; /* no pattern of ours matches nothing */
        TRY(split_level(c, level + 1, text + at, from - at));
        TRY(split_level(c, level + 1, text + from, to - from));
        at = to;
    }
    return split_level(c, level + 1, text + at, n - at);
}

enum err splitter_run(const struct splitter *s, pcre2_match_data *match, const char *text, size_t n,
                      split_fn *fn, void *context)
{
    const struct split_call c = {s, match, fn, context};
    return split_level(&c, 0, text, n);
}
