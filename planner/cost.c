/* Times and bytes of layer splits. See cost.h for the model; measured rates come from gossip and
 * are therefore checked for sense before use. */
#include "planner/cost.h"

#include "base/util.h"

#include <math.h>
#include <string.h>

static bool rate_is_sane(double v)
{
    return isfinite(v) && v > 0;
}

bool cost_node_usable(const struct topology_node *node)
{
    return node->eligible && rate_is_sane(node->stream_bytes_per_s) &&
           rate_is_sane(node->macs_per_s);
}

static bool edge_is_sane(const struct topology_edge *e)
{
    return e->up && isfinite(e->latency_us) && e->latency_us >= 0 && !isnan(e->bytes_per_s) &&
           e->bytes_per_s >= 0;
}

bool cost_edge_usable(const struct topology *t, uint32_t a, uint32_t b)
{
    return edge_is_sane(&t->edges[a][b]) && edge_is_sane(&t->edges[b][a]);
}

static uint64_t add_sat(uint64_t a, uint64_t b)
{
    uint64_t sum;
    return add_overflows(a, b, &sum) ? UINT64_MAX : sum;
}

static uint64_t mul_sat(uint64_t a, uint64_t b)
{
    uint64_t product;
    return mul_overflows(a, b, &product) ? UINT64_MAX : product;
}

struct cost_run cost_run_of(const struct model_shape *shape, uint32_t first, uint32_t n)
{
    struct cost_run run = {first, n, 0};
    for (uint32_t i = first; i < first + n; i++)
        run.bytes = add_sat(run.bytes, shape->layer_bytes[i]);
    return run;
}

uint32_t cost_whole_blocks(uint32_t n_positions)
{
    uint32_t n = n_positions / PLAN_KV_BLOCK + (n_positions % PLAN_KV_BLOCK > 0);
    return n <= PLAN_KV_POSITIONS_MAX / PLAN_KV_BLOCK ? n * PLAN_KV_BLOCK : PLAN_KV_POSITIONS_MAX;
}

uint64_t cost_stage_memory(const struct model_shape *shape, struct cost_run run,
                           uint32_t n_positions)
{
    uint32_t first = run.first, n = run.n;
    uint64_t bytes = add_sat(COST_RESERVE_BYTES, run.bytes);
    bytes = add_sat(
        bytes, mul_sat(mul_sat(shape->kv_bytes_per_position, cost_whole_blocks(n_positions)), n));
    bytes = add_sat(bytes, mul_sat(shape->activation_bytes_per_row, COST_STEP_ROWS));
    bool head = first == 0, tail = first + n == shape->n_layers;
    if (head && tail && shape->output_is_embedding)
        return add_sat(bytes, MAX_OF(shape->embedding_bytes, shape->output_bytes));
    if (head)
        bytes = add_sat(bytes, shape->embedding_bytes);
    if (tail)
        bytes = add_sat(bytes, shape->output_bytes);
    return bytes;
}

/* Microseconds for a part that moves `bytes` and computes `macs`. */
static double part_us(const struct topology_node *node, double bytes, double macs)
{
    double stream_us = bytes / node->stream_bytes_per_s * 1e6;
    double compute_us = macs / node->macs_per_s * 1e6;
    return MAX_OF(stream_us, compute_us);
}

static double row_bytes(const struct model_shape *shape)
{
    return (double)shape->hidden * 4.0;
}

double cost_stage_token_us(const struct topology_node *node, const struct model_shape *shape,
                           struct cost_run run, uint32_t context)
{
    uint32_t first = run.first, n = run.n;
    double depth = MIN_OF(context, (uint32_t)COST_DEPTH);
    double bytes = (double)run.bytes + (double)shape->kv_bytes_per_position * depth * n;
    double us = part_us(node, bytes, (double)shape->layer_macs * n);
    if (first == 0)
        us += part_us(node, row_bytes(shape), 0);
    if (first + n == shape->n_layers)
        us += part_us(node, (double)shape->output_bytes, (double)shape->output_macs);
    return us;
}

