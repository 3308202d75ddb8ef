/* The split search: see search.h for what is exact and why. */
#include "planner/search_private.h"

#include "base/util.h"

#include <math.h>
#include <string.h>

enum err search_check(const struct topology *t, const struct model_shape *shape,
                      const struct search_options *options)
{
    if (t->n_nodes > NODES_MAX || shape->n_layers < 1 || shape->n_layers > MODEL_LAYERS_MAX ||
        shape->hidden < 1 || shape->context_max < 1 || options->context > shape->context_max ||
        options->objective > OBJECTIVE_PREFILL)
        return ERR_INVALID;
    return ERR_OK;
}

/* The shape's layers made alike: three of them stand for head, middle and tail. */
static void alike_shape(const struct model_shape *shape, uint64_t layer_bytes,
                        struct model_shape *ret)
{
    *ret = *shape;
    ret->n_layers = 3;
    for (uint32_t i = 0; i < 3; i++)
        ret->layer_bytes[i] = layer_bytes;
}

static uint64_t mean_layer_bytes(const struct model_shape *shape)
{
    double sum = 0;
    for (uint32_t i = 0; i < shape->n_layers; i++)
        sum += (double)shape->layer_bytes[i];
    return (uint64_t)(sum / shape->n_layers + 0.5);
}

static uint64_t max_layer_bytes(const struct model_shape *shape)
{
    uint64_t largest = 0;
    for (uint32_t i = 0; i < shape->n_layers; i++)
        largest = MAX_OF(largest, shape->layer_bytes[i]);
    return largest;
}

/* Layers of a stage at place 0, 1 or 2 (head, middle, tail) that fit into the budget. */
static uint32_t layers_that_fit(const struct model_shape *alike, uint32_t place, uint64_t budget,
                                uint32_t context, uint32_t n_layers)
{
    uint64_t with_one = cost_stage_memory(alike, cost_run_of(alike, place, 1), context);
    if (with_one == UINT64_MAX || with_one > budget)
        return 0;
    uint64_t per_layer =
        alike->layer_bytes[0] + alike->kv_bytes_per_position * cost_whole_blocks(context);
    uint64_t more = per_layer ? (budget - with_one) / per_layer : n_layers;
    return more >= n_layers ? n_layers : (uint32_t)more + 1;
}

static double stage_us(const struct topology_node *node, const struct model_shape *alike,
                       enum objective objective, uint32_t place, uint32_t context)
{
    return cost_objective(objective,
                          cost_stage_token_us(node, alike, cost_run_of(alike, place, 1), context),
                          cost_stage_prefill_us(node, alike, cost_run_of(alike, place, 1)));
}

static void field_sort(struct field *f, const double layer_us[NODES_MAX])
{
    for (uint32_t i = 1; i < f->n; i++)
        for (uint32_t j = i; j > 0 && layer_us[f->index[j]] < layer_us[f->index[j - 1]]; j--) {
            uint32_t swap = f->index[j];
            f->index[j] = f->index[j - 1];
            f->index[j - 1] = swap;
        }
}

static void field_links(struct field *f, const struct topology *t, const struct model_shape *shape,
                        enum objective objective)
{
    for (uint32_t a = 0; a < f->n; a++)
        for (uint32_t b = 0; b < f->n; b++) {
            f->hop[a][b] = f->back[a][b] = INFINITY;
            if (a == b || !cost_edge_usable(t, f->index[a], f->index[b]))
                continue;
            const struct topology_edge *e = &t->edges[f->index[a]][f->index[b]];
            f->hop[a][b] = cost_objective(objective, cost_hop_token_us(e, shape),
                                          cost_hop_prefill_us(e, shape));
            f->back[a][b] = cost_objective(objective, cost_hop_back_us(e), 0);
        }
}

