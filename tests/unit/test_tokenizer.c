/* Tokenizers against other engines: tests/reference/<model>.json (llama.cpp's ids for three
 * models, see its README) and split_cases.json (make_split_cases.py, the package tokenizers).
 * Further: a small vocabulary of our own for special tokens, broken input, hostile words and
 * metadata. */
#include "model_files.h"
#include "runtime/gguf.h"
#include "runtime/tokenizer_internal.h"

#include "base/rng.h"
#include "base/util.h"

#include <jansson.h>
#include <math.h>
#include <pthread.h>

static json_t *load(const char *file)
{
    const char *root = getenv("COVEY_SOURCE");
    char path[4096];
    (void)snprintf(path, sizeof path, "%s/tests/reference/%s", root ? root : ".", file);
    json_error_t error;
    json_t *json = json_load_file(path, JSON_ALLOW_NUL, &error);
    if (!json)
        fail_msg("%s: %s", path, error.text);
    return json;
}

/* -- against other engines --------------------------------------------------------------------- */

struct words {
    const json_t *expected;
    size_t n;
    bool same;
};

static enum err compare_word(void *context, const char *word, size_t n)
{
    struct words *w = context;
    const json_t *e = json_array_get(w->expected, w->n++);
    w->same &= e && json_string_length(e) == n && memcmp(json_string_value(e), word, n) == 0;
    return ERR_OK;
}

static void test_tokenizer_splits_as_tokenizers_does(void **state)
{
    (void)state;
    json_t *all = load("split_cases.json"), *c;
    size_t i, n_wrong = 0;
    assert_true(json_array_size(json_object_get(all, "cases")) > 800);
    json_array_foreach(json_object_get(all, "cases"), i, c)
    {
        const json_t *name = json_object_get(c, "rule"), *text = json_object_get(c, "text");
        const struct split_rule *rule =
            split_rule_find((struct text_view){json_string_value(name), json_string_length(name)});
        assert_non_null(rule);
        struct splitter s = {0};
        struct err_text error = {""};
        assert_int_equal(splitter_init(&s, rule, &error), ERR_OK);
        pcre2_match_data *match = pcre2_match_data_create(1, NULL);
        struct words w = {json_object_get(c, "words"), 0, true};
        assert_int_equal(splitter_run(&s, match, json_string_value(text), json_string_length(text),
                                      compare_word, &w),
                         ERR_OK);
        if (!w.same || w.n != json_array_size(w.expected)) {
            n_wrong++;
            print_error("rule %s, text '%s'\n", json_string_value(name), json_string_value(text));
        }
        pcre2_match_data_free(match);
        splitter_deinit(&s);
    }
    json_decref(all);
    assert_int_equal(n_wrong, 0);
}

/* Where llama.cpp takes "</s>" for a control token by its name, and the file says something else
 * (README of the reference): these of its ids are ours instead. */
struct departure {
    bool parse_special;
    int32_t theirs[3], ours[3];
};
struct real_file {
    const char *file, *reference;
    struct departure departure;
};
static const struct real_file
    SMOLLM2 = {"smollm2-135m.gguf", "smollm2-135m-q4_1.json", {false, {0}, {0}}},
    /* a user-defined token, so it is found in any text: " </" "s" ">," is " " "</s>" "," */
    GEMMA3 = {"gemma3-270m.gguf",
              "gemma3-270m-q4_k_m.json",
              {false, {1454, 236751, 11295}, {236743, 212, 236764}}},
    /* a normal token, so it is text always */
    QWEN2 = {"qwen2.5-coder-0.5b.gguf",
             "qwen2.5-coder-0.5b-q4_k_m.json",
             {true, {220, 128247, 11}, {690, 82, 8066}}};

static struct tokenizer *open_file(const struct real_file *file)
{
    char path[4096];
    need_model_file(file->file, path);
    struct gguf *g;
    struct tokenizer *t = NULL;
    struct err_text error = {""};
    if (gguf_open(path, &g, &error) || tokenizer_new_gguf(g, &t, &error))
        fail_msg("%s", error.text);
    gguf_free(g);
    return t;
}

/* `departure` may be NULL. */
static bool ids_equal(const struct token_ids *ids, const json_t *expected,
                      const struct departure *departure)
{
    bool same = ids->n == json_array_size(expected);
    for (size_t i = 0; same && i < ids->n; i++) {
        bool departs = departure && i + 3 <= ids->n;
        for (size_t k = 0; departs && k < 3; k++)
            departs = json_integer_value(json_array_get(expected, i + k)) == departure->theirs[k] &&
                      ids->v[i + k] == departure->ours[k];
        if (departs)
            i += 2;
        else
            same = ids->v[i] == json_integer_value(json_array_get(expected, i));
    }
    return same;
}

