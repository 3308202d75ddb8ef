#include "base/id.h"

bool node_id_is_zero(const struct node_id *a)
{
    uint8_t any = 0;
    for (size_t i = 0; i < sizeof a->bytes; i++)
        any |= a->bytes[i];
    return any == 0;
}

void hex_encode(const uint8_t *bytes, size_t n, char *ret)
{
    static const char digits[] = "0123456789abcdef";
    for (size_t i = 0; i < n; i++) {
        ret[2 * i] = digits[bytes[i] >> 4];
        ret[2 * i + 1] = digits[bytes[i] & 15];
    }
    ret[2 * n] = 0;
}

void hex_of_32(const uint8_t bytes[32], char ret[HEX_ID_MAX])
{
    hex_encode(bytes, 32, ret);
}

void short_of_32(const uint8_t bytes[32], char ret[SHORT_ID_MAX])
{
    hex_encode(bytes, (SHORT_ID_MAX - 1) / 2, ret);
}

static int digit_of(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    if (c >= 'A' && c <= 'F')
        return c - 'A' + 10;
    return -1;
}

bool hex_decode(const char *hex, uint8_t *ret, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        int high = digit_of(hex[2 * i]);
        if (high < 0)
            return false;
        int low = digit_of(hex[2 * i + 1]);
        if (low < 0)
            return false;
        ret[i] = (uint8_t)(high << 4 | low);
    }
    return hex[2 * n] == 0;
}
