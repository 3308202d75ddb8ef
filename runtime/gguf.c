/* Opening, access and mapping of GGUF files; the parser is gguf_read.c. */
#include "runtime/gguf_internal.h"

#include "base/util.h"

#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <math.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

struct tensor_type {
    uint32_t type;
    char name[8];
    uint16_t elements, bytes; /* of one block */
};

/* Numbers, names and sizes as in ggml.h and ggml-common.h. */
static const struct tensor_type tensor_types[] = {
    {0, "F32", 1, 4},         {1, "F16", 1, 2},         {2, "Q4_0", 32, 18},
    {3, "Q4_1", 32, 20},      {6, "Q5_0", 32, 22},      {7, "Q5_1", 32, 24},
    {8, "Q8_0", 32, 34},      {10, "Q2_K", 256, 84},    {11, "Q3_K", 256, 110},
    {12, "Q4_K", 256, 144},   {13, "Q5_K", 256, 176},   {14, "Q6_K", 256, 210},
    {16, "IQ2_XXS", 256, 66}, {17, "IQ2_XS", 256, 74},  {18, "IQ3_XXS", 256, 98},
    {19, "IQ1_S", 256, 50},   {20, "IQ4_NL", 32, 18},   {21, "IQ3_S", 256, 110},
    {22, "IQ2_S", 256, 82},   {23, "IQ4_XS", 256, 136}, {24, "I8", 1, 1},
    {25, "I16", 1, 2},        {26, "I32", 1, 4},        {27, "I64", 1, 8},
    {28, "F64", 1, 8},        {29, "IQ1_M", 256, 56},   {30, "BF16", 1, 2},
    {34, "TQ1_0", 256, 54},   {35, "TQ2_0", 256, 66},   {39, "MXFP4", 32, 17},
};

static const struct tensor_type *find_type(uint32_t type)
{
    for (size_t i = 0; i < ARRAY_LEN(tensor_types); i++)
        if (tensor_types[i].type == type)
            return &tensor_types[i];
    return NULL;
}

bool gguf_tensor_block(uint32_t type, uint32_t *ret_elements, uint32_t *ret_bytes)
{
    const struct tensor_type *t = find_type(type);
    if (!t)
        return false;
    *ret_elements = t->elements;
    *ret_bytes = t->bytes;
    return true;
}

const char *gguf_tensor_type_name(uint32_t type)
{
    const struct tensor_type *t = find_type(type);
    return t ? t->name : "unknown";
}

int gguf_string_cmp(struct gguf_string a, struct gguf_string b)
{
    size_t n = (size_t)MIN_OF(a.n, b.n);
    int order = n > 0 ? memcmp(a.data, b.data, n) : 0;
    return order != 0 ? order : (a.n > b.n) - (a.n < b.n);
}

bool gguf_string_eq(struct gguf_string s, const char *text)
{
    return s.n == strlen(text) && (s.n == 0 || memcmp(s.data, text, (size_t)s.n) == 0);
}

void gguf_string_copy(struct gguf_string s, char *to, size_t n)
{
    size_t take = (size_t)MIN_OF(s.n, (uint64_t)(n - 1));
    for (size_t i = 0; i < take; i++) {
        to[i] = s.data[i];
        if ((unsigned char)to[i] < 32 || to[i] == 127)
            to[i] = '?';
    }
    to[take] = '\0';
}

static enum err new_gguf(const char *name, struct gguf **ret)
{
    struct gguf *g = calloc(1, sizeof *g);
    if (!g)
        return ERR_NO_MEMORY;
    g->fd = -1;
    g->path = strdup(name);
    if (!g->path) {
        free(g);
        return ERR_NO_MEMORY;
    }
    *ret = g;
    return ERR_OK;
}