static bool encodes(const struct tokenizer *t, const json_t *text, const json_t *expected,
                    const struct tokenizer_options *o, const struct departure *departure)
{
    struct token_ids ids = {0};
    struct err_text error = {""};
    enum err e =
        tokenizer_encode(t, json_string_value(text), json_string_length(text), o, &ids, &error);
    bool departs = departure && strstr(json_string_value(text), "</s>") &&
                   departure->parse_special == o->parse_special;
    bool same = !e && ids_equal(&ids, expected, departs ? departure : NULL);
    if (!same)
        print_error("'%.200s': %s\n", json_string_value(text), e ? error.text : "other ids");
    token_ids_deinit(&ids);
    return same;
}

/* An end for llama.cpp by its name alone, or by our types too (README of the reference). */
static void check_ends(const struct tokenizer *t, const json_t *expected)
{
    const int32_t *ends;
    uint32_t n = tokenizer_end_tokens(t, &ends), n_found = 0;
    size_t i;
    json_t *id;
    json_array_foreach(expected, i, id)
    {
        bool found = tokenizer_is_end(t, (int32_t)json_integer_value(id));
        n_found += found;
        if (!found) {
            struct text_view s;
            assert_int_equal(tokenizer_text(t, (int32_t)json_integer_value(id), &s), ERR_OK);
            static const char *const BY_NAME[] = {"</s>", "<reponame>", "<|fim_pad|>",
                                                  "<|repo_name|>", "<|file_sep|>"};
            bool known = false;
            for (size_t k = 0; k < ARRAY_LEN(BY_NAME); k++)
                known |= s.n == strlen(BY_NAME[k]) && memcmp(s.p, BY_NAME[k], s.n) == 0;
            assert_true(known);
        }
    }
    assert_int_equal(n_found, n);
    assert_true(n >= 2);
}

static void test_tokenizer_gives_the_ids_of_llama_cpp(void **state)
{
    const struct real_file *file = *state;
    struct tokenizer *t = open_file(file);
    json_t *all = load(file->reference), *c;
    static const char *const LISTS[] = {"tokenize_only", "prompts"};
    size_t i, n_wrong = 0, n = 0;
    for (size_t list = 0; list < ARRAY_LEN(LISTS); list++)
        json_array_foreach(json_object_get(all, LISTS[list]), i, c)
        {
            const json_t *text = json_object_get(c, "text"), *ids = json_object_get(c, "ids");
            const json_t *special = json_object_get(c, "ids_parse_special");
            const struct tokenizer_options plain = {.add_bos = list > 0},
                                           parsed = {.add_bos = list > 0, .parse_special = true};
            n_wrong += !encodes(t, text, ids, &plain, &file->departure);
            n_wrong += !encodes(t, text, special ? special : ids, &parsed, &file->departure);
            n++;
            const json_t *chat = json_object_get(c, "chat");
            if (chat)
                n_wrong += !encodes(t, json_object_get(chat, "rendered"),
                                    json_object_get(chat, "ids"), &parsed, NULL);
        }
    assert_true(n > 50);
    assert_int_equal(n_wrong, 0);
    const json_t *model = json_object_get(all, "model");
    assert_int_equal(tokenizer_n_tokens(t), json_integer_value(json_object_get(model, "n_vocab")));
    assert_int_equal(tokenizer_bos(t), json_integer_value(json_object_get(model, "bos")));
    assert_int_equal(tokenizer_eos(t), json_integer_value(json_object_get(model, "eos")));
    assert_int_equal(tokenizer_adds_bos(t), json_is_true(json_object_get(model, "add_bos")));
    check_ends(t, json_object_get(model, "end_tokens"));
    json_decref(all);
    tokenizer_free(t);
}

static void append_pieces(const struct tokenizer *t, const int32_t *ids, size_t n, char *out,
                          size_t *n_out, size_t room)
{
    *n_out = 0;
    for (size_t i = 0; i < n; i++) {
        struct text_view piece;
        assert_int_equal(tokenizer_piece(t, ids[i], &piece), ERR_OK);
        assert_true(*n_out + piece.n <= room);
        if (piece.n)
            memcpy(out + *n_out, piece.p, piece.n);
        *n_out += piece.n;
    }
}

static void test_tokenizer_pieces_give_the_text_back(void **state)
{
    const struct real_file *file = *state;
    struct tokenizer *t = open_file(file);
    json_t *all = load(file->reference), *c;
    size_t i, n_out;
    static char out[1 << 16];
    json_array_foreach(json_object_get(all, "tokenize_only"), i, c)
    {
        const json_t *text = json_object_get(c, "text");
        struct token_ids ids = {0};
        const struct tokenizer_options o = {0};
        assert_int_equal(
            tokenizer_encode(t, json_string_value(text), json_string_length(text), &o, &ids, NULL),
            ERR_OK);
        append_pieces(t, ids.v, ids.n, out, &n_out, sizeof out);
        assert_int_equal(n_out, json_string_length(text));
        assert_memory_equal(out, json_string_value(text), n_out);
        token_ids_deinit(&ids);
    }
    json_decref(all);
    tokenizer_free(t);
}