static void field_fill(struct field *f, const struct topology *t, const struct model_shape *shape,
                       enum objective objective, uint32_t context, uint32_t like,
                       uint64_t fitted_bytes)
{
    memset(f, 0, sizeof *f);
    f->n_layers = shape->n_layers;
    struct model_shape mean, fitted;
    alike_shape(shape, mean_layer_bytes(shape), &mean);
    alike_shape(shape, fitted_bytes, &fitted);
    double layer_us[NODES_MAX] = {0};
    for (uint32_t i = 0; i < t->n_nodes; i++) {
        const struct topology_node *node = &t->nodes[i];
        if (!cost_node_usable(node) || node->backend != t->nodes[like].backend ||
            node->arithmetic_version != t->nodes[like].arithmetic_version)
            continue;
        f->index[f->n++] = i;
        layer_us[i] = stage_us(node, &mean, objective, 1, context);
    }
    field_sort(f, layer_us);
    for (uint32_t i = 0; i < f->n; i++) {
        const struct topology_node *node = &t->nodes[f->index[i]];
        f->layer_us[i] = layer_us[f->index[i]];
        f->head_us[i] = stage_us(node, &mean, objective, 0, context) - f->layer_us[i];
        f->tail_us[i] = stage_us(node, &mean, objective, 2, context) - f->layer_us[i];
        uint32_t n = f->n_layers;
        f->cap_head[i] = layers_that_fit(&fitted, 0, node->budget_bytes, context, n);
        f->cap[i] = layers_that_fit(&fitted, 1, node->budget_bytes, context, n);
        f->cap_tail[i] = layers_that_fit(&fitted, 2, node->budget_bytes, context, n);
    }
    field_links(f, t, shape, objective);
}

void search_field_init(struct field *f, const struct topology *t, const struct model_shape *shape,
                       enum objective objective, uint32_t context, uint32_t like)
{
    field_fill(f, t, shape, objective, context, like, max_layer_bytes(shape));
}

void search_field_init_mean(struct field *f, const struct topology *t,
                            const struct model_shape *shape, enum objective objective,
                            uint32_t context, uint32_t like)
{
    field_fill(f, t, shape, objective, context, like, mean_layer_bytes(shape));
}

/* Deals the layers over the nodes of `mask`: one to each, then the fastest first. Head and tail are
 * bits of the mask, or both 0: then the result is a bound over all choices of them. Returns the
 * time of all stages (INFINITY when they do not fit); fills layers[] by place in the field if
 * given. */
static double deal(const struct field *f, uint32_t mask, uint32_t head_bit, uint32_t tail_bit,
                   uint32_t layers[NODES_MAX])
{
    uint32_t k = (uint32_t)__builtin_popcount(mask);
    if (k > f->n_layers)
        return INFINITY;
    uint32_t left = f->n_layers - k;
    double us = 0;
    for (uint32_t rest = mask; rest; rest &= rest - 1) {
        uint32_t i = (uint32_t)__builtin_ctz(rest), bit = 1u << i;
        uint32_t cap = bit == head_bit   ? f->cap_head[i]
                       : bit == tail_bit ? f->cap_tail[i]
                                         : f->cap[i];
        if (cap < 1)
            return INFINITY;
        uint32_t more = MIN_OF(left, cap - 1);
        left -= more;
        us += (more + 1) * f->layer_us[i];
        if (layers)
            layers[i] = more + 1;
    }
    if (left > 0)
        return INFINITY;
    if (head_bit && tail_bit)
        us += f->head_us[__builtin_ctz(head_bit)] + f->tail_us[__builtin_ctz(tail_bit)];
    return us;
}

/* Tables over subsets: dp[mask][t] is the shortest way from the present head through all of mask
 * to t; bound[mask] the dealing alone; above[mask] the least bound of any superset. */
struct tables {
    double (*dp)[NODES_MAX];
    uint8_t (*parent)[NODES_MAX];
    double *bound, *above;
};

static void tables_deinit(struct tables *w)
{
    free(w->dp);
    free(w->parent);
    free(w->bound);
    free(w->above);
}

