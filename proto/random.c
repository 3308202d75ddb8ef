#include "proto/random.h"

#include <assert.h>

#include <sodium.h>

static void fill_from_system(void *ctx, uint8_t *to, size_t n)
{
    (void)ctx;
    randombytes_buf(to, n);
}

struct random_source random_source_system(void)
{
    int ready = sodium_init(); /* may be called again; the first call opens the generator */
    assert(ready >= 0);
    return (struct random_source){fill_from_system, NULL};
}
