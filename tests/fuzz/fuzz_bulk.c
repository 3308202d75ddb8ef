/* Bulk connections over a link made of the input: the first byte says which end we are, the rest is
 * frames, each after its length in two bytes. */
#include "transport/bulk.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct tape {
    struct link link;
    const uint8_t *data;
    size_t left;
    uint8_t *frame; /* a copy of exact size */
};

static enum err tape_send(struct link *l, const struct link_piece *pieces, unsigned n)
{
    (void)l;
    volatile uint8_t sum = 0;
    for (unsigned i = 0; i < n; i++) {
        const uint8_t *p = pieces[i].bytes;
        for (size_t k = 0; k < pieces[i].n; k += 97)
            sum = (uint8_t)(sum + p[k]);
    }
    return ERR_OK;
}

static enum err tape_receive(struct link *l, const uint8_t **ret_bytes, size_t *ret_n)
{
    struct tape *t = (struct tape *)l;
    free(t->frame);
    t->frame = NULL;
    if (t->left < 2)
        return ERR_CLOSED;
    size_t n = (size_t)t->data[0] | (size_t)t->data[1] << 8;
    t->data += 2;
    t->left -= 2;
    n = n < t->left ? n : t->left;
    if (posix_memalign((void **)&t->frame, FRAME_ALIGN, n ? n : 1) != 0)
        abort();
    memcpy(t->frame, t->data, n);
    t->data += n;
    t->left -= n;
    *ret_bytes = t->frame;
    *ret_n = n;
    return ERR_OK;
}

static enum err tape_flush(struct link *l)
{
    (void)l;
    return ERR_OK;
}

static void tape_stats(const struct link *l, struct link_stats *ret)
{
    (void)l;
    memset(ret, 0, sizeof *ret);
}

static const struct link_ops tape_ops = {
    .send = tape_send, .receive = tape_receive, .flush = tape_flush, .stats = tape_stats};

static enum err source_read(void *context, const struct hash256 *manifest, uint32_t file,
                            uint64_t offset, size_t n, void *to)
{
    (void)context;
    if (manifest->bytes[0] == 0)
        return ERR_NOT_FOUND;
    if (file >= BULK_FILES_MAX || n > BULK_BLOCK_BYTES || offset > INT64_MAX - n)
        abort();
    memset(to, 1, n);
    return ERR_OK;
}

static enum err source_have(void *context, const struct hash256 *manifest, uint32_t file,
                            uint32_t first, uint32_t n_blocks, uint8_t *ret)
{
    (void)context;
    (void)first;
    if (manifest->bytes[0] == 0)
        return ERR_NOT_FOUND;
    if (file >= BULK_FILES_MAX || n_blocks > BULK_MAP_BLOCKS_MAX)
        abort();
    memset(ret, 0xff, (n_blocks + 7) / 8);
    return ERR_OK;
}

static bool sink_next(void *context, struct bulk_range *ret)
{
    uint32_t *n = context;
    *ret = (struct bulk_range){0, 16, (uint64_t)*n * BULK_BLOCK_BYTES};
    return (*n)++ < 10;
}

static enum err sink_put(void *context, const struct bulk_range *range, const void *bytes,
                         const struct hash256 *hash)
{
    (void)context;
    struct hash256 h = bulk_leaf_hash(bytes, range->n_bytes);
    if (!hash256_eq(&h, hash))
        abort();
    return ERR_OK;
}

static enum err sink_missing(void *context, const struct bulk_range *range, enum err why)
{
    (void)context;
    (void)range;
    if (why == ERR_OK)
        abort();
    return ERR_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0)
        return 0;
    struct tape t = {.link.ops = &tape_ops, .data = data + 1, .left = size - 1};
    struct bulk_source source = {NULL, source_read, source_have};
    uint32_t n = 0;
    struct bulk_sink sink = {&n, {{1}}, sink_next, sink_put, sink_missing};
    struct hash256 manifest = {{1}};
    struct bandwidth b;
    uint8_t bits[4];
    switch (data[0] % 5) {
    case 0:
        (void)bulk_serve(&t.link, &source, -1);
        break;
    case 1:
        (void)bulk_fetch(&t.link, &sink, 1000, -1);
        break;
    case 2:
        (void)bulk_ask_map(&t.link, &manifest, 0, 0, 27, 1000, bits);
        break;
    case 3:
        (void)bandwidth_measure(&t.link, &b);
        break;
    default:
        (void)bandwidth_answer(&t.link, &b);
        break;
    }
    free(t.frame);
    return 0;
}
