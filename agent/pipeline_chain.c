/* The hash chain over tokens by which KV is known (PROTOCOL 3.12). */
#include "agent/pipeline.h"

#include "base/buf.h"

#include <assert.h>
#include <sodium.h>

struct hash128 pipeline_chain_first(const struct plan *plan)
{
    static const char label[] = "covey chain 1";
    uint8_t bytes[sizeof label + sizeof plan->model.bytes + 8];
    struct writer w = writer_of(bytes, sizeof bytes);
    write_bytes(&w, label, sizeof label);
    write_bytes(&w, plan->model.bytes, sizeof plan->model.bytes);
    write_u32(&w, plan->arithmetic_version);
    write_u8(&w, plan->precision);
    write_u8(&w, plan->backend);
    assert(!w.bad);
    struct hash128 hash;
    (void)crypto_generichash(hash.bytes, sizeof hash.bytes, bytes, w.len, NULL, 0);
    return hash;
}

struct hash128 pipeline_chain_next(const struct hash128 *hash, int32_t token_id)
{
    uint8_t bytes[sizeof hash->bytes + 4];
    struct writer w = writer_of(bytes, sizeof bytes);
    write_bytes(&w, hash->bytes, sizeof hash->bytes);
    write_u32(&w, (uint32_t)token_id);
    struct hash128 next;
    (void)crypto_generichash(next.bytes, sizeof next.bytes, bytes, sizeof bytes, NULL, 0);
    return next;
}