/* -- a small vocabulary of our own ------------------------------------------------------------- */

enum { SMALL_MAX = 400, SMALL_BYTES = 256 };

struct small {
    struct text_view tokens[SMALL_MAX], merges[SMALL_MAX];
    int32_t types[SMALL_MAX];
    char letters[SMALL_BYTES][3];
    struct tokenizer_source source;
};

static void small_add(struct small *s, const char *token, int32_t type)
{
    s->types[s->source.n_tokens] = type;
    s->tokens[s->source.n_tokens++] = (struct text_view){token, strlen(token)};
}

static void small_merge(struct small *s, const char *pair)
{
    s->merges[s->source.n_merges++] = (struct text_view){pair, strlen(pair)};
}

/* Token b is byte b, in GPT-2's alphabet. */
static void small_init(struct small *s)
{
    memset(s, 0, sizeof *s);
    s->source = TOKENIZER_SOURCE_INIT;
    s->source.model = (struct text_view){"gpt2", 4};
    s->source.pre = (struct text_view){"gpt-2", 5};
    s->source.tokens = s->tokens;
    s->source.types = s->types;
    s->source.merges = s->merges;
    int next = 0x100;
    for (int b = 0; b < 256; b++) {
        bool own = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        int c = own ? b : next++;
        if (c < 128)
            s->letters[b][0] = (char)c;
        else {
            s->letters[b][0] = (char)(0xc0 | c >> 6);
            s->letters[b][1] = (char)(0x80 | (c & 63));
        }
        small_add(s, s->letters[b], TOKEN_NORMAL);
    }
}

static struct tokenizer *small_new(const struct small *s)
{
    struct tokenizer *t;
    struct err_text error = {""};
    if (tokenizer_new(&s->source, &t, &error))
        fail_msg("%s", error.text);
    return t;
}

static void expect_ids(const struct tokenizer *t, const char *text, size_t n,
                       const struct tokenizer_options *o, const int32_t *expected,
                       size_t n_expected)
{
    struct token_ids ids = {0};
    struct err_text error = {""};
    enum err e = tokenizer_encode(t, text, n, o, &ids, &error);
    if (e)
        fail_msg("%s: %s", text, error.text);
    assert_int_equal(ids.n, n_expected);
    for (size_t i = 0; i < n_expected; i++)
        assert_int_equal(ids.v[i], expected[i]);
    token_ids_deinit(&ids);
}

#define EXPECT_IDS(t, text, o, ...)                                                                \
    do {                                                                                           \
        const int32_t expected_[] = {__VA_ARGS__};                                                 \
        expect_ids((t), (text), sizeof(text) - 1, (o), expected_, ARRAY_LEN(expected_));           \
    } while (0)

static void test_tokenizer_merges_by_rank(void **state)
{
    (void)state;
    struct small s;
    small_init(&s);
    small_add(&s, "ab", TOKEN_NORMAL);   /* 256 */
    small_add(&s, "bc", TOKEN_NORMAL);   /* 257 */
    small_add(&s, "abbc", TOKEN_NORMAL); /* 258 */
    small_merge(&s, "b c");
    small_merge(&s, "a b");
    small_merge(&s, "ab bc");
    small_merge(&s, "x y"); /* makes a run that is no token */
    struct tokenizer *t = small_new(&s);
    const struct tokenizer_options o = {0};
    EXPECT_IDS(t, "abc", &o, 'a', 257);
    EXPECT_IDS(t, "abbc", &o, 258);
    EXPECT_IDS(t, "ababcabb", &o, 256, 'a', 257, 256, 'b');
    EXPECT_IDS(t, "xyab", &o, 'x', 'y', 256);
    EXPECT_IDS(t,
               "a\xff"
               "b\xc3",
               &o, 'a', 0xff, 'b', 0xc3);
    EXPECT_IDS(t, "\xed\xa0\x80\xf4\x90\x80\x80", &o, 0xed, 0xa0, 0x80, 0xf4, 0x90, 0x80, 0x80);
    EXPECT_IDS(t, "a\0b", &o, 'a', 0, 'b');
    expect_ids(t, "", 0, &o, NULL, 0);
    tokenizer_free(t);
}

