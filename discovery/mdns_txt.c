#include "discovery/mdns_txt.h"

#include "base/buf.h"
#include "base/id.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

/* The length of the UTF-8 sequence at p (RFC 3629), 0 when it is none; its value. */
static size_t utf8_at(const uint8_t *p, size_t n, uint32_t *ret)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    size_t len = p[0] < 0x80             ? 1
                 : (p[0] & 0xe0) == 0xc0 ? 2
                 : (p[0] & 0xf0) == 0xe0 ? 3
                 : (p[0] & 0xf8) == 0xf0 ? 4
                                         : 0;
    if (len == 0 || len > n)
        return 0;
    uint32_t v = len == 1 ? p[0] : p[0] & (0x7fu >> len);
    for (size_t i = 1; i < len; i++) {
        if ((p[i] & 0xc0) != 0x80)
            return 0;
        v = v << 6 | (p[i] & 0x3fu);
    }
    if (v < least[len] || v > 0x10ffff || (v >= 0xd800 && v < 0xe000))
        return 0;
    *ret = v;
    return len;
}

bool mdns_text_ok(const char *bytes, size_t n)
{
    const uint8_t *p = (const uint8_t *)bytes;
    for (size_t at = 0; at < n;) {
        uint32_t v = 0;
        size_t len = utf8_at(p + at, n - at, &v);
        if (len == 0 || v < 0x20 || (v >= 0x7f && v < 0xa0))
            return false;
        at += len;
    }
    return true;
}

static uint8_t read_tag(const uint8_t *value, size_t n, uint8_t ret[MDNS_TAG_MAX])
{
    char hex[2 * MDNS_TAG_MAX + 1];
    if (n % 2 != 0 || n / 2 > MDNS_TAG_MAX)
        return 0;
    memcpy(hex, value, n);
    hex[n] = 0;
    uint8_t tag[MDNS_TAG_MAX];
    if (n == 0 || !hex_decode(hex, tag, n / 2))
        return 0;
    memcpy(ret, tag, n / 2);
    return (uint8_t)(n / 2);
}

static bool read_version(const uint8_t *value, size_t n, uint16_t *ret)
{
    uint32_t v = 0;
    if (n == 0 || n > 4)
        return false;
    for (size_t i = 0; i < n; i++) {
        if (value[i] < '0' || value[i] > '9')
            return false;
        v = v * 10 + (uint32_t)(value[i] - '0');
    }
    *ret = (uint16_t)v;
    return v > 0;
}

enum seen { SEEN_VERSION = 1, SEEN_NAME = 2, SEEN_CLUSTER = 4, SEEN_INVITE = 8 };

static unsigned key_of(uint8_t letter)
{
    switch (letter | 0x20) {
    case 'v':
        return SEEN_VERSION;
    case 'n':
        return SEEN_NAME;
    case 't':
        return SEEN_CLUSTER;
    case 'i':
        return SEEN_INVITE;
    default:
        return 0;
    }
}

enum err mdns_txt_parse(const uint8_t *bytes, size_t n, struct mdns_txt *ret)
{
    struct mdns_txt t = {0};
    unsigned seen = 0;
    if (n > MDNS_TXT_READ_MAX)
        return ERR_LIMIT;
    struct reader r = reader_of(bytes, n);
    while (r.left > 0) {
        size_t len = read_u8(&r);
        const uint8_t *s = read_view(&r, len);
        if (r.bad)
            return ERR_CORRUPT;
        unsigned key = len >= 2 && s[1] == '=' ? key_of(s[0]) : 0;
        if (key == 0 || (seen & key))
            continue;
        seen |= key;
        const uint8_t *value = s + 2;
        size_t k = len - 2;
        if (key == SEEN_VERSION && !read_version(value, k, &t.version))
            return ERR_CORRUPT;
        if (key == SEEN_NAME && k < MDNS_NAME_MAX && mdns_text_ok((const char *)value, k))
            memcpy(t.name, value, k);
        if (key == SEEN_CLUSTER)
            t.n_cluster_tag = read_tag(value, k, t.cluster_tag);
        if (key == SEEN_INVITE)
            t.n_invite_tag = read_tag(value, k, t.invite_tag);
    }
    if (!(seen & SEEN_VERSION))
        return ERR_CORRUPT;
    *ret = t;
    return ERR_OK;
}

static void put(struct writer *w, char key, const char *value, size_t n)
{
    write_u8(w, (uint8_t)(n + 2));
    write_u8(w, (uint8_t)key);
    write_u8(w, '=');
    write_bytes(w, value, n);
}

static void put_tag(struct writer *w, char key, const uint8_t *tag, size_t n)
{
    char hex[2 * MDNS_TAG_MAX + 1];
    if (n == 0 || n > MDNS_TAG_MAX)
        return;
    hex_encode(tag, n, hex);
    put(w, key, hex, 2 * n);
}

size_t mdns_txt_build(const struct mdns_txt *txt, uint8_t ret[MDNS_TXT_BYTES_MAX])
{
    struct writer w = writer_of(ret, MDNS_TXT_BYTES_MAX);
    char version[8];
    int n = snprintf(version, sizeof version, "%u", txt->version);
    put(&w, 'v', version, (size_t)n);
    if (txt->name[0])
        put(&w, 'n', txt->name, strnlen(txt->name, MDNS_NAME_MAX - 1));
    put_tag(&w, 't', txt->cluster_tag, txt->n_cluster_tag);
    put_tag(&w, 'i', txt->invite_tag, txt->n_invite_tag);
    return w.len;
}

bool mdns_txt_eq(const struct mdns_txt *a, const struct mdns_txt *b)
{
    return a->version == b->version && strcmp(a->name, b->name) == 0 &&
           a->n_cluster_tag == b->n_cluster_tag && a->n_invite_tag == b->n_invite_tag &&
           memcmp(a->cluster_tag, b->cluster_tag, a->n_cluster_tag) == 0 &&
           memcmp(a->invite_tag, b->invite_tag, a->n_invite_tag) == 0;
}