void gguf_free(struct gguf *g)
{
    if (!g)
        return;
    for (uint32_t i = 0; g->pairs && i < g->n_pairs; i++)
        if (g->pairs[i].type == GGUF_ARRAY)
            free((void *)(uintptr_t)g->pairs[i].value.array.offsets);
    free(g->pairs);
    free(g->tensors);
    free(g->by_key);
    free(g->by_name);
    if (g->mapped_bytes > 0)
        (void)munmap((void *)(uintptr_t)g->bytes, g->mapped_bytes);
    closep(&g->fd);
    free(g->path);
    free(g);
}

/* The whole file is mapped for parsing; what follows the header is given back afterwards, because
 * parts that are absent must not stay mapped. */
static enum err map_and_read(struct gguf *g, struct err_text *text)
{
    void *base = mmap(NULL, (size_t)g->file_bytes, PROT_READ, MAP_SHARED, g->fd, 0);
    if (base == MAP_FAILED)
        return err_set(text, ERR_IO, "%s: cannot map the file: %s", g->path, strerror(errno));
    g->bytes = base;
    g->mapped_bytes = (size_t)g->file_bytes;
    TRY(gguf_read(g, text));
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t keep = ((size_t)g->header_bytes + page - 1) / page * page;
    if (keep < g->mapped_bytes) {
        (void)munmap((uint8_t *)base + keep, g->mapped_bytes - keep);
        g->mapped_bytes = keep;
    }
    return ERR_OK;
}

static enum err open_file(struct gguf *g, struct err_text *text)
{
    const char *path = g->path;
    g->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO would have us wait for ever */
    struct stat st;
    if (g->fd < 0 || fstat(g->fd, &st) != 0)
        return err_set(text, errno == ENOENT ? ERR_NOT_FOUND : ERR_IO,
                       "%s: cannot open the file: %s", path, strerror(errno));
    if (!S_ISREG(st.st_mode))
        return err_set(text, ERR_INVALID, "%s: this is not a regular file", path);
    if (st.st_size < 24)
        return err_set(text, ERR_CORRUPT, "%s: this is not a GGUF file (%lld bytes)", path,
                       (long long)st.st_size);
    if ((uint64_t)st.st_size > SIZE_MAX / 2)
        return err_set(text, ERR_LIMIT, "%s: the file is too large to map", path);
    g->file_bytes = (uint64_t)st.st_size;
    return map_and_read(g, text);
}

enum err gguf_open(const char *path, struct gguf **ret, struct err_text *text)
{
    struct gguf *g = NULL;
    if (new_gguf(path, &g) != ERR_OK)
        return err_set(text, ERR_NO_MEMORY, "%s: no memory to open the file", path);
    enum err e = open_file(g, text);
    if (e != ERR_OK)
        gguf_free(g);
    else
        *ret = g;
    return e;
}

enum err gguf_open_memory(const void *bytes, size_t n, const char *name, struct gguf **ret,
                          struct err_text *text)
{
    struct gguf *g = NULL;
    if (new_gguf(name, &g) != ERR_OK)
        return err_set(text, ERR_NO_MEMORY, "%s: no memory to open the file", name);
    g->bytes = bytes;
    g->file_bytes = n;
    enum err e = gguf_read(g, text);
    if (e != ERR_OK)
        gguf_free(g);
    else
        *ret = g;
    return e;
}

const char *gguf_path(const struct gguf *g)
{
    return g->path;
}

uint32_t gguf_version(const struct gguf *g)
{
    return g->version;
}

uint64_t gguf_file_bytes(const struct gguf *g)
{
    return g->file_bytes;
}

uint64_t gguf_header_bytes(const struct gguf *g)
{
    return g->header_bytes;
}

uint32_t gguf_n_pairs(const struct gguf *g)
{
    return g->n_pairs;
}

struct gguf_string gguf_key(const struct gguf *g, uint32_t i)
{
    return g->pairs[i].key;
}

enum gguf_type gguf_value_type(const struct gguf *g, uint32_t i)
{
    return g->pairs[i].type;
}

