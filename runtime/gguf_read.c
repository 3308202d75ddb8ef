/* Parsing of a GGUF header. Nothing that the file says is believed before it is checked: counts
 * against what the bytes that are left could hold, lengths against the end, products against
 * overflow, tensors against the file's size and against each other. */
#include "runtime/gguf_internal.h"

#include "base/buf.h"
#include "base/util.h"

#include <string.h>

enum {
    PAIR_BYTES_MIN = 8 + 4 + 1,           /* empty key, type, one byte of value */
    TENSOR_BYTES_MIN = 8 + 4 + 8 + 4 + 8, /* empty name, count, one dimension, type, offset */
    TEXT_NAME_MAX = 80,                   /* of a name quoted in a sentence */
};

struct parse {
    struct gguf *g;
    struct reader r;
    struct err_text *text;
};

/* How far the reader is into the file. */
static uint64_t parse_at(const struct parse *p)
{
    return p->g->file_bytes - p->r.left;
}

static enum err cut_short(const struct parse *p, const char *what)
{
    return err_set(p->text, ERR_CORRUPT, "%s: the file ends inside %s (it has %llu bytes)",
                   p->g->path, what, (unsigned long long)p->g->file_bytes);
}

static enum err read_string(struct parse *p, uint64_t max, const char *what,
                            struct gguf_string *ret)
{
    uint64_t n = read_u64(&p->r);
    if (p->r.bad)
        return cut_short(p, what);
    if (n > p->r.left)
        return err_set(p->text, ERR_CORRUPT,
                       "%s: %s at byte %llu claims a length of %llu, but only "
                       "%llu bytes are left",
                       p->g->path, what, (unsigned long long)(parse_at(p) - 8),
                       (unsigned long long)n, (unsigned long long)p->r.left);
    if (n > max)
        return err_set(p->text, ERR_LIMIT, "%s: %s of %llu bytes is longer than the limit of %llu",
                       p->g->path, what, (unsigned long long)n, (unsigned long long)max);
    *ret = (struct gguf_string){(const char *)read_view(&p->r, (size_t)n), n};
    return ERR_OK;
}

static uint32_t scalar_bytes(uint32_t type)
{
    switch (type) {
    case GGUF_U8:
    case GGUF_I8:
    case GGUF_BOOL:
        return 1;
    case GGUF_U16:
    case GGUF_I16:
        return 2;
    case GGUF_U32:
    case GGUF_I32:
    case GGUF_F32:
        return 4;
    case GGUF_U64:
    case GGUF_I64:
    case GGUF_F64:
        return 8;
    default:
        return 0;
    }
}

static enum err read_string_array(struct parse *p, const char *key, struct gguf_array *array)
{
    const uint8_t *start = p->r.p;
    uint32_t *offsets = malloc((size_t)(array->n + 1) * sizeof *offsets);
    if (!offsets)
        return err_set(p->text, ERR_NO_MEMORY, "%s: no memory for the array %s", p->g->path, key);
    array->data = start;
    array->offsets = offsets;
    for (uint64_t i = 0; i < array->n; i++) {
        struct gguf_string s;
        offsets[i] = (uint32_t)(p->r.p - start);
        TRY(read_string(p, GGUF_HEADER_MAX, "a string of an array", &s));
        if (p->r.p - start > GGUF_HEADER_MAX)
            return err_set(p->text, ERR_LIMIT, "%s: the array %s is larger than %d bytes",
                           p->g->path, key, GGUF_HEADER_MAX);
    }
    offsets[array->n] = (uint32_t)(p->r.p - start);
    return ERR_OK;
}

static enum err read_array(struct parse *p, const char *key, struct gguf_array *array)
{
    uint32_t type = read_u32(&p->r);
    uint64_t n = read_u64(&p->r);
    if (p->r.bad)
        return cut_short(p, "an array");
    if (type == GGUF_ARRAY)
        return err_set(p->text, ERR_UNSUPPORTED,
                       "%s: the array %s holds arrays, which no model "
                       "needs and Covey does not read",
                       p->g->path, key);
    uint32_t size = type == GGUF_STRING ? 8 : scalar_bytes(type);
    if (size == 0)
        return err_set(p->text, ERR_CORRUPT, "%s: the array %s has elements of unknown type %u",
                       p->g->path, key, type);
    if (n > p->r.left / size)
        return err_set(p->text, ERR_CORRUPT,
                       "%s: the array %s claims %llu elements, but only %llu "
                       "bytes are left",
                       p->g->path, key, (unsigned long long)n, (unsigned long long)p->r.left);
    if (n > GGUF_HEADER_MAX / size)
        return err_set(p->text, ERR_LIMIT, "%s: the array %s has too many elements (%llu)",
                       p->g->path, key, (unsigned long long)n);
    array->type = (enum gguf_type)type;
    array->n = n;
    if (type == GGUF_STRING)
        return read_string_array(p, key, array);
    array->data = read_view(&p->r, (size_t)n * size);
    return ERR_OK;
}

