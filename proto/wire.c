#include "proto/wire.h"

#include <stdlib.h>
#include <string.h>

enum err outbox_push(struct outbox *box, const struct wire_message *m)
{
    size_t limit = m->way == WAY_DATAGRAM ? DATAGRAM_PAYLOAD_MAX : FRAME_PAYLOAD_MAX;
    if (m->len > limit || box->n >= OUTBOX_MESSAGES_MAX || box->n_bytes + m->len > OUTBOX_BYTES_MAX)
        return ERR_LIMIT;
    if (box->n == box->cap) {
        uint32_t cap = box->cap ? box->cap * 2 : 16;
        struct wire_message *messages = realloc(box->messages, cap * sizeof *messages);
        if (!messages)
            return ERR_NO_MEMORY;
        box->messages = messages;
        box->cap = cap;
    }
    uint8_t *bytes = malloc(m->len ? m->len : 1);
    if (!bytes)
        return ERR_NO_MEMORY;
    if (m->len)
        memcpy(bytes, m->bytes, m->len);
    struct wire_message *slot = &box->messages[box->n++];
    *slot = *m;
    slot->bytes = bytes;
    box->n_bytes += m->len;
    return ERR_OK;
}

void outbox_clear(struct outbox *box)
{
    for (uint32_t i = 0; i < box->n; i++)
        free(box->messages[i].bytes);
    box->n = 0;
    box->n_bytes = 0;
}

void outbox_deinit(struct outbox *box)
{
    if (!box)
        return;
    outbox_clear(box);
    free(box->messages);
    *box = OUTBOX_INIT;
}