static void test_tokenizer_keeps_plain_runs_plain(void **state)
{
    (void)state;
    struct small s;
    small_init(&s);
    small_add(&s, "<e>", TOKEN_CONTROL);      /* 256 */
    small_add(&s, "<e><e>", TOKEN_CONTROL);   /* 257 */
    small_add(&s, "<t>", TOKEN_USER_DEFINED); /* 258 */
    small_add(&s, "<u>", TOKEN_UNKNOWN);      /* 259 */
    s.source.eos = 256;
    s.source.bos = 257;
    s.source.add_bos = 1;
    struct tokenizer *t = small_new(&s);
    const struct tokenizer_options plain = {0};
    EXPECT_IDS(t, "a<e>", &plain, 'a', '<', 'e', '>');
    EXPECT_IDS(t, "a<t><u>", &plain, 'a', 258, '<', 'u', '>');
    const struct tokenizer_options parse = {.parse_special = true, .add_bos = true};
    EXPECT_IDS(t, "a<e><t><u>", &parse, 257, 'a', 256, 258, 259);
    EXPECT_IDS(t, "<e><e><e>", &parse, 257, 257, 256);
    const struct text_span user[] = {{4, 7}};
    const struct tokenizer_options mixed = {
        .parse_special = true, .plain = user, .n_plain = ARRAY_LEN(user)};
    EXPECT_IDS(t, "a<e><e>b", &mixed, 'a', 256, '<', 'e', '>', 'b');
    EXPECT_IDS(t, "    <t>1", &mixed, ' ', ' ', ' ', ' ', 258, '1');
    const struct text_span half[] = {{2, 3}};
    const struct tokenizer_options inside = {.parse_special = true, .plain = half, .n_plain = 1};
    EXPECT_IDS(t, "<e><e>", &inside, '<', 'e', '>', 256);
    const struct text_span bad[][2] = {{{2, 1}, {3, 4}}, {{0, 2}, {1, 3}}, {{0, 1}, {2, 99}}};
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        struct token_ids ids = {0};
        const struct tokenizer_options o = {.plain = bad[i], .n_plain = 2};
        assert_int_equal(tokenizer_encode(t, "abcdef", 6, &o, &ids, NULL), ERR_INVALID);
    }
    struct text_view piece;
    assert_int_equal(tokenizer_piece(t, 256, &piece), ERR_OK);
    assert_int_equal(piece.n, 0);
    assert_int_equal(tokenizer_piece(t, 258, &piece), ERR_OK);
    assert_int_equal(piece.n, 3);
    assert_int_equal(tokenizer_text(t, 256, &piece), ERR_OK);
    assert_memory_equal(piece.p, "<e>", 3);
    assert_int_equal(tokenizer_piece(t, -1, &piece), ERR_INVALID);
    assert_int_equal(tokenizer_piece(t, 260, &piece), ERR_INVALID);
    assert_int_equal(tokenizer_text(t, INT32_MAX, &piece), ERR_INVALID);
    assert_int_equal(tokenizer_find(t, "<e><e>", 6), 257);
    assert_int_equal(tokenizer_find(t, "<e", 2), -1);
    assert_true(tokenizer_is_end(t, 256));
    assert_false(tokenizer_is_end(t, 257));
    tokenizer_free(t);
}

static void test_tokenizer_limit_leaves_ids_as_they_were(void **state)
{
    (void)state;
    struct small s;
    small_init(&s);
    struct tokenizer *t = small_new(&s);
    struct token_ids ids = {0};
    struct err_text error = {""};
    const struct tokenizer_options o = {.tokens_max = 3};
    assert_int_equal(tokenizer_encode(t, "abc", 3, &o, &ids, &error), ERR_OK);
    assert_int_equal(tokenizer_encode(t, "abcd", 4, &o, &ids, &error), ERR_LIMIT);
    assert_int_equal(ids.n, 3);
    assert_int_equal(tokenizer_encode(t, "def", 3, &o, &ids, &error), ERR_OK);
    assert_int_equal(ids.n, 6);
    token_ids_deinit(&ids);
    tokenizer_free(t);
}