static const struct gguf_pair *find_pair(const struct gguf *g, const char *key)
{
    struct gguf_string want = {key, strlen(key)};
    uint32_t low = 0, high = g->n_pairs;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        int order = gguf_string_cmp(g->by_key[middle].at->key, want);
        if (order == 0)
            return g->by_key[middle].at;
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

static bool is_unsigned(enum gguf_type type)
{
    return type == GGUF_U8 || type == GGUF_U16 || type == GGUF_U32 || type == GGUF_U64;
}

static bool is_signed(enum gguf_type type)
{
    return type == GGUF_I8 || type == GGUF_I16 || type == GGUF_I32 || type == GGUF_I64;
}

enum err gguf_get_u64(const struct gguf *g, const char *key, uint64_t *ret)
{
    const struct gguf_pair *pair = find_pair(g, key);
    if (!pair)
        return ERR_NOT_FOUND;
    if (is_unsigned(pair->type))
        *ret = pair->value.u;
    else if (is_signed(pair->type) && pair->value.i >= 0)
        *ret = (uint64_t)pair->value.i;
    else
        return ERR_INVALID;
    return ERR_OK;
}

enum err gguf_get_u32(const struct gguf *g, const char *key, uint32_t *ret)
{
    uint64_t v;
    TRY(gguf_get_u64(g, key, &v));
    if (v > UINT32_MAX)
        return ERR_INVALID;
    *ret = (uint32_t)v;
    return ERR_OK;
}

enum err gguf_get_i64(const struct gguf *g, const char *key, int64_t *ret)
{
    const struct gguf_pair *pair = find_pair(g, key);
    if (!pair)
        return ERR_NOT_FOUND;
    if (is_signed(pair->type))
        *ret = pair->value.i;
    else if (is_unsigned(pair->type) && pair->value.u <= INT64_MAX)
        *ret = (int64_t)pair->value.u;
    else
        return ERR_INVALID;
    return ERR_OK;
}

enum err gguf_get_f32(const struct gguf *g, const char *key, float *ret)
{
    const struct gguf_pair *pair = find_pair(g, key);
    if (!pair)
        return ERR_NOT_FOUND;
    if (pair->type != GGUF_F32 && pair->type != GGUF_F64)
        return ERR_INVALID;
    if (isfinite(pair->value.f) && fabs(pair->value.f) > (double)FLT_MAX)
        return ERR_INVALID;
    *ret = (float)pair->value.f;
    return ERR_OK;
}

enum err gguf_get_bool(const struct gguf *g, const char *key, bool *ret)
{
    const struct gguf_pair *pair = find_pair(g, key);
    if (!pair)
        return ERR_NOT_FOUND;
    if (pair->type != GGUF_BOOL)
        return ERR_INVALID;
    *ret = pair->value.u != 0;
    return ERR_OK;
}

enum err gguf_get_string(const struct gguf *g, const char *key, struct gguf_string *ret)
{
    const struct gguf_pair *pair = find_pair(g, key);
    if (!pair)
        return ERR_NOT_FOUND;
    if (pair->type != GGUF_STRING)
        return ERR_INVALID;
    *ret = pair->value.string;
    return ERR_OK;
}

enum err gguf_get_array(const struct gguf *g, const char *key, struct gguf_array *ret)
{
    const struct gguf_pair *pair = find_pair(g, key);
    if (!pair)
        return ERR_NOT_FOUND;
    if (pair->type != GGUF_ARRAY)
        return ERR_INVALID;
    *ret = pair->value.array;
    return ERR_OK;
}

struct gguf_string gguf_array_string(const struct gguf_array *array, uint64_t i)
{
    if (array->type != GGUF_STRING || i >= array->n)
        return (struct gguf_string){"", 0};
    uint32_t from = array->offsets[i] + 8; /* behind the length */
    return (struct gguf_string){(const char *)array->data + from, array->offsets[i + 1] - from};
}

/* n bytes, little-endian, at element i. */
static uint64_t element_bits(const struct gguf_array *array, uint64_t i, uint32_t n)
{
    uint64_t bits = 0;
    const uint8_t *p = array->data + i * n;
    for (uint32_t k = n; k > 0; k--)
        bits = bits << 8 | p[k - 1];
    return bits;
}

bool gguf_array_int(const struct gguf_array *array, uint64_t i, int64_t *ret)
{
    if (i >= array->n)
        return false;
    uint64_t u;
    switch (array->type) {
    case GGUF_U8:
    case GGUF_BOOL:
        *ret = (int64_t)element_bits(array, i, 1);
        return true;
    case GGUF_I8:
        *ret = sign_extend(element_bits(array, i, 1), 8);
        return true;
    case GGUF_U16:
        *ret = (int64_t)element_bits(array, i, 2);
        return true;
    case GGUF_I16:
        *ret = sign_extend(element_bits(array, i, 2), 16);
        return true;
    case GGUF_U32:
        *ret = (int64_t)element_bits(array, i, 4);
        return true;
    case GGUF_I32:
        *ret = sign_extend(element_bits(array, i, 4), 32);
        return true;
    case GGUF_U64:
        u = element_bits(array, i, 8);
        if (u > INT64_MAX)
            return false;
        *ret = (int64_t)u;
        return true;
    case GGUF_I64:
        *ret = (int64_t)element_bits(array, i, 8);
        return true;
    case GGUF_F32:
    case GGUF_F64:
    case GGUF_STRING:
    case GGUF_ARRAY:
        break;
    }
    return false;
}

bool gguf_array_float(const struct gguf_array *array, uint64_t i, double *ret)
{
    if (i >= array->n)
        return false;
    if (array->type == GGUF_F32) {
        uint32_t bits = (uint32_t)element_bits(array, i, 4);
        float f;
        memcpy(&f, &bits, sizeof f);
        *ret = (double)f;
        return true;
    }
    if (array->type == GGUF_F64) {
        uint64_t bits = element_bits(array, i, 8);
        memcpy(ret, &bits, sizeof *ret);
        return true;
    }
    return false;
}

uint32_t gguf_n_tensors(const struct gguf *g)
{
    return g->n_tensors;
}

const struct gguf_tensor *gguf_tensor_at(const struct gguf *g, uint32_t i)
{
    return &g->tensors[i];
}

const struct gguf_tensor *gguf_tensor(const struct gguf *g, const char *name)
{
    struct gguf_string want = {name, strlen(name)};
    uint32_t low = 0, high = g->n_tensors;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        int order = gguf_string_cmp(g->by_name[middle].at->name, want);
        if (order == 0)
            return g->by_name[middle].at;
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

enum err gguf_map(const struct gguf *g, uint64_t offset, uint64_t n, struct gguf_mapping *ret)
{
    if (n == 0 || offset > g->file_bytes || n > g->file_bytes - offset)
        return ERR_INVALID;
    if (g->fd < 0) {
        *ret = (struct gguf_mapping){.data = g->bytes + offset};
        return ERR_OK;
    }
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t start = offset / page * page;
    size_t bytes = (size_t)(n + (offset - start));
    void *base = mmap(NULL, bytes, PROT_READ, MAP_SHARED, g->fd, (off_t)start);
    if (base == MAP_FAILED)
        return errno == ENOMEM ? ERR_NO_MEMORY : ERR_IO;
    *ret = (struct gguf_mapping){
        .data = (const uint8_t *)base + (offset - start), .base = base, .base_bytes = bytes};
    return ERR_OK;
}

void gguf_unmap(struct gguf_mapping *mapping)
{
    if (mapping->base)
        (void)munmap(mapping->base, mapping->base_bytes);
    *mapping = (struct gguf_mapping){0};
}
