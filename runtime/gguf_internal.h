/* Shared by gguf.c (access) and gguf_read.c (parsing); nobody else includes it. */
#ifndef COVEY_RUNTIME_GGUF_INTERNAL_H
#define COVEY_RUNTIME_GGUF_INTERNAL_H

#include "runtime/gguf.h"

struct gguf_pair {
    struct gguf_string key;
    enum gguf_type type;
    union {
        uint64_t u; /* unsigned integers and BOOL */
        int64_t i;  /* signed integers */
        double f;   /* F32 and F64 */
        struct gguf_string string;
        struct gguf_array array;
    } value;
};

/* Entries of the sorted indices. */
struct gguf_pair_ref {
    const struct gguf_pair *at;
};
struct gguf_tensor_ref {
    const struct gguf_tensor *at;
};

struct gguf {
    char *path;
    int fd;               /* -1 over memory */
    const uint8_t *bytes; /* the header is mapped; over memory, everything is there */
    size_t mapped_bytes;  /* 0 over memory */
    uint64_t file_bytes, header_bytes;
    uint32_t version, alignment;
    uint32_t n_pairs, n_tensors;
    struct gguf_pair *pairs;         /* file order */
    struct gguf_tensor *tensors;     /* file order */
    struct gguf_pair_ref *by_key;    /* sorted */
    struct gguf_tensor_ref *by_name; /* sorted */
};

/* Parses g->bytes[0, g->file_bytes) and fills everything else. On failure the caller frees g. */
enum err gguf_read(struct gguf *g, struct err_text *text);
int gguf_string_cmp(struct gguf_string a, struct gguf_string b);

/* The lower n_bits of v as a number in two's complement. */
static inline int64_t sign_extend(uint64_t v, unsigned n_bits)
{
    uint64_t sign = UINT64_C(1) << (n_bits - 1);
    return (int64_t)((v ^ sign) - sign);
}

#endif
