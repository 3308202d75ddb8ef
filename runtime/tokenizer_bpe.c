/* Byte-pair encoding: the numbered strings, the table of merges, and merging of one word.
 *
 * Sennrich, Haddow and Birch, "Neural machine translation of rare words with subword units" (2016);
 * merges go by rank, leftmost first. A heap of candidates over a linked list keeps a word of n
 * bytes at O(n log n); candidates that earlier merges made stale are recognised when they come up.
 */
#include "runtime/tokenizer_internal.h"

#include "base/util.h"

#include <stdlib.h>
#include <string.h>

/* Names and pairs come from a file: a chain of equal hashes longer than this was made on purpose.
 */
enum { PROBES_MAX = 4096 };

/* -- numbered strings -------------------------------------------------------------------------- */

void strings_deinit(struct strings *s)
{
    free(s->bytes);
    free(s->v);
    free(s->slots);
    *s = (struct strings){0};
}

struct text_view strings_at(const struct strings *s, uint32_t i)
{
    return (struct text_view){s->bytes + s->v[i].offset, s->v[i].n};
}

enum err strings_add(struct strings *s, const char *p, size_t n)
{
    if (n > TOKENIZER_VOCAB_BYTES_MAX || s->n_bytes > TOKENIZER_VOCAB_BYTES_MAX - n ||
        s->n >= INT32_MAX)
        return ERR_LIMIT;
    if (s->bytes_cap - s->n_bytes < n || !s->bytes) {
        size_t cap = MAX_OF(s->bytes_cap * 2, MAX_OF(s->n_bytes + n, (size_t)4096));
        char *bytes = realloc(s->bytes, cap);
        if (!bytes)
            return ERR_NO_MEMORY;
        s->bytes = bytes;
        s->bytes_cap = cap;
    }
    if (s->n == s->cap) {
        uint32_t cap = s->cap ? s->cap * 2 : 1024;
        struct slice *v = realloc(s->v, cap * sizeof *v);
        if (!v)
            return ERR_NO_MEMORY;
        s->v = v;
        s->cap = cap;
    }
    if (n)
        memcpy(s->bytes + s->n_bytes, p, n);
    s->v[s->n++] = (struct slice){(uint32_t)s->n_bytes, (uint32_t)n};
    s->n_bytes += n;
    return ERR_OK;
}

static uint64_t mix(uint64_t h)
{
    h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9u;
    h = (h ^ (h >> 27)) * 0x94d049bb133111ebu;
    return h ^ (h >> 31);
}

static uint64_t hash_of(const char *p, size_t n)
{
    uint64_t h = 14695981039346656037u;
    for (size_t i = 0; i < n; i++)
        h = (h ^ (uint8_t)p[i]) * 1099511628211u;
    return mix(h);
}

/* The slot of an equal string, or the free one where it would go; SIZE_MAX after too many. */
static size_t strings_slot(const struct strings *s, const char *p, size_t n)
{
    size_t at = hash_of(p, n) & (s->n_slots - 1);
    for (int probes = 0; probes < PROBES_MAX; probes++) {
        if (!s->slots[at])
            return at;
        struct text_view v = strings_at(s, s->slots[at] - 1);
        if (v.n == n && (n == 0 || memcmp(v.p, p, n) == 0))
            return at;
        at = (at + 1) & (s->n_slots - 1);
    }
    return SIZE_MAX;
}

static enum err strings_grow(struct strings *s)
{
    struct strings grown = *s;
    grown.n_slots = s->n_slots ? s->n_slots * 2 : 4096;
    grown.slots = calloc(grown.n_slots, sizeof *grown.slots);
    if (!grown.slots)
        return ERR_NO_MEMORY;
    for (size_t i = 0; i < s->n_slots; i++) {
        if (!s->slots[i])
            continue;
        struct text_view v = strings_at(s, s->slots[i] - 1);
        size_t at = strings_slot(&grown, v.p, v.n);
        if (at == SIZE_MAX) {
            free(grown.slots);
            return ERR_CORRUPT;
        }
        grown.slots[at] = s->slots[i];
    }
    free(s->slots);
    s->slots = grown.slots;
    s->n_slots = grown.n_slots;
    return ERR_OK;
}

enum err strings_index(struct strings *s, uint32_t i)
{
    if (((size_t)s->n_indexed + 1) * 2 > s->n_slots)
        TRY(strings_grow(s));
    struct text_view v = strings_at(s, i);
    size_t at = strings_slot(s, v.p, v.n);
    if (at == SIZE_MAX)
        return ERR_CORRUPT;
    s->n_indexed += !s->slots[at];
    s->slots[at] = i + 1;
    return ERR_OK;
}

uint32_t strings_find(const struct strings *s, const char *p, size_t n)
{
    if (!s->n_slots)
        return STRINGS_NONE;
    size_t at = strings_slot(s, p, n);
    return at != SIZE_MAX && s->slots[at] ? s->slots[at] - 1 : STRINGS_NONE;
}

/* -- merges ------------------------------------------------------------------------------------ */

enum err merges_init(struct merges *m, uint32_t n)
{
    size_t n_slots = 16;
    while (n_slots < (size_t)n * 2)
        n_slots *= 2;
    m->slots = malloc(n_slots * sizeof *m->slots);
    if (!m->slots)
        return ERR_NO_MEMORY;
    memset(m->slots, 0xff, n_slots * sizeof *m->slots);
    m->n_slots = n_slots;
    return ERR_OK;
}