static enum err tables_init(struct tables *w, const struct field *f)
{
    size_t n_masks = (size_t)1 << f->n;
    w->dp = malloc(n_masks * sizeof *w->dp);
    w->parent = malloc(n_masks * sizeof *w->parent);
    w->bound = malloc(n_masks * sizeof *w->bound);
    w->above = malloc(n_masks * sizeof *w->above);
    if (!w->dp || !w->parent || !w->bound || !w->above)
        return ERR_NO_MEMORY;
    w->bound[0] = INFINITY;
    for (uint32_t mask = 1; mask < n_masks; mask++)
        w->bound[mask] = deal(f, mask, 0, 0, NULL);
    memcpy(w->above, w->bound, n_masks * sizeof *w->above);
    for (uint32_t i = 0; i < f->n; i++)
        for (uint32_t mask = 0; mask < n_masks; mask++)
            if (!(mask >> i & 1))
                w->above[mask] = MIN_OF(w->above[mask], w->above[mask | 1u << i]);
    return ERR_OK;
}

static void record(const struct field *f, const struct tables *w, uint32_t mask, uint32_t head,
                   uint32_t tail, double cost, struct route *ret)
{
    uint32_t layers[NODES_MAX];
    (void)deal(f, mask, 1u << head, 1u << tail, layers);
    ret->cost = cost;
    ret->n = (uint32_t)__builtin_popcount(mask);
    uint32_t at = tail, rest = mask;
    for (uint32_t i = ret->n; i-- > 0;) {
        ret->path[i] = (uint8_t)at;
        ret->layers[i] = layers[at];
        uint32_t before = w->parent[rest][at];
        rest ^= 1u << at;
        at = before;
    }
}

/* The shortest way to `t` through `mask`, from its predecessors. */
static double shortest(const struct field *f, struct tables *w, uint32_t mask, uint32_t t)
{
    uint32_t before = mask ^ 1u << t;
    double best = INFINITY;
    uint8_t parent = 0;
    for (uint32_t rest = before; rest; rest &= rest - 1) {
        uint32_t s = (uint32_t)__builtin_ctz(rest);
        double us = w->dp[before][s] + f->hop[s][t];
        if (us < best) {
            best = us;
            parent = (uint8_t)s;
        }
    }
    w->parent[mask][t] = parent;
    return best;
}

struct goal {
    enum search_mode mode;
    double bound; /* nothing above it matters */
    double ends;  /* the present head's own terms and the least of any tail */
    struct route *best;
};

static double least_ends(const struct field *f, uint32_t head)
{
    double least = INFINITY;
    for (uint32_t t = 0; t < f->n; t++)
        least = MIN_OF(least, f->tail_us[t] + f->back[t][head]);
    return f->head_us[head] + least;
}

static double goal_bound(const struct goal *g, uint32_t k)
{
    return g->mode == SEARCH_BY_SIZE ? MIN_OF(g->bound, g->best[k].cost) : g->bound;
}

static void visit_mask(const struct field *f, struct tables *w, uint32_t head, uint32_t mask,
                       struct goal *g)
{
    uint32_t k = (uint32_t)__builtin_popcount(mask);
    w->dp[mask][head] = INFINITY;
    bool hopeless = k > f->n_layers || w->above[mask] + g->ends >= g->bound;
    for (uint32_t rest = mask & ~(1u << head); rest; rest &= rest - 1) {
        uint32_t t = (uint32_t)__builtin_ctz(rest);
        w->dp[mask][t] = INFINITY;
        if (hopeless)
            continue;
        double way = shortest(f, w, mask, t);
        if (way + w->above[mask] + g->ends >= g->bound)
            continue;
        w->dp[mask][t] = way;
        double least = way + f->back[t][head];
        if (least + w->bound[mask] >= goal_bound(g, k))
            continue;
        double cost = least + deal(f, mask, 1u << head, 1u << t, NULL);
        if (cost >= goal_bound(g, k))
            continue;
        record(f, w, mask, head, t, cost, &g->best[k]);
        if (g->mode == SEARCH_BEST)
            g->bound = cost;
    }
}

