/* Messages of the mDNS child, which anybody on the network may have taken over: decoded, applied to
 * the table of what is known, and read out of it. What is accepted is written back as the same. */
#include "discovery/mdns_table.h"
#include "discovery/mdns_wire.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void read_out(struct mdns_table *t, uint64_t now_us)
{
    struct mdns_record record;
    while (mdns_table_next(t, now_us, &record)) {
        if (record.n_addresses > MDNS_ADDRESSES_MAX || (!record.gone && record.n_addresses == 0) ||
            !mdns_text_ok(record.instance, strlen(record.instance)))
            abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct mdns_table *t = NULL;
    uint64_t now_us = 1;
    if (mdns_table_new(&t) != ERR_OK)
        return 0;
    mdns_table_set_own(t, "covey-00000000");
    for (size_t at = 0; at < size; now_us += 20 * 1000) {
        struct mdns_message m, back;
        size_t used = 0, used_back = 0;
        uint8_t written[MDNS_MESSAGE_MAX];
        if (mdns_message_decode(data + at, size - at, &m, &used) != ERR_OK)
            break;
        size_t n = mdns_message_encode(&m, written);
        if (mdns_message_decode(written, n, &back, &used_back) != ERR_OK || used_back != n ||
            memcmp(&m, &back, sizeof m) != 0)
            abort();
        at += used;
        if (m.type == MDNS_SIGHTING || m.type == MDNS_LOST)
            (void)mdns_table_apply(t, &m, "eth0", m.interface == 1, now_us);
        if (m.type == MDNS_STARTED)
            mdns_table_restarted(t, now_us);
        read_out(t, now_us);
    }
    read_out(t, now_us + 60 * 1000 * 1000);
    mdns_table_free(t);
    return 0;
}
