#include "proto/random.h"

#include <sodium.h>

static void fill_from_system(void *ctx, uint8_t *to, size_t n)
{
    (void)ctx;
    randombytes_buf(to, n);
}

struct random_source random_source_system(void)
{
    return (struct random_source){fill_from_system, NULL};
}