/* A megabyte without a split: a method that takes quadratic time would need hours here. */
static void test_tokenizer_takes_huge_words(void **state)
{
    (void)state;
    struct small s;
    small_init(&s);
    small_add(&s, "aa", TOKEN_NORMAL);
    small_add(&s, "aaaa", TOKEN_NORMAL);
    small_add(&s, "aaaaaaaa", TOKEN_NORMAL); /* 258 */
    small_merge(&s, "a a");
    small_merge(&s, "aa aa");
    small_merge(&s, "aaaa aaaa");
    static const char *const RULES[] = {"gpt-2",  "qwen2",  "llama-bpe",
                                        "gpt-4o", "tekken", "smollm"};
    static const char FILLERS[] = "a\n \t.9";
    enum { HUGE = 1 << 20, LARGE = 1 << 17 };
    char *text = malloc(HUGE + 1);
    assert_non_null(text);
    for (size_t r = 0; r < ARRAY_LEN(RULES); r++) {
        s.source.pre = (struct text_view){RULES[r], strlen(RULES[r])};
        struct tokenizer *t = small_new(&s);
        for (size_t f = 0; f < sizeof FILLERS - 1; f++) {
            size_t n = r == 0 && f == 0 ? HUGE : LARGE;
            memset(text, FILLERS[f], n);
            text[n] = 'x';
            struct token_ids ids = {0};
            const struct tokenizer_options o = {0};
            struct err_text error = {""};
            if (tokenizer_encode(t, text, n + 1, &o, &ids, &error))
                fail_msg("%s: %s", RULES[r], error.text);
            if (FILLERS[f] == 'a') {
                assert_in_range(ids.n, n / 8, n / 8 + 2);
                assert_int_equal(ids.v[0], 258);
            } else {
                assert_int_equal(ids.n, n + 1);
            }
            token_ids_deinit(&ids);
        }
        tokenizer_free(t);
    }
    free(text);
}

enum { PART_MAX = 64 };
struct part {
    char text[PART_MAX];
    size_t n;
};

/* Whether merge m is of exactly these two parts. */
static bool is_pair(const struct small *s, uint32_t m, const struct part *a, const struct part *b)
{
    const struct text_view *v = &s->merges[m];
    return v->n == a->n + b->n + 1 && memcmp(v->p, a->text, a->n) == 0 && v->p[a->n] == ' ' &&
           memcmp(v->p + a->n + 1, b->text, b->n) == 0;
}

/* The definition, word by word: merge the best pair, leftmost first, until none is left. */
static size_t merge_slowly(const struct small *s, const char *word, size_t n, int32_t *ids)
{
    struct part parts[PART_MAX];
    for (size_t i = 0; i < n; i++)
        parts[i] = (struct part){.text = {word[i]}, .n = 1};
    for (;;) {
        size_t best = 0;
        uint32_t best_rank = UINT32_MAX;
        for (size_t i = 0; i + 1 < n; i++)
            for (uint32_t m = 0; m < s->source.n_merges && m < best_rank; m++)
                if (is_pair(s, m, &parts[i], &parts[i + 1])) {
                    best = i;
                    best_rank = m;
                }
        if (best_rank == UINT32_MAX)
            break;
        memcpy(parts[best].text + parts[best].n, parts[best + 1].text, parts[best + 1].n);
        parts[best].n += parts[best + 1].n;
        memmove(&parts[best + 1], &parts[best + 2], (n - best - 2) * sizeof *parts);
        n--;
    }
    for (size_t i = 0; i < n; i++)
        for (uint32_t id = 0; id < s->source.n_tokens; id++)
            if (s->tokens[id].n == parts[i].n &&
                memcmp(s->tokens[id].p, parts[i].text, parts[i].n) == 0)
                ids[i] = (int32_t)id;
    return n;
}

static void test_tokenizer_merges_as_the_definition_does(void **state)
{
    (void)state;
    enum { MERGES = 60, WORDS = 3000 };
    static char pairs[MERGES][80], results[MERGES][80];
    struct rng rng;
    rng_seed(&rng, 42);
    struct small s;
    small_init(&s);
    for (int i = 0; i < MERGES; i++) {
        const char *parts[2];
        for (int j = 0; j < 2; j++) {
            uint64_t pick = rng_below(&rng, 3 + (uint64_t)s.source.n_merges);
            parts[j] = pick < 3 ? s.tokens['a' + pick].p : results[pick - 3];
        }
        if (strlen(parts[0]) + strlen(parts[1]) > 12)
            parts[0] = s.tokens['a'].p, parts[1] = s.tokens['b' + i % 2].p;
        (void)snprintf(pairs[i], sizeof pairs[i], "%s %s", parts[0], parts[1]);
        (void)snprintf(results[i], sizeof results[i], "%s%s", parts[0], parts[1]);
        bool known = false;
        for (uint32_t id = 0; id < s.source.n_tokens; id++)
            known |= strcmp(s.tokens[id].p, results[i]) == 0;
        if (!known)
            small_add(&s, results[i], TOKEN_NORMAL);
        small_merge(&s, pairs[i]);
    }
    struct tokenizer *t = small_new(&s);
    for (int i = 0; i < WORDS; i++) {
        char word[48];
        size_t n = 1 + rng_below(&rng, sizeof word - 1);
        for (size_t j = 0; j < n; j++)
            word[j] = (char)('a' + rng_below(&rng, 3));
        int32_t expected[48];
        size_t n_expected = merge_slowly(&s, word, n, expected);
        const struct tokenizer_options o = {0};
        expect_ids(t, word, n, &o, expected, n_expected);
    }
    tokenizer_free(t);
}