static void read_scalar(struct parse *p, struct gguf_pair *pair)
{
    uint64_t bits;
    double f64;
    switch (pair->type) {
    case GGUF_U8:
    case GGUF_BOOL:
        pair->value.u = read_u8(&p->r);
        break;
    case GGUF_I8:
        pair->value.i = sign_extend(read_u8(&p->r), 8);
        break;
    case GGUF_U16:
        pair->value.u = read_u16(&p->r);
        break;
    case GGUF_I16:
        pair->value.i = sign_extend(read_u16(&p->r), 16);
        break;
    case GGUF_U32:
        pair->value.u = read_u32(&p->r);
        break;
    case GGUF_I32:
        pair->value.i = sign_extend(read_u32(&p->r), 32);
        break;
    case GGUF_U64:
        pair->value.u = read_u64(&p->r);
        break;
    case GGUF_I64:
        pair->value.i = (int64_t)read_u64(&p->r);
        break;
    case GGUF_F32:
        pair->value.f = (double)read_f32(&p->r);
        break;
    case GGUF_F64:
        bits = read_u64(&p->r);
        memcpy(&f64, &bits, sizeof f64);
        pair->value.f = f64;
        break;
    case GGUF_STRING:
    case GGUF_ARRAY:
        break;
    }
}

static enum err read_pair(struct parse *p, struct gguf_pair *pair)
{
    TRY(read_string(p, GGUF_KEY_MAX, "a metadata key", &pair->key));
    char key[TEXT_NAME_MAX];
    gguf_string_copy(pair->key, key, sizeof key);
    uint32_t type = read_u32(&p->r);
    if (p->r.bad)
        return cut_short(p, "the metadata");
    if (type != GGUF_STRING && type != GGUF_ARRAY && scalar_bytes(type) == 0)
        return err_set(p->text, ERR_CORRUPT, "%s: the metadata value %s has the unknown type %u",
                       p->g->path, key, type);
    pair->type = (enum gguf_type)type;
    if (type == GGUF_STRING)
        return read_string(p, GGUF_HEADER_MAX, "a metadata string", &pair->value.string);
    if (type == GGUF_ARRAY)
        return read_array(p, key, &pair->value.array);
    read_scalar(p, pair);
    if (p->r.bad)
        return cut_short(p, "the metadata");
    if (type == GGUF_BOOL && pair->value.u > 1)
        return err_set(p->text, ERR_CORRUPT, "%s: the metadata value %s is neither true nor false",
                       p->g->path, key);
    return ERR_OK;
}

static enum err check_shape(struct parse *p, const char *name, struct gguf_tensor *t)
{
    uint32_t block_elements, block_bytes;
    if (!gguf_tensor_block(t->type, &block_elements, &block_bytes))
        return err_set(p->text, ERR_UNSUPPORTED, "%s: the tensor %s has the unknown type %u",
                       p->g->path, name, t->type);
    uint64_t n = 1;
    for (uint32_t i = 0; i < t->n_dims; i++) {
        if (t->dims[i] == 0 || t->dims[i] > INT64_MAX || mul_overflows(n, t->dims[i], &n) ||
            n > INT64_MAX)
            return err_set(p->text, ERR_CORRUPT, "%s: the tensor %s has impossible dimensions",
                           p->g->path, name);
    }
    if (t->dims[0] % block_elements != 0)
        return err_set(p->text, ERR_CORRUPT,
                       "%s: rows of the tensor %s have %llu elements, which is "
                       "no whole number of %s blocks of %u",
                       p->g->path, name, (unsigned long long)t->dims[0],
                       gguf_tensor_type_name(t->type), block_elements);
    t->n_elements = n;
    if (mul_overflows(n / block_elements, (uint64_t)block_bytes, &t->n_bytes))
        return err_set(p->text, ERR_CORRUPT, "%s: the tensor %s has impossible dimensions",
                       p->g->path, name);
    return ERR_OK;
}