enum err search_field_search(const struct field *f, enum search_mode mode, double bound,
                             struct route best[NODES_MAX + 1])
{
    for (uint32_t k = 0; k <= NODES_MAX; k++)
        best[k] = (struct route){.cost = INFINITY};
    if (f->n < 2)
        return ERR_OK;
    _cleanup_(tables_deinit) struct tables w = {NULL, NULL, NULL, NULL};
    TRY(tables_init(&w, f));
    struct goal g = {mode, bound, 0, best};
    uint32_t n_masks = 1u << f->n;
    for (uint32_t head = 0; head < f->n; head++) {
        if (f->cap_head[head] < 1)
            continue;
        w.dp[1u << head][head] = 0;
        g.ends = least_ends(f, head);
        for (uint32_t mask = (1u << head) + 1; mask < n_masks; mask++)
            if (mask >> head & 1)
                visit_mask(f, &w, head, mask, &g);
    }
    return ERR_OK;
}

void search_single_route(const struct topology *t, const struct model_shape *shape,
                         const struct field *f, enum objective objective, uint32_t context,
                         uint32_t only, struct route *ret)
{
    *ret = (struct route){.cost = INFINITY};
    uint64_t bytes = cost_stage_memory(shape, cost_run_of(shape, 0, shape->n_layers), context);
    for (uint32_t i = 0; i < f->n; i++) {
        const struct topology_node *node = &t->nodes[f->index[i]];
        if (bytes > node->budget_bytes || (only != NODES_MAX && f->index[i] != only))
            continue;
        double us = cost_objective(
            objective,
            cost_stage_token_us(node, shape, cost_run_of(shape, 0, shape->n_layers), context),
            cost_stage_prefill_us(node, shape, cost_run_of(shape, 0, shape->n_layers)));
        if (us < ret->cost) {
            ret->cost = us;
            ret->n = 1;
            ret->path[0] = (uint8_t)i;
            ret->layers[0] = shape->n_layers;
        }
    }
}

void search_route_to_plan(const struct topology *t, const struct model_shape *shape,
                          const struct field *f, const struct route *r,
                          const struct search_options *options, uint32_t context, struct plan *ret)
{
    memset(ret, 0, sizeof *ret);
    ret->model = shape->model;
    memcpy(ret->model_name, shape->name, sizeof ret->model_name);
    ret->model_name[MODEL_NAME_MAX - 1] = '\0';
    ret->n_layers = shape->n_layers;
    ret->context = context;
    ret->precision = options->precision;
    ret->backend = t->nodes[f->index[r->path[0]]].backend;
    ret->arithmetic_version = t->nodes[f->index[r->path[0]]].arithmetic_version;
    ret->n_stages = r->n;
    uint32_t first = 0;
    for (uint32_t i = 0; i < r->n; i++) {
        const struct topology_node *node = &t->nodes[f->index[r->path[i]]];
        struct plan_stage *s = &ret->stages[i];
        s->node = node->id;
        s->boot_id = node->boot_id;
        s->first_layer = first;
        s->n_layers = r->layers[i];
        first += s->n_layers;
    }
    cost_give_kv(shape, cost_kv_positions(t, shape, ret), ret);
    struct cost c;
    if (cost_plan(t, shape, ret, options->objective, options->n_concurrent, &c) == ERR_OK) {
        ret->predicted_token_us = c.token_us;
        ret->predicted_prefill_us = c.prefill_us;
    }
}

/* Where layers differ: no route was found with the largest layer for all, so one is looked for with
 * the mean, of each size, and cut exactly. */
