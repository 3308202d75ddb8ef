/* SentencePiece's BPE as GGUF carries it ("llama"): tokens with scores, blanks written as U+2581,
 * bytes as "<0xNN>".
 *
 * Of all neighbours whose texts together are a token, those of the highest score are merged first,
 * of equal ones the leftmost (Kudo and Richardson 2018; sentencepiece, bpe_model.cc). Departures:
 * llama.cpp lets plain text become a control token when merging happens to spell its name; here it
 * never does. */
#include "runtime/tokenizer_internal.h"

#include <string.h>
#include <utf8proc.h>

void spm_bytes(const char *p, size_t n, char *ret, size_t *ret_n)
{
    size_t n_out = 0;
    for (size_t i = 0; i < n;) {
        if (n - i >= SPM_BLANK_BYTES && memcmp(p + i, SPM_BLANK, SPM_BLANK_BYTES) == 0) {
            ret[n_out++] = ' ';
            i += SPM_BLANK_BYTES;
        } else {
            ret[n_out++] = p[i++];
        }
    }
    *ret_n = n_out;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'A' && c <= 'F')
        return c - 'A' + 10;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

int spm_byte_of(struct text_view token)
{
    if (token.n != 6 || memcmp(token.p, "<0x", 3) != 0 || token.p[5] != '>')
        return -1;
    int high = hex_digit(token.p[3]), low = hex_digit(token.p[4]);
    return high < 0 || low < 0 ? -1 : high * 16 + low;
}

uint32_t spm_rank(float score)
{
    uint32_t bits;
    float v = score + 0.0f; /* -0 becomes 0 */
    memcpy(&bits, &v, sizeof bits);
    /* the order of floats as the order of unsigned numbers, turned round */
    return bits >> 31 ? bits : ~(bits | UINT32_C(1) << 31);
}

uint32_t spm_token(const struct tokenizer *t, const char *p, size_t n)
{
    if (n > TOKENIZER_SCORED_BYTES_MAX)
        return STRINGS_NONE;
    uint32_t found = strings_find(&t->text, p, n);
    if (found == STRINGS_NONE)
        return found;
    switch ((enum token_type)t->types[found]) {
    case TOKEN_NORMAL:
    case TOKEN_USER_DEFINED:
    case TOKEN_UNUSED:
        return found;
    case TOKEN_UNKNOWN:
    case TOKEN_CONTROL:
    case TOKEN_BYTE:
        break;
    }
    return STRINGS_NONE;
}

static enum err consider(const struct tokenizer *t, const char *text, struct bpe_work *w,
                         int32_t at)
{
    if (at < 0 || w->symbols[at].next < 0)
        return ERR_OK;
    uint32_t left = w->symbols[at].id, right = w->symbols[w->symbols[at].next].id;
    uint32_t token = spm_token(t, text + at, (size_t)left + right);
    if (token == STRINGS_NONE)
        return ERR_OK;
    return bpe_push(w, &(struct bpe_candidate){t->ranks[token], (uint32_t)at, left, right});
}

/* One symbol for each character; a byte that is not UTF-8 is one of its own. */
static void cut_into_characters(const char *text, size_t n, struct bpe_symbol *symbols)
{
    int32_t prev = -1;
    for (size_t at = 0; at < n;) {
        utf8proc_int32_t c;
        size_t left = n - at < 4 ? n - at : 4;
        utf8proc_ssize_t used =
            utf8proc_iterate((const utf8proc_uint8_t *)text + at, (utf8proc_ssize_t)left, &c);
        size_t length = used > 0 ? (size_t)used : 1;
        symbols[at] = (struct bpe_symbol){(uint32_t)length, prev,
                                          at + length < n ? (int32_t)(at + length) : -1};
        prev = (int32_t)at;
        at += length;
    }
}

enum err spm_merge(const struct tokenizer *t, const char *text, size_t n, struct bpe_work *w)
{
    TRY(bpe_reserve(w, n));
    cut_into_characters(text, n, w->symbols);
    w->n_heap = 0;
    for (int32_t i = 0; n > 0 && i >= 0; i = w->symbols[i].next)
        TRY(consider(t, text, w, i));
    while (w->n_heap) {
        struct bpe_candidate c = bpe_pop(w);
        struct bpe_symbol *left = &w->symbols[c.at];
        if (left->next < 0 || left->id != c.left || w->symbols[left->next].id != c.right)
            continue; /* stale */
        struct bpe_symbol *right = &w->symbols[left->next];
        left->id += right->id;
        left->next = right->next;
        right->next = BPE_GONE;
        if (left->next >= 0)
            w->symbols[left->next].prev = (int32_t)c.at;
        TRY(consider(t, text, w, left->prev));
        TRY(consider(t, text, w, (int32_t)c.at));
    }
    return ERR_OK;
}