static enum err read_tensor(struct parse *p, struct gguf_tensor *t)
{
    TRY(read_string(p, GGUF_TENSOR_NAME_MAX, "a tensor name", &t->name));
    char name[TEXT_NAME_MAX];
    gguf_string_copy(t->name, name, sizeof name);
    t->n_dims = read_u32(&p->r);
    if (p->r.bad)
        return cut_short(p, "the list of tensors");
    if (t->n_dims < 1 || t->n_dims > GGUF_DIMS_MAX)
        return err_set(p->text, ERR_CORRUPT, "%s: the tensor %s has %u dimensions, not 1 to %d",
                       p->g->path, name, t->n_dims, GGUF_DIMS_MAX);
    for (uint32_t i = 0; i < GGUF_DIMS_MAX; i++)
        t->dims[i] = i < t->n_dims ? read_u64(&p->r) : 1;
    t->type = read_u32(&p->r);
    t->offset = read_u64(&p->r); /* still relative to the tensor data */
    if (p->r.bad)
        return cut_short(p, "the list of tensors");
    return check_shape(p, name, t);
}

/* Makes offsets absolute once the header's end is known. */
static enum err place_tensors(struct parse *p)
{
    struct gguf *g = p->g;
    uint64_t mask = g->alignment - 1;
    uint64_t start = (parse_at(p) + mask) & ~mask;
    g->header_bytes = g->n_tensors > 0 ? start : MIN_OF(start, g->file_bytes);
    for (uint32_t i = 0; i < g->n_tensors; i++) {
        struct gguf_tensor *t = &g->tensors[i];
        char name[TEXT_NAME_MAX];
        gguf_string_copy(t->name, name, sizeof name);
        uint64_t end;
        if (t->offset & mask)
            return err_set(p->text, ERR_CORRUPT, "%s: the tensor %s is not aligned to %u bytes",
                           g->path, name, g->alignment);
        if (add_overflows(t->offset, start, &t->offset) ||
            add_overflows(t->offset, t->n_bytes, &end))
            return err_set(p->text, ERR_CORRUPT, "%s: the tensor %s lies beyond any file", g->path,
                           name);
        if (end > g->file_bytes)
            return err_set(p->text, ERR_CORRUPT,
                           "%s: the file is cut short: the tensor %s ends at "
                           "byte %llu, but there are only %llu",
                           g->path, name, (unsigned long long)end,
                           (unsigned long long)g->file_bytes);
    }
    return ERR_OK;
}

static int by_key(const void *a, const void *b)
{
    const struct gguf_pair_ref *x = a, *y = b;
    return gguf_string_cmp(x->at->key, y->at->key);
}

static int by_name(const void *a, const void *b)
{
    const struct gguf_tensor_ref *x = a, *y = b;
    return gguf_string_cmp(x->at->name, y->at->name);
}

static int by_offset(const void *a, const void *b)
{
    const struct gguf_tensor_ref *x = a, *y = b;
    return (x->at->offset > y->at->offset) - (x->at->offset < y->at->offset);
}

static enum err sort_pairs(struct parse *p)
{
    struct gguf *g = p->g;
    g->by_key = calloc((size_t)g->n_pairs + 1, sizeof *g->by_key);
    if (!g->by_key)
        return err_set(p->text, ERR_NO_MEMORY, "%s: no memory for the metadata", g->path);
    for (uint32_t i = 0; i < g->n_pairs; i++)
        g->by_key[i].at = &g->pairs[i];
    qsort(g->by_key, g->n_pairs, sizeof *g->by_key, by_key);
    for (uint32_t i = 1; i < g->n_pairs; i++) {
        if (gguf_string_cmp(g->by_key[i - 1].at->key, g->by_key[i].at->key) == 0) {
            char key[TEXT_NAME_MAX];
            gguf_string_copy(g->by_key[i].at->key, key, sizeof key);
            return err_set(p->text, ERR_CORRUPT, "%s: the metadata key %s occurs twice", g->path,
                           key);
        }
    }
    return ERR_OK;
}

static enum err sort_tensors(struct parse *p)
{
    struct gguf *g = p->g;
    g->by_name = calloc((size_t)g->n_tensors + 1, sizeof *g->by_name);
    if (!g->by_name)
        return err_set(p->text, ERR_NO_MEMORY, "%s: no memory for the tensors", g->path);
    for (uint32_t i = 0; i < g->n_tensors; i++)
        g->by_name[i].at = &g->tensors[i];
    char a[TEXT_NAME_MAX], b[TEXT_NAME_MAX];
    qsort(g->by_name, g->n_tensors, sizeof *g->by_name, by_offset);
    for (uint32_t i = 1; i < g->n_tensors; i++) {
        const struct gguf_tensor *x = g->by_name[i - 1].at, *y = g->by_name[i].at;
        if (x->offset + x->n_bytes > y->offset) {
            gguf_string_copy(x->name, a, sizeof a);
            gguf_string_copy(y->name, b, sizeof b);
            return err_set(p->text, ERR_CORRUPT, "%s: the tensors %s and %s overlap", g->path, a,
                           b);
        }
    }
    qsort(g->by_name, g->n_tensors, sizeof *g->by_name, by_name);
    for (uint32_t i = 1; i < g->n_tensors; i++) {
        if (gguf_string_cmp(g->by_name[i - 1].at->name, g->by_name[i].at->name) == 0) {
            gguf_string_copy(g->by_name[i].at->name, a, sizeof a);
            return err_set(p->text, ERR_CORRUPT, "%s: the tensor %s occurs twice", g->path, a);
        }
    }
    return ERR_OK;
}