static enum err search_unlike(const struct topology *t, const struct model_shape *shape,
                              const struct search_options *options, uint32_t context, uint32_t like,
                              struct field *ret_field, struct route *ret)
{
    struct field f;
    struct route best[NODES_MAX + 1];
    search_field_init_mean(&f, t, shape, options->objective, context, like);
    TRY(search_field_search(&f, SEARCH_BY_SIZE, INFINITY, best));
    for (uint32_t k = 2; k <= f.n; k++) {
        if (isinf(best[k].cost))
            continue;
        TRY(search_cut(t, shape, &f, options->objective, context, &best[k]));
        if (best[k].cost < ret->cost) {
            *ret = best[k];
            *ret_field = f;
        }
    }
    return ERR_OK;
}

static void take_better(const struct route *r, const struct field *f, struct field *ret_field,
                        struct route *ret)
{
    if (!(r->cost < ret->cost))
        return;
    *ret = *r;
    *ret_field = *f;
}

/* The best route among nodes with the arithmetic of nodes[like], if better than *ret. */
static enum err search_group(const struct topology *t, const struct model_shape *shape,
                             const struct search_options *options, uint32_t context, uint32_t like,
                             uint32_t *done, struct field *ret_field, struct route *ret)
{
    struct field f;
    struct route best[NODES_MAX + 1], r;
    enum objective objective = options->objective;
    search_field_init(&f, t, shape, objective, context, like);
    for (uint32_t i = 0; i < f.n; i++)
        *done |= 1u << f.index[i];
    search_single_route(t, shape, &f, objective, context, NODES_MAX, &r);
    take_better(&r, &f, ret_field, ret);
    bool alike = search_layers_alike(shape);
    if (!alike && f.n <= CUT_NODES_MAX) {
        r = *ret;
        TRY(search_cut_all(t, shape, &f, objective, context, &r));
        take_better(&r, &f, ret_field, ret);
        return ERR_OK;
    }
    TRY(search_field_search(&f, SEARCH_BEST, ret->cost, best));
    r = best[0]; /* none */
    for (uint32_t k = 2; k <= f.n; k++)
        if (best[k].cost < r.cost)
            r = best[k];
    if (!alike && !isinf(r.cost))
        TRY(search_cut(t, shape, &f, objective, context, &r));
    take_better(&r, &f, ret_field, ret);
    if (!alike && isinf(ret->cost))
        return search_unlike(t, shape, options, context, like, ret_field, ret);
    return ERR_OK;
}

/* The best route of all groups of equal arithmetic at one context; cost is INFINITY when none. */
static enum err search_context(const struct topology *t, const struct model_shape *shape,
                               const struct search_options *options, uint32_t context,
                               struct field *ret_field, struct route *ret)
{
    ret->cost = INFINITY;
    uint32_t done = 0; /* bit mask of nodes whose group was searched */
    for (uint32_t like = 0; like < t->n_nodes; like++)
        if (!(done >> like & 1) && cost_node_usable(&t->nodes[like]))
            TRY(search_group(t, shape, options, context, like, &done, ret_field, ret));
    return ERR_OK;
}

/* The same nodes in the same order at another context: false when they do not fit, or when that
 * costs more than `limit`. */
static bool redeal(const struct topology *t, const struct model_shape *shape,
                   const struct search_options *options, const struct field *f,
                   const struct route *r, uint32_t context, double limit, struct route *ret)
{
    struct field g;
    search_field_init(&g, t, shape, options->objective, context, f->index[r->path[0]]);
    if (r->n == 1) {
        search_single_route(t, shape, &g, options->objective, context, f->index[r->path[0]], ret);
        return ret->cost <= limit;
    }
    if (!search_layers_alike(shape)) {
        struct route cut = *r;
        if (search_cut(t, shape, &g, options->objective, context, &cut) != ERR_OK ||
            !(cut.cost <= limit))
            return false;
        *ret = cut;
        return true;
    }
    uint32_t mask = 0, layers[NODES_MAX];
    for (uint32_t i = 0; i < r->n; i++)
        mask |= 1u << r->path[i];
    uint32_t head = r->path[0], tail = r->path[r->n - 1];
    double us = deal(&g, mask, 1u << head, 1u << tail, layers);
    for (uint32_t i = 0; i + 1 < r->n; i++)
        us += g.hop[r->path[i]][r->path[i + 1]];
    us += g.back[tail][head];
    if (!(us <= limit))
        return false;
    *ret = *r;
    ret->cost = us;
    for (uint32_t i = 0; i < r->n; i++)
        ret->layers[i] = layers[r->path[i]];
    return true;
}

