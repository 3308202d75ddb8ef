/* Frames of the data plane. What decodes must encode again, and then decode to the same. */
#include "transport/frame.h"

#include "base/util.h"

#include <stdio.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void demand(bool so, const char *what)
{
    if (so)
        return;
    (void)fprintf(stderr, "%s\n", what);
    abort();
}

static uint8_t *aligned_copy(const uint8_t *data, size_t size)
{
    /* The frame ends where the allocation ends as nearly as alignment allows. */
    uint8_t *p = NULL;
    if (posix_memalign((void **)&p, FRAME_ALIGN, size ? size : 1) != 0)
        abort();
    if (size)
        memcpy(p, data, size);
    return p;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t *bytes = aligned_copy(data, size);
    struct frame *f = malloc(sizeof *f), *g = malloc(sizeof *g);
    if (!f || !g)
        abort();
    if (frame_decode(bytes, size, f) == ERR_OK) {
        size_t n = frame_encoded_bytes(f), n_again = 0;
        size_t n_payload = f->header.type == FRAME_STEP ? f->header.len - f->header.header_len : 0;
        uint8_t *again = aligned_copy(NULL, 0);
        free(again);
        if (posix_memalign((void **)&again, FRAME_ALIGN, n + n_payload) != 0)
            abort();
        demand(frame_encode(f, again, n, &n_again) == ERR_OK && n_again == n, "does not encode");
        if (n_payload)
            memcpy(again + n, f->step.rows, n_payload);
        demand(frame_decode(again, n + n_payload, g) == ERR_OK, "does not decode again");
        demand(g->header.n_rows == f->header.n_rows || f->header.type != FRAME_STEP, "rows differ");
        free(again);
    }
    free(f);
    free(g);
    free(bytes);
    return 0;
}
