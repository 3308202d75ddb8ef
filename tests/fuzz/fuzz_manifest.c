/* A manifest from a peer. What is taken must encode to the same model again. */
#include "agent/manifest.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct manifest *m = NULL, *again = NULL;
    if (manifest_decode(data, size, &m) != ERR_OK)
        return 0;
    struct buf b = BUF_INIT(MANIFEST_BYTES_MAX);
    if (manifest_encode(m, &b) != ERR_OK || manifest_decode(b.data, b.len, &again) != ERR_OK)
        abort();
    if (!hash256_eq(&m->id, &again->id) || m->n_files != again->n_files)
        abort();
    manifest_free(again);
    manifest_free(m);
    buf_deinit(&b);
    return 0;
}