/* Default context, larger: as long as the same nodes in the same order cost at most 5 % more. */
static uint32_t grow_context(const struct topology *t, const struct model_shape *shape,
                             const struct search_options *options, const struct field *f,
                             uint32_t base, struct route *r)
{
    const double limit = r->cost * 1.05;
    struct route grown;
    if (redeal(t, shape, options, f, r, shape->context_max, limit, &grown)) {
        *r = grown;
        return shape->context_max;
    }
    uint32_t good = 0, bad = (shape->context_max - base) / SEARCH_CONTEXT_STEP + 1;
    struct route start = *r;
    while (bad - good > 1) {
        uint32_t middle = good + (bad - good) / 2;
        if (base + middle * SEARCH_CONTEXT_STEP < shape->context_max &&
            redeal(t, shape, options, f, &start, base + middle * SEARCH_CONTEXT_STEP, limit,
                   &grown)) {
            good = middle;
            *r = grown;
        } else {
            bad = middle;
        }
    }
    return base + good * SEARCH_CONTEXT_STEP;
}

/* Default context when the base does not fit: the largest below it that does, by steps. */
static enum err shrink_context(const struct topology *t, const struct model_shape *shape,
                               const struct search_options *options, uint32_t base,
                               uint32_t *ret_context, struct field *f, struct route *ret)
{
    uint32_t good = SEARCH_CONTEXT_MIN, bad = base;
    TRY(search_context(t, shape, options, good, f, ret));
    *ret_context = good;
    if (isinf(ret->cost))
        return ERR_OK;
    while (bad - good > SEARCH_CONTEXT_STEP) {
        uint32_t steps = (bad - good) / SEARCH_CONTEXT_STEP;
        uint32_t middle = good + (steps / 2 ? steps / 2 : 1) * SEARCH_CONTEXT_STEP;
        struct field g;
        struct route r;
        TRY(search_context(t, shape, options, middle, &g, &r));
        if (isinf(r.cost)) {
            bad = middle;
        } else {
            good = *ret_context = middle;
            *f = g;
            *ret = r;
        }
    }
    return ERR_OK;
}

enum err search_plan(const struct topology *t, const struct model_shape *shape,
                     const struct search_options *options, struct plan *ret, struct err_text *text)
{
    enum err e = search_check(t, shape, options);
    if (e != ERR_OK)
        return err_set(text, e, "a context of %u is more than the %u positions of this model",
                       options->context, shape->context_max);
    struct field f = {0};
    struct route r = {.cost = INFINITY};
    uint32_t base = MIN_OF((uint32_t)SEARCH_CONTEXT_BASE, shape->context_max);
    uint32_t context = options->context ? options->context : base;
    TRY(search_context(t, shape, options, context, &f, &r));
    if (!options->context) {
        if (!isinf(r.cost))
            context = grow_context(t, shape, options, &f, base, &r);
        else if (base > SEARCH_CONTEXT_MIN)
            TRY(shrink_context(t, shape, options, base, &context, &f, &r));
    }
    if (isinf(r.cost)) {
        search_explain_shortage(t, shape, context, text);
        return ERR_NO_FIT;
    }
    search_route_to_plan(t, shape, &f, &r, options, context, ret);
    return ERR_OK;
}
