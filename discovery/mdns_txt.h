/* The TXT record of a node (RFC 6763, section 6): v protocol version, n node name, t cluster tag
 * and i invite tags, both in hex. Whoever is on the network can write anything into it: it
 * introduces, it proves nothing. Pure. */
#ifndef COVEY_DISCOVERY_MDNS_TXT_H
#define COVEY_DISCOVERY_MDNS_TXT_H

#include "base/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    MDNS_VERSION = 1,
    MDNS_NAME_MAX = 64,
    MDNS_TAG_MAX = 64,        /* bytes of a tag */
    MDNS_TXT_BYTES_MAX = 512, /* of a record that we build */
    MDNS_TXT_READ_MAX = 4096, /* of one that we look at */
};

struct mdns_txt {
    uint16_t version;
    char name[MDNS_NAME_MAX]; /* valid UTF-8 without control characters, or "" */
    uint8_t cluster_tag[MDNS_TAG_MAX], invite_tag[MDNS_TAG_MAX];
    uint8_t n_cluster_tag, n_invite_tag;
};

/* Reads the record's data: length-prefixed strings. Keys in either case, the first of equal ones
 * counts, unknown ones are skipped; a name or tag that makes no sense counts as absent.
 * ERR_CORRUPT: strings that overrun, or no version. ERR_LIMIT: longer than MDNS_TXT_READ_MAX. */
enum err mdns_txt_parse(const uint8_t *bytes, size_t n, struct mdns_txt *ret);
/* The record's data; the length. */
size_t mdns_txt_build(const struct mdns_txt *txt, uint8_t ret[MDNS_TXT_BYTES_MAX]);
bool mdns_txt_eq(const struct mdns_txt *a, const struct mdns_txt *b);
/* Valid UTF-8 without control characters. */
bool mdns_text_ok(const char *bytes, size_t n);

#endif
