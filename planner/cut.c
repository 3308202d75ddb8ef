/* Layers that are not alike (mixed quantisation): the exact cut for a given order of nodes, by
 * dynamic programming over stages and layers. The order itself comes from search.c, which takes the
 * layers to be alike. */
#include "planner/search_private.h"

#include "base/util.h"

#include <math.h>
#include <string.h>

bool search_layers_alike(const struct model_shape *shape)
{
    for (uint32_t i = 1; i < shape->n_layers; i++)
        if (shape->layer_bytes[i] != shape->layer_bytes[0])
            return false;
    return true;
}

/* us[i][l]: least time of the first i stages when they cover l layers; from[i][l]: where the last
 * of them begins. A stage that ends with the last layer is the tail. */
struct cut_tables {
    double us[NODES_MAX + 1][MODEL_LAYERS_MAX + 1];
    uint16_t from[NODES_MAX + 1][MODEL_LAYERS_MAX + 1];
};

struct cut {
    const struct topology *t;
    const struct model_shape *shape;
    const struct field *f;
    enum objective objective;
    uint32_t context;
    struct cut_tables *w;
    struct route *best; /* of all orders tried */
};

static enum err cut_init(struct cut *c)
{
    c->w = calloc(1, sizeof *c->w);
    if (!c->w)
        return ERR_NO_MEMORY;
    for (uint32_t end = 1; end <= c->shape->n_layers; end++)
        c->w->us[0][end] = INFINITY;
    c->w->us[0][0] = 0;
    return ERR_OK;
}

/* Appends the node at `place` of the field as a stage. Returns the least time so far. */
static double cut_stage(struct cut *c, uint32_t stage, uint32_t place)
{
    const struct topology_node *node = &c->t->nodes[c->f->index[place]];
    uint32_t n_layers = c->shape->n_layers;
    double least = INFINITY, *us = c->w->us[stage + 1];
    for (uint32_t end = 0; end <= n_layers; end++)
        us[end] = INFINITY;
    for (uint32_t start = 0; start < n_layers; start++) {
        struct cost_run run = {start, 0, 0};
        if (isinf(c->w->us[stage][start]))
            continue;
        while (start + run.n < n_layers) {
            run.bytes += c->shape->layer_bytes[start + run.n++];
            if (cost_stage_memory(c->shape, run, c->context) > node->budget_bytes)
                break; /* more layers need no less */
            double now =
                c->w->us[stage][start] +
                cost_objective(c->objective, cost_stage_token_us(node, c->shape, run, c->context),
                               cost_stage_prefill_us(node, c->shape, run));
            if (now < us[start + run.n]) {
                us[start + run.n] = now;
                c->w->from[stage + 1][start + run.n] = (uint16_t)start;
            }
            least = MIN_OF(least, now);
        }
    }
    return least;
}

/* The path of *r with its hops, when that is better than what *ret has. */
static void cut_finish(const struct cut *c, const struct route *r, double hops, struct route *ret)
{
    double us = c->w->us[r->n][c->shape->n_layers] + hops;
    if (r->n > 1)
        us += c->f->back[r->path[r->n - 1]][r->path[0]];
    if (!(us < ret->cost))
        return;
    *ret = *r;
    ret->cost = us;
    uint32_t end = c->shape->n_layers;
    for (uint32_t i = r->n; i > 0; i--) {
        ret->layers[i - 1] = end - c->w->from[i][end];
        end = c->w->from[i][end];
    }
}

enum err search_cut(const struct topology *t, const struct model_shape *shape,
                    const struct field *f, enum objective objective, uint32_t context,
                    struct route *r)
{
    struct cut c = {t, shape, f, objective, context, NULL, NULL};
    TRY(cut_init(&c));
    double hops = 0;
    struct route path = *r;
    r->cost = INFINITY;
    for (uint32_t i = 0; i < path.n; i++) {
        hops += i > 0 ? f->hop[path.path[i - 1]][path.path[i]] : 0;
        (void)cut_stage(&c, i, path.path[i]);
    }
    cut_finish(&c, &path, hops, r);
    free(c.w);
    return ERR_OK;
}

/* All ways to go on from a path; the tables of its stages are there already. At most CUT_NODES_MAX
 * levels deep. */
static void cut_orders(struct cut *c, struct route *path, uint32_t used, double hops)
{
    for (uint32_t i = 0; i < c->f->n; i++) {
        double hop = path->n > 0 ? c->f->hop[path->path[path->n - 1]][i] : 0;
        if (used >> i & 1 || isinf(hop))
            continue;
        double least = cut_stage(c, path->n, i);
        if (least + hops + hop >= c->best->cost)
            continue;
        path->path[path->n++] = (uint8_t)i;
        cut_finish(c, path, hops + hop, c->best);
        if (path->n < c->shape->n_layers)
            cut_orders(c, path, used | 1u << i, hops + hop);
        path->n--;
    }
}

enum err search_cut_all(const struct topology *t, const struct model_shape *shape,
                        const struct field *f, enum objective objective, uint32_t context,
                        struct route *ret)
{
    struct cut c = {t, shape, f, objective, context, NULL, ret};
    TRY(cut_init(&c));
    struct route path = {.n = 0};
    cut_orders(&c, &path, 0, 0);
    free(c.w);
    return ERR_OK;
}
