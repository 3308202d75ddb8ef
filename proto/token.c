#include "proto/token.h"

#include <string.h>

#include <sodium.h>

enum { TOKEN_BITS = 8 * TOKEN_BYTES };
static const char alphabet[] = "0123456789ABCDEFGHJKMNPQRSTVWXYZ";

uint16_t token_crc12(const uint8_t *bytes, size_t n)
{
    uint32_t crc = 0;
    for (size_t i = 0; i < 8 * n; i++) {
        uint32_t bit = ((uint32_t)bytes[i / 8] >> (7 - i % 8)) & 1u;
        uint32_t top = (crc >> 11) & 1u;
        crc = (crc << 1) & 0xfff;
        if (bit ^ top)
            crc ^= 0x80f;
    }
    return (uint16_t)crc;
}

/* The i-th group of five bits of token and checksum. */
static unsigned group_at(const uint8_t bytes[TOKEN_BYTES], uint16_t crc, size_t i)
{
    unsigned group = 0;
    for (size_t bit = 5 * i; bit < 5 * i + 5; bit++) {
        unsigned value = bit < TOKEN_BITS ? (unsigned)(bytes[bit / 8] >> (7 - bit % 8)) & 1u
                                          : (unsigned)(crc >> (11 - (bit - TOKEN_BITS))) & 1u;
        group = group << 1 | value;
    }
    return group;
}

void token_format(const struct token *t, char ret[TOKEN_TEXT_MAX])
{
    uint16_t crc = token_crc12(t->bytes, sizeof t->bytes);
    for (size_t i = 0; i < TOKEN_CHARS; i++)
        ret[i] = alphabet[group_at(t->bytes, crc, i)];
    ret[TOKEN_CHARS] = 0;
}

/* -1 for a character outside the alphabet. */
static int value_of(char c)
{
    if (c >= 'a' && c <= 'z')
        c = (char)(c - 'a' + 'A');
    if (c == 'O')
        return 0;
    if (c == 'I' || c == 'L')
        return 1;
    const char *at = c ? strchr(alphabet, c) : NULL;
    return at ? (int)(at - alphabet) : -1;
}

enum err token_parse(const char *text, struct token *ret)
{
    uint8_t bits[(TOKEN_CHARS * 5 + 7) / 8] = {0};
    size_t n = 0;
    for (; *text; text++) {
        if (*text == ' ' || *text == '-' || *text == '\n' || *text == '\r' || *text == '\t')
            continue;
        int value = value_of(*text);
        if (value < 0 || n == TOKEN_CHARS)
            return ERR_INVALID;
        for (size_t k = 0; k < 5; k++) {
            size_t bit = 5 * n + k;
            bits[bit / 8] |= (uint8_t)(((unsigned)value >> (4 - k) & 1u) << (7 - bit % 8));
        }
        n++;
    }
    if (n != TOKEN_CHARS)
        return ERR_INVALID;
    unsigned crc = (unsigned)bits[TOKEN_BYTES] << 4 | bits[TOKEN_BYTES + 1] >> 4;
    if (crc != token_crc12(bits, TOKEN_BYTES))
        return ERR_INVALID;
    memcpy(ret->bytes, bits, sizeof ret->bytes);
    return ERR_OK;
}

void token_psk(const struct token *t, uint8_t ret[32])
{
    static const char label[] = "covey token psk";
    (void)crypto_generichash(ret, 32, (const uint8_t *)label, sizeof label - 1, t->bytes,
                             sizeof t->bytes);
}

void token_tag(const struct token *t, uint8_t ret[TOKEN_TAG_BYTES])
{
    static const char label[] = "covey token tag";
    (void)crypto_generichash(ret, TOKEN_TAG_BYTES, (const uint8_t *)label, sizeof label - 1,
                             t->bytes, sizeof t->bytes);
}