void merges_deinit(struct merges *m)
{
    free(m->slots);
    *m = (struct merges){0};
}

static struct merge *merges_slot(const struct merges *m, uint32_t left, uint32_t right)
{
    size_t at = mix(((uint64_t)left << 32 | right) + 0x9e3779b97f4a7c15u) & (m->n_slots - 1);
    for (int probes = 0; probes < PROBES_MAX; probes++) {
        struct merge *slot = &m->slots[at];
        if (slot->left == UINT32_MAX || (slot->left == left && slot->right == right))
            return slot;
        at = (at + 1) & (m->n_slots - 1);
    }
    return NULL;
}

enum err merges_put(struct merges *m, const struct merge *merge)
{
    struct merge *slot = merges_slot(m, merge->left, merge->right);
    if (!slot)
        return ERR_CORRUPT;
    if (slot->left == UINT32_MAX)
        *slot = *merge;
    return ERR_OK;
}

const struct merge *merges_find(const struct merges *m, uint32_t left, uint32_t right)
{
    const struct merge *slot = merges_slot(m, left, right);
    return slot && slot->left != UINT32_MAX ? slot : NULL;
}

/* -- one word ---------------------------------------------------------------------------------- */

void bpe_work_deinit(struct bpe_work *w)
{
    free(w->symbols);
    free(w->heap);
    *w = (struct bpe_work){0};
}

static bool before(const struct bpe_candidate *a, const struct bpe_candidate *b)
{
    return a->rank != b->rank ? a->rank < b->rank : a->at < b->at;
}

enum err bpe_push(struct bpe_work *w, const struct bpe_candidate *c)
{
    if (w->n_heap == w->heap_cap) {
        size_t cap = w->heap_cap ? w->heap_cap * 2 : 256;
        struct bpe_candidate *heap = realloc(w->heap, cap * sizeof *heap);
        if (!heap)
            return ERR_NO_MEMORY;
        w->heap = heap;
        w->heap_cap = cap;
    }
    size_t at = w->n_heap++;
    for (; at > 0 && before(c, &w->heap[(at - 1) / 2]); at = (at - 1) / 2)
        w->heap[at] = w->heap[(at - 1) / 2];
    w->heap[at] = *c;
    return ERR_OK;
}

struct bpe_candidate bpe_pop(struct bpe_work *w)
{
    struct bpe_candidate top = w->heap[0], last = w->heap[--w->n_heap];
    size_t at = 0;
    for (;;) {
        size_t child = at * 2 + 1;
        if (child >= w->n_heap)
            break;
        if (child + 1 < w->n_heap && before(&w->heap[child + 1], &w->heap[child]))
            child++;
        if (!before(&w->heap[child], &last))
            break;
        w->heap[at] = w->heap[child];
        at = child;
    }
    if (w->n_heap)
        w->heap[at] = last;
    return top;
}

/* Puts the pair that begins at symbol `at` into the heap, if it can be merged. */
static enum err consider(const struct merges *m, struct bpe_work *w, int32_t at)
{
    if (at < 0 || w->symbols[at].next < 0)
        return ERR_OK;
    uint32_t left = w->symbols[at].id, right = w->symbols[w->symbols[at].next].id;
    const struct merge *merge = merges_find(m, left, right);
    if (!merge)
        return ERR_OK;
    return bpe_push(w, &(struct bpe_candidate){merge->rank, (uint32_t)at, left, right});
}

enum err bpe_reserve(struct bpe_work *w, size_t n)
{
    if (n <= w->symbols_cap)
        return ERR_OK;
    size_t cap = MAX_OF(n, w->symbols_cap * 2);
    struct bpe_symbol *symbols = realloc(w->symbols, cap * sizeof *symbols);
    if (!symbols)
        return ERR_NO_MEMORY;
    w->symbols = symbols;
    w->symbols_cap = cap;
    return ERR_OK;
}

enum err bpe_merge(const struct merges *m, const uint32_t byte_symbols[256], const uint8_t *word,
                   size_t n, struct bpe_work *w)
{
    TRY(bpe_reserve(w, n));
    for (size_t i = 0; i < n; i++)
        w->symbols[i] = (struct bpe_symbol){byte_symbols[word[i]], (int32_t)i - 1,
                                            i + 1 < n ? (int32_t)i + 1 : -1};
    w->n_heap = 0;
    for (size_t i = 0; i + 1 < n; i++)
        TRY(consider(m, w, (int32_t)i));
    while (w->n_heap) {
        struct bpe_candidate c = bpe_pop(w);
        struct bpe_symbol *left = &w->symbols[c.at];
        if (left->next < 0 || left->id != c.left || w->symbols[left->next].id != c.right)
            continue; /* stale */
        struct bpe_symbol *right = &w->symbols[left->next];
        left->id = merges_find(m, c.left, c.right)->result;
        left->next = right->next;
        right->next = BPE_GONE;
        if (left->next >= 0)
            w->symbols[left->next].prev = (int32_t)c.at;
        TRY(consider(m, w, left->prev));
        TRY(consider(m, w, (int32_t)c.at));
    }
    return ERR_OK;
}