static void *encode_often(void *context)
{
    const struct tokenizer *t = context;
    for (int i = 0; i < 300; i++) {
        struct token_ids ids = {0};
        const struct tokenizer_options o = {.parse_special = true};
        enum err e = tokenizer_encode(t, "abab cd <e>ab 12", 16, &o, &ids, NULL);
        bool same = !e && ids.n == 11 && ids.v[0] == 257 && ids.v[1] == 257 && ids.v[6] == 256;
        token_ids_deinit(&ids);
        if (!same)
            return context;
    }
    return NULL;
}

static void test_tokenizer_serves_several_threads(void **state)
{
    (void)state;
    struct small s;
    small_init(&s);
    small_add(&s, "<e>", TOKEN_CONTROL);
    small_add(&s, "ab", TOKEN_NORMAL); /* 257 */
    small_merge(&s, "a b");
    struct tokenizer *t = small_new(&s);
    pthread_t threads[4];
    for (size_t i = 0; i < ARRAY_LEN(threads); i++)
        assert_int_equal(pthread_create(&threads[i], NULL, encode_often, t), 0);
    for (size_t i = 0; i < ARRAY_LEN(threads); i++) {
        void *wrong;
        assert_int_equal(pthread_join(threads[i], &wrong), 0);
        assert_null(wrong);
    }
    tokenizer_free(t);
}

/* -- hostile metadata -------------------------------------------------------------------------- */

static void expect_refused(const struct small *s, enum err expected, const char *word)
{
    struct tokenizer *t;
    struct err_text error = {""};
    enum err e = tokenizer_new(&s->source, &t, &error);
    if (e != expected || !strstr(error.text, word))
        fail_msg("%s instead of %s: '%s'", err_name(e), err_name(expected), error.text);
}

static void test_tokenizer_refuses_bad_metadata(void **state)
{
    (void)state;
    struct small s;
    small_init(&s);
    s.source.model = (struct text_view){"bert", 4};
    expect_refused(&s, ERR_UNSUPPORTED, "'bert'");
    small_init(&s);
    s.source.pre = (struct text_view){"no-such-rule", 12};
    expect_refused(&s, ERR_UNSUPPORTED, "no-such-rule");
    small_init(&s);
    s.source.n_tokens = 0;
    expect_refused(&s, ERR_CORRUPT, "0 tokens");
    small_init(&s);
    s.source.n_tokens = TOKENIZER_VOCAB_MAX + 1;
    expect_refused(&s, ERR_LIMIT, "tokens");
    small_init(&s);
    s.source.n_tokens = 200;
    expect_refused(&s, ERR_CORRUPT, "byte 0xc8");
    s.source.unknown = 0;
    tokenizer_free(small_new(&s));
    small_init(&s);
    s.types[7] = 99;
    expect_refused(&s, ERR_CORRUPT, "token 7 has the unknown type 99");
    small_init(&s);
    s.source.eos = 256;
    expect_refused(&s, ERR_CORRUPT, "eos token 256");
    small_init(&s);
    s.source.add_bos = 1;
    expect_refused(&s, ERR_CORRUPT, "bos");
    static const char *const BAD_MERGES[] = {"", "a", "ab", "a ", " b", "a  "};
    for (size_t i = 0; i < 4; i++) {
        small_init(&s);
        small_merge(&s, BAD_MERGES[i]);
        expect_refused(&s, ERR_CORRUPT, "merge 0 is not a pair");
    }
    static char large[TOKENIZER_TOKEN_BYTES_MAX + 2];
    memset(large, 'x', sizeof large - 1);
    small_init(&s);
    small_add(&s, large, TOKEN_NORMAL);
    expect_refused(&s, ERR_LIMIT, "token 256");
    large[TOKENIZER_SPECIAL_BYTES_MAX + 1] = 0;
    small_init(&s);
    small_add(&s, large, TOKEN_CONTROL);
    expect_refused(&s, ERR_LIMIT, "token 256");
}

/* -- SentencePiece ----------------------------------------------------------------------------- */

enum { SPM_MAX = 300 };

struct spm {
    struct text_view tokens[SPM_MAX];
    int32_t types[SPM_MAX];
    float scores[SPM_MAX];
    char bytes[256][8];
    struct tokenizer_source source;
};

static void spm_add(struct spm *s, const char *token, int32_t type, float score)
{
    uint32_t i = s->source.n_tokens++;
    s->tokens[i] = (struct text_view){token, strlen(token)};
    s->types[i] = type;
    s->scores[i] = score;
}

