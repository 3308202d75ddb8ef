/* The token of `covey invite`: 128 random bits and a checksum, as 28 characters (PROTOCOL 1.6).
 *
 * Alphabet: Crockford's base32 (0-9, A-Z without I, L, O, U), because people read tokens aloud.
 * When read, case does not matter, O is 0, I and L are 1, spaces and hyphens are skipped. Checksum:
 * CRC-12 (polynomial 0x80f, as in DECT), which notices every single wrong character and every swap
 * of neighbours; it keeps nobody out, that is the work of the 128 bits. */
#ifndef COVEY_PROTO_TOKEN_H
#define COVEY_PROTO_TOKEN_H

#include "base/err.h"

#include <stddef.h>
#include <stdint.h>

enum {
    TOKEN_BYTES = 16,
    TOKEN_CHARS = 28,
    TOKEN_TEXT_MAX = TOKEN_CHARS + 1,
    TOKEN_TAG_BYTES = 16, /* of the invite tag */
};

struct token {
    uint8_t bytes[TOKEN_BYTES];
};

void token_format(const struct token *t, char ret[TOKEN_TEXT_MAX]);
/* ERR_INVALID: wrong length, a character outside the alphabet, or a typo. */
enum err token_parse(const char *text, struct token *ret);

/* The pre-shared key of the joiner's handshake, and the tag that the issuer announces while the
 * token is open: neither gives away the token. */
void token_psk(const struct token *t, uint8_t ret[32]);
void token_tag(const struct token *t, uint8_t ret[TOKEN_TAG_BYTES]);

/* CRC-12 as above, most significant bit first. */
uint16_t token_crc12(const uint8_t *bytes, size_t n);

#endif