double cost_stage_prefill_us(const struct topology_node *node, const struct model_shape *shape,
                             struct cost_run run)
{
    uint32_t first = run.first, n = run.n;
    const double rows = COST_PREFILL_ROWS;
    /* Attention within the chunk: scores and values, over half of it on average. */
    double attention_macs = 2.0 * (double)shape->hidden * rows / 2.0;
    double us =
        part_us(node, (double)run.bytes / rows, ((double)shape->layer_macs + attention_macs) * n);
    if (first == 0)
        us += part_us(node, row_bytes(shape), 0);
    /* Only the last row of a prompt needs logits. */
    if (first + n == shape->n_layers)
        us += part_us(node, (double)shape->output_bytes, (double)shape->output_macs) / rows;
    return us;
}

static double bandwidth(const struct topology_edge *edge)
{
    return edge->bytes_per_s > 0 ? edge->bytes_per_s : COST_UNKNOWN_BYTES_PER_S;
}

double cost_hop_token_us(const struct topology_edge *edge, const struct model_shape *shape)
{
    return edge->latency_us + (row_bytes(shape) + COST_FRAME_BYTES) / bandwidth(edge) * 1e6;
}

double cost_hop_prefill_us(const struct topology_edge *edge, const struct model_shape *shape)
{
    return edge->latency_us / COST_PREFILL_ROWS + row_bytes(shape) / bandwidth(edge) * 1e6;
}

double cost_hop_back_us(const struct topology_edge *edge)
{
    return edge->latency_us + COST_FRAME_BYTES / bandwidth(edge) * 1e6;
}

double cost_objective(enum objective objective, double token_us, double prefill_us)
{
    switch (objective) {
    case OBJECTIVE_TOKEN:
        return token_us;
    case OBJECTIVE_PREFILL:
        return prefill_us;
    case OBJECTIVE_CHAT:
        break;
    }
    return COST_CHAT_OUTPUT_TOKENS * token_us + COST_CHAT_PROMPT_TOKENS * prefill_us;
}

static int node_index(const struct topology *t, const struct plan_stage *s)
{
    for (uint32_t i = 0; i < t->n_nodes && i < NODES_MAX; i++)
        if (node_id_eq(&t->nodes[i].id, &s->node))
            return t->nodes[i].boot_id == s->boot_id ? (int)i : -1;
    return -1;
}

/* Fills the times and bytes of stage i; false when it does not fit there. */
static bool cost_one_stage(const struct topology *t, const struct model_shape *shape,
                           const struct plan *p, const uint32_t at[PLAN_STAGES_MAX], uint32_t i,
                           struct cost_stage *ret)
{
    const struct topology_node *node = &t->nodes[at[i]];
    const struct plan_stage *s = &p->stages[i];
    struct cost_run run = cost_run_of(shape, s->first_layer, s->n_layers);
    ret->memory_bytes = cost_stage_memory(shape, run, MAX_OF(p->context, p->kv_positions));
    ret->budget_bytes = node->budget_bytes;
    bool fits = cost_node_usable(node) && ret->memory_bytes <= node->budget_bytes &&
                node->arithmetic_version == t->nodes[at[0]].arithmetic_version &&
                node->backend == t->nodes[at[0]].backend;
    if (cost_node_usable(node)) {
        ret->token_us = cost_stage_token_us(node, shape, run, p->context);
        ret->prefill_us = cost_stage_prefill_us(node, shape, run);
    }
    if (p->n_stages == 1)
        return fits;
    uint32_t next = at[(i + 1) % p->n_stages];
    if (!cost_edge_usable(t, at[i], next))
        return false;
    const struct topology_edge *edge = &t->edges[at[i]][next];
    if (i + 1 == p->n_stages) {
        ret->token_hop_us = cost_hop_back_us(edge);
    } else {
        ret->token_hop_us = cost_hop_token_us(edge, shape);
        ret->prefill_hop_us = cost_hop_prefill_us(edge, shape);
    }
    return fits;
}