/* 0 <unk>, 1 <s>, 2 </s>, 3 + b the byte b, then letters and what a test adds. */
static void spm_init(struct spm *s)
{
    memset(s, 0, sizeof *s);
    s->source = TOKENIZER_SOURCE_INIT;
    s->source.model = (struct text_view){"llama", 5};
    s->source.tokens = s->tokens;
    s->source.types = s->types;
    s->source.scores = s->scores;
    s->source.unknown = 0;
    s->source.bos = 1;
    s->source.eos = 2;
    spm_add(s, "<unk>", TOKEN_UNKNOWN, 0);
    spm_add(s, "<s>", TOKEN_CONTROL, 0);
    spm_add(s, "</s>", TOKEN_CONTROL, 0);
    for (int b = 0; b < 256; b++) {
        (void)snprintf(s->bytes[b], sizeof s->bytes[b], "<0x%02X>", (unsigned)b);
        spm_add(s, s->bytes[b], TOKEN_BYTE, 0);
    }
}

static struct tokenizer *spm_new(const struct spm *s)
{
    struct tokenizer *t;
    struct err_text error = {""};
    if (tokenizer_new(&s->source, &t, &error))
        fail_msg("%s", error.text);
    return t;
}

enum { SPM_BYTE = 3, SPM_OWN = 259 };

static void test_tokenizer_merges_by_score(void **state)
{
    (void)state;
    static struct spm s;
    spm_init(&s);
    spm_add(&s, "\u2581", TOKEN_NORMAL, -10);  /* 259 */
    spm_add(&s, "a", TOKEN_NORMAL, -11);       /* 260 */
    spm_add(&s, "b", TOKEN_NORMAL, -12);       /* 261 */
    spm_add(&s, "ab", TOKEN_NORMAL, -2);       /* 262 */
    spm_add(&s, "ba", TOKEN_NORMAL, -1);       /* 263 */
    spm_add(&s, "\u2581a", TOKEN_NORMAL, -3);  /* 264 */
    spm_add(&s, "aa", TOKEN_NORMAL, -4);       /* 265 */
    spm_add(&s, "bb", TOKEN_USER_DEFINED, -9); /* 266 */
    s.source.space_prefix = 0;
    s.source.add_bos = 0;
    struct tokenizer *t = spm_new(&s);
    const struct tokenizer_options plain = {0}, special = {.parse_special = true};
    /* worked out by hand: of all pairs the best score, then the leftmost */
    expect_ids(t, "ab", 2, &plain, (const int32_t[]){262}, 1);
    expect_ids(t, "aba", 3, &plain, (const int32_t[]){260, 263}, 2);
    expect_ids(t, "aaa", 3, &plain, (const int32_t[]){265, 260}, 2);
    expect_ids(t, " ab", 3, &plain, (const int32_t[]){259, 262}, 2);
    expect_ids(t, " aa", 3, &plain, (const int32_t[]){264, 260}, 2);
    /* user-defined tokens are found first, control tokens when asked for */
    expect_ids(t, "abba", 4, &plain, (const int32_t[]){260, 266, 260}, 3);
    expect_ids(t, "a</s>b", 6, &special, (const int32_t[]){260, 2, 261}, 3);
    expect_ids(t, "<s>", 3, &plain,
               (const int32_t[]){SPM_BYTE + '<', SPM_BYTE + 's', SPM_BYTE + '>'}, 3);
    /* what has no token becomes bytes, also where it is not UTF-8 */
    expect_ids(t, "a\xc3\xa9", 3, &plain, (const int32_t[]){260, SPM_BYTE + 0xc3, SPM_BYTE + 0xa9},
               3);
    expect_ids(t,
               "a\xff"
               "a",
               3, &plain, (const int32_t[]){260, SPM_BYTE + 0xff, 260}, 3);
    tokenizer_free(t);
    /* the blank before, after each special token too, but not for nothing */
    s.source.space_prefix = -1;
    s.source.add_bos = -1;
    t = spm_new(&s);
    assert_true(tokenizer_adds_bos(t));
    const struct tokenizer_options all = {.parse_special = true, .add_bos = true};
    expect_ids(t, "a</s>a", 6, &all, (const int32_t[]){1, 264, 2, 264}, 4);
    expect_ids(t, "", 0, &all, (const int32_t[]){1}, 1);
    struct text_view piece;
    assert_int_equal(tokenizer_piece(t, 264, &piece), ERR_OK);
    assert_int_equal(piece.n, 2);
    assert_memory_equal(piece.p, " a", 2);
    assert_int_equal(tokenizer_piece(t, SPM_BYTE + 0xc3, &piece), ERR_OK);
    assert_int_equal(piece.n, 1);
    assert_memory_equal(piece.p, "\xc3", 1);
    tokenizer_free(t);
}

