/* Identifiers that every room speaks: nodes (Ed25519 public keys), requests, 256-bit hashes. */
#ifndef COVEY_BASE_ID_H
#define COVEY_BASE_ID_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct node_id {
    uint8_t bytes[32];
};
struct hash256 {
    uint8_t bytes[32];
};
struct request_id {
    uint8_t bytes[16];
};

static inline int node_id_cmp(const struct node_id *a, const struct node_id *b)
{
    return memcmp(a->bytes, b->bytes, sizeof a->bytes);
}
static inline bool node_id_eq(const struct node_id *a, const struct node_id *b)
{
    return node_id_cmp(a, b) == 0;
}
static inline bool hash256_eq(const struct hash256 *a, const struct hash256 *b)
{
    return memcmp(a->bytes, b->bytes, sizeof a->bytes) == 0;
}
static inline bool request_id_eq(const struct request_id *a, const struct request_id *b)
{
    return memcmp(a->bytes, b->bytes, sizeof a->bytes) == 0;
}
bool node_id_is_zero(const struct node_id *a);

enum { HEX_ID_MAX = 65, SHORT_ID_MAX = 11 };
/* 64 lower-case hex digits and a NUL. */
void hex_of_32(const uint8_t bytes[32], char ret[HEX_ID_MAX]);
/* The first ten hex digits, what people see. */
void short_of_32(const uint8_t bytes[32], char ret[SHORT_ID_MAX]);
/* Exactly 2n hex digits (either case); false otherwise. */
bool hex_decode(const char *hex, uint8_t *ret, size_t n);
void hex_encode(const uint8_t *bytes, size_t n, char *ret);

#endif