/* Positions that the part of one stage leaves room for. */
static uint64_t kv_of_stage(const struct topology_node *node, const struct model_shape *shape,
                            const struct plan_stage *s, uint32_t context)
{
    struct cost_run run = cost_run_of(shape, s->first_layer, s->n_layers);
    uint64_t least = cost_stage_memory(shape, run, context), budget = node->budget_bytes, room = 0;
    if (least <= budget / 2)
        room = budget / 2 - least;
    else if (least <= budget)
        room = (budget - least) / 2;
    uint64_t each = mul_sat(shape->kv_bytes_per_position, s->n_layers);
    return add_sat(cost_whole_blocks(context), each ? room / each : UINT64_MAX);
}

uint32_t cost_kv_positions(const struct topology *t, const struct model_shape *shape,
                           const struct plan *p)
{
    uint64_t n = MIN_OF((uint64_t)p->context * COST_KV_CONTEXTS, (uint64_t)PLAN_KV_POSITIONS_MAX);
    for (uint32_t i = 0; i < p->n_stages; i++) {
        int at = node_index(t, &p->stages[i]);
        if (at >= 0)
            n = MIN_OF(n, kv_of_stage(&t->nodes[at], shape, &p->stages[i], p->context));
    }
    n = n / PLAN_KV_BLOCK * PLAN_KV_BLOCK;
    return MAX_OF((uint32_t)n, cost_whole_blocks(p->context));
}

void cost_give_kv(const struct model_shape *shape, uint32_t kv_positions, struct plan *p)
{
    p->kv_positions = kv_positions;
    for (uint32_t i = 0; i < p->n_stages; i++) {
        struct plan_stage *s = &p->stages[i];
        struct cost_run run = cost_run_of(shape, s->first_layer, s->n_layers);
        s->memory_bytes = cost_stage_memory(shape, run, kv_positions);
    }
}

/* The slowest part bounds all streams together; one stream is bounded by the whole round. */
static void cost_totals(struct cost *c, enum objective objective, uint32_t n_concurrent)
{
    double slowest = 0;
    for (uint32_t i = 0; i < c->n_stages; i++) {
        const struct cost_stage *s = &c->stages[i];
        c->token_us += s->token_us + s->token_hop_us;
        c->prefill_us += s->prefill_us + s->prefill_hop_us;
        double part = MAX_OF(s->token_us, s->token_hop_us);
        if (part > slowest) {
            slowest = part;
            c->bottleneck = i;
            c->bottleneck_link = s->token_hop_us > s->token_us;
        }
    }
    c->objective_us = cost_objective(objective, c->token_us, c->prefill_us);
    double streams = n_concurrent ? n_concurrent : 1;
    double per_token = MAX_OF(c->token_us / streams, slowest);
    c->tokens_per_s = per_token > 0 ? 1e6 / per_token : 0;
}

enum err cost_plan(const struct topology *t, const struct model_shape *shape, const struct plan *p,
                   enum objective objective, uint32_t n_concurrent, struct cost *ret)
{
    if (p->n_stages < 1 || p->n_stages > PLAN_STAGES_MAX || p->n_layers != shape->n_layers ||
        shape->n_layers > MODEL_LAYERS_MAX)
        return ERR_INVALID;
    uint32_t at[PLAN_STAGES_MAX], next_layer = 0;
    for (uint32_t i = 0; i < p->n_stages; i++) {
        const struct plan_stage *s = &p->stages[i];
        int index = node_index(t, s);
        if (index < 0)
            return ERR_NOT_FOUND;
        if (s->first_layer != next_layer || s->n_layers > shape->n_layers - next_layer)
            return ERR_INVALID;
        next_layer += s->n_layers;
        at[i] = (uint32_t)index;
    }
    struct cost c;
    memset(&c, 0, sizeof c);
    c.n_stages = p->n_stages;
    c.fits = next_layer == shape->n_layers;
    for (uint32_t i = 0; i < p->n_stages; i++)
        c.fits &= cost_one_stage(t, shape, p, at, i, &c.stages[i]);
    cost_totals(&c, objective, n_concurrent);
    *ret = c;
    return ERR_OK;
}