/* A text that is one run, longer than what is merged at once, and one that nothing can merge. */
static void test_tokenizer_takes_huge_texts_by_score(void **state)
{
    (void)state;
    static struct spm s;
    static char letters[16][600];
    spm_init(&s);
    spm_add(&s, "a", TOKEN_NORMAL, -100);
    for (int i = 1; i <= 9; i++) { /* aa, aaaa, ... up to 512 */
        memset(letters[i], 'a', (size_t)1 << i);
        spm_add(&s, letters[i], TOKEN_NORMAL, (float)-i);
    }
    s.source.space_prefix = 0;
    s.source.add_bos = 0;
    struct tokenizer *t = spm_new(&s);
    size_t n = 3 << 20;
    char *text = malloc(n);
    assert_non_null(text);
    memset(text, 'a', n);
    struct token_ids ids = {0};
    const struct tokenizer_options plain = {0};
    assert_int_equal(tokenizer_encode(t, text, n, &plain, &ids, NULL), ERR_OK);
    assert_int_equal(ids.n, n / 512);
    for (size_t i = 0; i < ids.n; i++)
        assert_int_equal(ids.v[i], SPM_OWN + 9);
    ids.n = 0;
    memset(text, 0xff, n);
    assert_int_equal(tokenizer_encode(t, text, n, &plain, &ids, NULL), ERR_OK);
    assert_int_equal(ids.n, n);
    token_ids_deinit(&ids);
    free(text);
    tokenizer_free(t);
}

static void expect_scored_refused(const struct spm *s, enum err expected, const char *what)
{
    struct tokenizer *t;
    struct err_text error = {""};
    assert_int_equal(tokenizer_new(&s->source, &t, &error), expected);
    assert_non_null(strstr(error.text, what));
}

static void test_tokenizer_refuses_bad_scores(void **state)
{
    (void)state;
    static struct spm s;
    static char longer[TOKENIZER_SCORED_BYTES_MAX + 2];
    spm_init(&s);
    s.source.scores = NULL;
    expect_scored_refused(&s, ERR_CORRUPT, "no scores");
    spm_init(&s);
    s.scores[7] = NAN;
    expect_scored_refused(&s, ERR_CORRUPT, "score of token 7");
    s.scores[7] = -INFINITY;
    expect_scored_refused(&s, ERR_CORRUPT, "score of token 7");
    spm_init(&s);
    spm_add(&s, "<0xG0>", TOKEN_BYTE, 0);
    expect_scored_refused(&s, ERR_CORRUPT, "names no byte");
    spm_init(&s);
    memset(longer, 'x', sizeof longer - 1);
    spm_add(&s, longer, TOKEN_NORMAL, 0);
    expect_scored_refused(&s, ERR_LIMIT, "bytes long");
    spm_init(&s);
    s.types[SPM_BYTE + 65] = TOKEN_CONTROL; /* one byte has no token, and there is no unknown one */
    s.source.unknown = -1;
    expect_scored_refused(&s, ERR_CORRUPT, "0x41");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tokenizer_splits_as_tokenizers_does),
        cmocka_unit_test(test_tokenizer_merges_by_score),
        cmocka_unit_test(test_tokenizer_takes_huge_texts_by_score),
        cmocka_unit_test(test_tokenizer_refuses_bad_scores),
        {"test_tokenizer_gives_the_ids_of_llama_cpp_smollm2",
         test_tokenizer_gives_the_ids_of_llama_cpp, NULL, NULL, (void *)(uintptr_t)&SMOLLM2},
        {"test_tokenizer_pieces_give_the_text_back_smollm2",
         test_tokenizer_pieces_give_the_text_back, NULL, NULL, (void *)(uintptr_t)&SMOLLM2},
        {"test_tokenizer_gives_the_ids_of_llama_cpp_gemma3",
         test_tokenizer_gives_the_ids_of_llama_cpp, NULL, NULL, (void *)(uintptr_t)&GEMMA3},
        {"test_tokenizer_pieces_give_the_text_back_gemma3",
         test_tokenizer_pieces_give_the_text_back, NULL, NULL, (void *)(uintptr_t)&GEMMA3},
        {"test_tokenizer_gives_the_ids_of_llama_cpp_qwen2",
         test_tokenizer_gives_the_ids_of_llama_cpp, NULL, NULL, (void *)(uintptr_t)&QWEN2},
        {"test_tokenizer_pieces_give_the_text_back_qwen2", test_tokenizer_pieces_give_the_text_back,
         NULL, NULL, (void *)(uintptr_t)&QWEN2},
        cmocka_unit_test(test_tokenizer_merges_by_rank),
        cmocka_unit_test(test_tokenizer_keeps_plain_runs_plain),
        cmocka_unit_test(test_tokenizer_limit_leaves_ids_as_they_were),
        cmocka_unit_test(test_tokenizer_takes_huge_words),
        cmocka_unit_test(test_tokenizer_merges_as_the_definition_does),
        cmocka_unit_test(test_tokenizer_serves_several_threads),
        cmocka_unit_test(test_tokenizer_refuses_bad_metadata),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
