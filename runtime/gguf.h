/* GGUF files, versions 2 and 3, little-endian: metadata and tensor directory.
 *
 * The header (everything before the tensor data) stays mapped and is all that this module reads.
 * Tensor bytes need not be present: the file may be sparse as long as it has its full size; a stage
 * maps what it needs with gguf_map. Every number in the file is checked before it is believed, and
 * each failure is a sentence that names the file and what is wrong.
 *
 * Source: the GGUF specification (ggml, docs/gguf.md). Departures: arrays inside arrays are
 * refused, since no model uses them; tensor types whose size is not known here are refused.
 *
 * A mapping fails with SIGBUS when somebody cuts the file short while it is open; whoever owns the
 * process handles that (PROTOCOL 5.2). */
#ifndef COVEY_RUNTIME_GGUF_H
#define COVEY_RUNTIME_GGUF_H

#include "base/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct gguf;

enum {
    GGUF_PAIRS_MAX = 65536,     /* metadata entries */
    GGUF_TENSORS_MAX = 1 << 20, /* a large mixture of experts has some 100,000 */
    GGUF_HEADER_MAX = 1 << 30,  /* bytes; vocabularies take some 10 MB */
    GGUF_KEY_MAX = 65535,       /* bytes of a metadata key, by the specification */
    GGUF_TENSOR_NAME_MAX = 256, /* bytes; the specification says 64, files of today keep it */
    GGUF_DIMS_MAX = 4,
    GGUF_ALIGNMENT_DEFAULT = 32,
    GGUF_ALIGNMENT_MAX = 1 << 20,
};

/* Types of metadata values, by their numbers in the file. */
enum gguf_type {
    GGUF_U8 = 0,
    GGUF_I8 = 1,
    GGUF_U16 = 2,
    GGUF_I16 = 3,
    GGUF_U32 = 4,
    GGUF_I32 = 5,
    GGUF_F32 = 6,
    GGUF_BOOL = 7,
    GGUF_STRING = 8,
    GGUF_ARRAY = 9,
    GGUF_U64 = 10,
    GGUF_I64 = 11,
    GGUF_F64 = 12,
};

/* A view into the file: not NUL-terminated, and may hold any bytes. Lives as long as the gguf. */
struct gguf_string {
    const char *data;
    uint64_t n;
};

struct gguf_array {
    enum gguf_type type; /* of the elements; never GGUF_ARRAY */
    uint64_t n;
    const uint8_t *data;     /* packed, unaligned, little-endian; use the accessors below */
    const uint32_t *offsets; /* [n + 1] of strings in data; NULL for numbers */
};

struct gguf_tensor {
    struct gguf_string name;
    uint32_t type;                /* number of ggml_type: 0 is F32, 1 F16, 3 Q4_1, 8 Q8_0 ... */
    uint32_t n_dims;              /* 1 to GGUF_DIMS_MAX */
    uint64_t dims[GGUF_DIMS_MAX]; /* dims[0] is contiguous; unused ones are 1 */
    uint64_t n_elements;
    uint64_t offset; /* of its first byte in the file */
    uint64_t n_bytes;
};

/* Opens and checks. ERR_IO, ERR_CORRUPT, ERR_UNSUPPORTED, ERR_LIMIT, ERR_NO_MEMORY. */
enum err gguf_open(const char *path, struct gguf **ret, struct err_text *text);
/* The same over bytes in memory, which are borrowed; `name` stands for the file in sentences. */
enum err gguf_open_memory(const void *bytes, size_t n, const char *name, struct gguf **ret,
                          struct err_text *text);
void gguf_free(struct gguf *g);

const char *gguf_path(const struct gguf *g);
uint32_t gguf_version(const struct gguf *g);
uint64_t gguf_file_bytes(const struct gguf *g);
uint64_t gguf_header_bytes(const struct gguf *g); /* where tensor data begins */

/* Metadata by key. ERR_NOT_FOUND, or ERR_INVALID when the value has another type or does not fit;
 * *ret is then untouched. u32 and u64 take any integer type whose value fits, f32 takes F32 and
 * F64. */
enum err gguf_get_u32(const struct gguf *g, const char *key, uint32_t *ret);
enum err gguf_get_u64(const struct gguf *g, const char *key, uint64_t *ret);
enum err gguf_get_i64(const struct gguf *g, const char *key, int64_t *ret);
enum err gguf_get_f32(const struct gguf *g, const char *key, float *ret);
enum err gguf_get_bool(const struct gguf *g, const char *key, bool *ret);
enum err gguf_get_string(const struct gguf *g, const char *key, struct gguf_string *ret);
enum err gguf_get_array(const struct gguf *g, const char *key, struct gguf_array *ret);

/* Enumeration: key and type of entry i < gguf_n_pairs. */
uint32_t gguf_n_pairs(const struct gguf *g);
struct gguf_string gguf_key(const struct gguf *g, uint32_t i);
enum gguf_type gguf_value_type(const struct gguf *g, uint32_t i);

/* Element i of an array. The empty string, and false, when the array is of another type or i is
 * not below n. `int` takes every integer type and BOOL, `float` F32 and F64. */
struct gguf_string gguf_array_string(const struct gguf_array *array, uint64_t i);
bool gguf_array_int(const struct gguf_array *array, uint64_t i, int64_t *ret);
bool gguf_array_float(const struct gguf_array *array, uint64_t i, double *ret);

bool gguf_string_eq(struct gguf_string s, const char *text);
/* Copies into a buffer of n > 0 bytes, cut to fit, control characters replaced by '?',
 * NUL-terminated. */
void gguf_string_copy(struct gguf_string s, char *to, size_t n);

uint32_t gguf_n_tensors(const struct gguf *g);
const struct gguf_tensor *gguf_tensor_at(const struct gguf *g, uint32_t i);    /* file order */
const struct gguf_tensor *gguf_tensor(const struct gguf *g, const char *name); /* NULL: absent */

/* Elements and bytes of one block of a tensor type; false when the type is not known. */
bool gguf_tensor_block(uint32_t type, uint32_t *ret_elements, uint32_t *ret_bytes);
const char *gguf_tensor_type_name(uint32_t type); /* "Q4_1"; "unknown" */

/* A mapped part of the file. `data` points at the byte `offset` that was asked for. */
struct gguf_mapping {
    const uint8_t *data;
    void *base; /* NULL when the bytes are borrowed */
    size_t base_bytes;
};

/* Maps [offset, offset + n) of the file, read-only, for as long as the caller wants (also beyond
 * gguf_free). ERR_INVALID outside the file, ERR_NO_MEMORY, ERR_IO. */
enum err gguf_map(const struct gguf *g, uint64_t offset, uint64_t n, struct gguf_mapping *ret);
void gguf_unmap(struct gguf_mapping *mapping);

#endif