static enum err read_alignment(struct parse *p)
{
    struct gguf *g = p->g;
    g->alignment = GGUF_ALIGNMENT_DEFAULT;
    enum err e = gguf_get_u32(g, "general.alignment", &g->alignment);
    if (e == ERR_NOT_FOUND)
        return ERR_OK;
    if (e != ERR_OK || g->alignment < 8 || g->alignment > GGUF_ALIGNMENT_MAX ||
        (g->alignment & (g->alignment - 1)) != 0)
        return err_set(p->text, ERR_CORRUPT,
                       "%s: general.alignment is not a power of two from 8 "
                       "to %d",
                       g->path, GGUF_ALIGNMENT_MAX);
    return ERR_OK;
}

/* Magic, version and the two counts. */
static enum err read_start(struct parse *p, uint64_t *ret_tensors, uint64_t *ret_pairs)
{
    const char *path = p->g->path;
    const uint8_t *magic = read_view(&p->r, 4);
    uint32_t version = read_u32(&p->r);
    if (!magic || memcmp(magic, "GGUF", 4) != 0)
        return err_set(p->text, ERR_CORRUPT, "%s: this is not a GGUF file", path);
    if (p->r.bad)
        return cut_short(p, "the first 24 bytes");
    if ((version & 0xffff) == 0 && version != 0)
        return err_set(p->text, ERR_UNSUPPORTED, "%s: this GGUF file is big-endian", path);
    if (version != 2 && version != 3)
        return err_set(p->text, ERR_UNSUPPORTED, "%s: GGUF version %u, but Covey reads 2 and 3",
                       path, version);
    p->g->version = version;
    *ret_tensors = read_u64(&p->r);
    *ret_pairs = read_u64(&p->r);
    if (p->r.bad)
        return cut_short(p, "the first 24 bytes");
    if (*ret_pairs > GGUF_PAIRS_MAX || *ret_pairs > p->r.left / PAIR_BYTES_MIN)
        return err_set(p->text, ERR_CORRUPT,
                       "%s: the file claims %llu metadata values, more than "
                       "it can hold",
                       path, (unsigned long long)*ret_pairs);
    if (*ret_tensors > GGUF_TENSORS_MAX || *ret_tensors > p->r.left / TENSOR_BYTES_MIN)
        return err_set(p->text, ERR_CORRUPT,
                       "%s: the file claims %llu tensors, more than it can "
                       "hold",
                       path, (unsigned long long)*ret_tensors);
    return ERR_OK;
}

enum err gguf_read(struct gguf *g, struct err_text *text)
{
    struct parse p = {.g = g, .r = reader_of(g->bytes, (size_t)g->file_bytes), .text = text};
    uint64_t n_tensors = 0, n_pairs = 0;
    TRY(read_start(&p, &n_tensors, &n_pairs));
    g->pairs = calloc((size_t)n_pairs + 1, sizeof *g->pairs);
    if (!g->pairs)
        return err_set(text, ERR_NO_MEMORY, "%s: no memory for the metadata", g->path);
    while (g->n_pairs < n_pairs)
        TRY(read_pair(&p, &g->pairs[g->n_pairs++]));
    TRY(sort_pairs(&p));
    TRY(read_alignment(&p));
    g->tensors = calloc((size_t)n_tensors + 1, sizeof *g->tensors);
    if (!g->tensors)
        return err_set(text, ERR_NO_MEMORY, "%s: no memory for the tensors", g->path);
    while (g->n_tensors < n_tensors)
        TRY(read_tensor(&p, &g->tensors[g->n_tensors++]));
    if (parse_at(&p) > GGUF_HEADER_MAX)
        return err_set(text, ERR_LIMIT, "%s: the header is larger than %d bytes", g->path,
                       GGUF_HEADER_MAX);
    TRY(place_tensors(&p));
    return sort_tensors(&p);
}
