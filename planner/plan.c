/* Plans as values: their seal (BLAKE2b-256, RFC 7693, through libsodium) over a canonical
 * little-endian encoding of every field but the hash, and the checks that a plan from outside must
 * pass. No I/O, no allocation. */
#include "planner/plan.h"

#include "base/buf.h"

#include <math.h>
#include <sodium.h>
#include <string.h>

enum {
    /* A canonical plan: the fixed part, the name, and 64 bytes for each stage. */
    CANONICAL_MAX = 512 + PLAN_STAGES_MAX * 64,
};

static const char SEAL_LABEL[16] = "covey plan v1";

static void write_double(struct writer *w, double v)
{
    uint64_t bits;
    memcpy(&bits, &v, sizeof bits);
    write_u64(w, bits);
}

static void seal(const struct plan *p, struct hash256 *ret)
{
    uint8_t bytes[CANONICAL_MAX];
    struct writer w = writer_of(bytes, sizeof bytes);
    write_bytes(&w, SEAL_LABEL, sizeof SEAL_LABEL);
    write_u64(&w, p->epoch.term);
    write_bytes(&w, p->epoch.planner.bytes, sizeof p->epoch.planner.bytes);
    write_u64(&w, p->epoch.sequence);
    write_bytes(&w, p->model.bytes, sizeof p->model.bytes);
    size_t name_len = strnlen(p->model_name, MODEL_NAME_MAX);
    write_u32(&w, (uint32_t)name_len);
    write_bytes(&w, p->model_name, name_len);
    write_u32(&w, p->n_layers);
    write_u32(&w, p->context);
    write_u8(&w, p->precision);
    write_u8(&w, p->backend);
    write_u32(&w, p->arithmetic_version);
    write_double(&w, p->predicted_token_us);
    write_double(&w, p->predicted_prefill_us);
    uint32_t n = p->n_stages < PLAN_STAGES_MAX ? p->n_stages : PLAN_STAGES_MAX;
    write_u32(&w, n);
    for (uint32_t i = 0; i < n; i++) {
        const struct plan_stage *s = &p->stages[i];
        write_bytes(&w, s->node.bytes, sizeof s->node.bytes);
        write_u64(&w, s->boot_id);
        write_u32(&w, s->first_layer);
        write_u32(&w, s->n_layers);
        write_u64(&w, s->memory_bytes);
    }
    if (p->kv_positions > 0) /* plans of earlier versions have none */
        write_u32(&w, p->kv_positions);
    (void)crypto_generichash(ret->bytes, sizeof ret->bytes, bytes, w.len, NULL, 0);
}

static const char *const precision_names[PRECISION_N][2] = {
    [PRECISION_FAST] = {"fast", "f16"},
    [PRECISION_F32] = {"f32", "f32"},
    [PRECISION_FAST_KV8] = {"fast-kv8", "q8_0"},
};

const char *precision_name(uint32_t precision)
{
    return precision < PRECISION_N ? precision_names[precision][0] : "?";
}

const char *precision_kv_name(uint32_t precision)
{
    return precision < PRECISION_N ? precision_names[precision][1] : "?";
}

enum err precision_parse(const char *name, uint8_t *ret)
{
    for (unsigned i = 0; i < PRECISION_N; i++) {
        if (strcmp(name, precision_names[i][0]) == 0) {
            *ret = (uint8_t)i;
            return ERR_OK;
        }
    }
    return ERR_INVALID;
}

uint32_t plan_slots(const struct plan *p)
{
    return p->kv_positions > 0 ? PLAN_SLOTS_MAX : 1;
}

uint32_t plan_kv_blocks(const struct plan *p)
{
    return p->kv_positions / PLAN_KV_BLOCK;
}

int plan_stage_of(const struct plan *p, const struct node_id *id)
{
    for (uint32_t i = 0; i < p->n_stages && i < PLAN_STAGES_MAX; i++)
        if (node_id_eq(&p->stages[i].node, id))
            return (int)i;
    return -1;
}

void plan_seal(struct plan *p)
{
    seal(p, &p->epoch.hash);
}

/* A name is shown to people: no control bytes, and it ends. */
static bool name_is_sane(const char name[MODEL_NAME_MAX])
{
    size_t n = strnlen(name, MODEL_NAME_MAX);
    if (n == MODEL_NAME_MAX)
        return false;
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)name[i] < 0x20 || name[i] == 0x7f)
            return false;
    return true;
}

static bool kv_is_sane(const struct plan *p)
{
    return p->kv_positions == 0 ||
           (p->kv_positions >= p->context && p->kv_positions % PLAN_KV_BLOCK == 0 &&
            p->kv_positions <= PLAN_KV_POSITIONS_MAX);
}

static bool number_is_sane(double v)
{
    return isfinite(v) && v >= 0;
}

enum err plan_check(const struct plan *p)
{
    if (p->n_stages < 1 || p->n_stages > PLAN_STAGES_MAX || p->n_layers < 1 ||
        p->n_layers > MODEL_LAYERS_MAX || p->context < 1 || !kv_is_sane(p) || p->epoch.term == 0 ||
        node_id_is_zero(&p->epoch.planner) || !name_is_sane(p->model_name) ||
        !number_is_sane(p->predicted_token_us) || !number_is_sane(p->predicted_prefill_us))
        return ERR_CORRUPT;
    uint32_t next = 0;
    for (uint32_t i = 0; i < p->n_stages; i++) {
        const struct plan_stage *s = &p->stages[i];
        if (s->first_layer != next || s->n_layers < 1 || s->n_layers > p->n_layers - next)
            return ERR_CORRUPT;
        next += s->n_layers;
        if (plan_stage_of(p, &s->node) != (int)i)
            return ERR_CORRUPT;
    }
    struct hash256 right;
    seal(p, &right);
    if (next != p->n_layers || !hash256_eq(&right, &p->epoch.hash))
        return ERR_CORRUPT;
    if (p->precision >= PRECISION_N || p->backend > BACKEND_NATIVE)
        return ERR_UNSUPPORTED;
    return ERR_OK;
}

uint64_t epoch_alias(const struct epoch *e)
{
    struct reader r = reader_of(e->hash.bytes, sizeof e->hash.bytes);
    uint64_t alias = read_u64(&r);
    return alias ? alias : 1;
}

int epoch_cmp(const struct epoch *a, const struct epoch *b)
{
    if (a->term != b->term)
        return a->term < b->term ? -1 : 1;
    int by_key = node_id_cmp(&a->planner, &b->planner);
    if (by_key)
        return by_key < 0 ? -1 : 1;
    if (a->sequence != b->sequence)
        return a->sequence < b->sequence ? -1 : 1;
    return 0;
}

bool epoch_eq(const struct epoch *a, const struct epoch *b)
{
    return epoch_cmp(a, b) == 0 && hash256_eq(&a->hash, &b->hash);
}
