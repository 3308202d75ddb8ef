/* Why a plan was chosen: the candidates that the search had, what each would cost, and what is
 * missing where there is none. Declared in search.h. */
#include "planner/search_private.h"

#include "base/util.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static uint64_t mib(uint64_t bytes)
{
    return (bytes + (1 << 20) - 1) >> 20;
}

/* Most layers that the nodes of a field hold together, over all choices of head and tail. */
static uint32_t field_capacity(const struct topology *t, const struct model_shape *shape,
                               const struct field *f, uint32_t context)
{
    uint64_t all = 0, best = 0;
    for (uint32_t i = 0; i < f->n; i++)
        all += f->cap[i];
    for (uint32_t h = 0; h < f->n; h++)
        for (uint32_t l = 0; l < f->n; l++) {
            if (h == l || f->cap_head[h] < 1 || f->cap_tail[l] < 1)
                continue;
            uint64_t sum = all - f->cap[h] - f->cap[l] + f->cap_head[h] + f->cap_tail[l];
            best = MAX_OF(best, sum);
        }
    for (uint32_t i = 0; i < f->n; i++) {
        uint64_t budget = t->nodes[f->index[i]].budget_bytes;
        uint64_t whole = cost_stage_memory(shape, cost_run_of(shape, 0, shape->n_layers), context);
        uint64_t layer = whole / shape->n_layers + 1;
        if (budget >= whole)
            return shape->n_layers;
        uint64_t short_of = (whole - budget + layer - 1) / layer;
        if (short_of < shape->n_layers)
            best = MAX_OF(best, shape->n_layers - short_of);
    }
    return best > f->n_layers ? f->n_layers : (uint32_t)best;
}

void search_explain_shortage(const struct topology *t, const struct model_shape *shape,
                             uint32_t context, struct err_text *text)
{
    const char *name = shape->name[0] ? shape->name : "the model";
    uint64_t whole = cost_stage_memory(shape, cost_run_of(shape, 0, shape->n_layers), context);
    uint64_t have = 0;
    uint32_t n_usable = 0, capacity = 0;
    for (uint32_t like = 0; like < t->n_nodes; like++) {
        if (!cost_node_usable(&t->nodes[like]))
            continue;
        struct field f;
        search_field_init(&f, t, shape, OBJECTIVE_TOKEN, context, like);
        uint32_t fits = field_capacity(t, shape, &f, context);
        uint64_t sum = 0;
        for (uint32_t i = 0; i < f.n; i++) {
            uint64_t budget = t->nodes[f.index[i]].budget_bytes;
            sum = budget > UINT64_MAX - sum ? UINT64_MAX : sum + budget;
        }
        if (n_usable > 0 && (fits < capacity || (fits == capacity && sum <= have)))
            continue;
        capacity = fits;
        have = sum;
        n_usable = f.n;
    }
    const char *machines = n_usable == 1 ? "machine" : "machines";
    if (n_usable == 0) {
        (void)err_set(text, ERR_NO_FIT, "no machine can take part now (of %u known)", t->n_nodes);
    } else if (capacity >= shape->n_layers) {
        (void)err_set(
            text, ERR_NO_FIT,
            "%.60s with a context of %u would fit the memory of the %u %s, but not all of "
            "them reach each other directly",
            name, context, n_usable, machines);
    } else {
        uint64_t missing =
            (uint64_t)((double)whole * (shape->n_layers - capacity) / (double)shape->n_layers);
        (void)err_set(text, ERR_NO_FIT,
                      "%.60s with a context of %u needs %llu MiB; the %u %s that can take part "
                      "offer %llu MiB, room for %u of its %u layers: about %llu MiB more memory is "
                      "needed",
                      name, context, (unsigned long long)mib(whole), n_usable, machines,
                      (unsigned long long)mib(have), capacity, shape->n_layers,
                      (unsigned long long)mib(missing));
    }
}

struct listing {
    const struct topology *t;
    const struct model_shape *shape;
    const struct search_options *options;
    uint32_t context;
    struct plan chosen; /* n_stages is 0 when nothing fits */
    struct cost chosen_cost;
    struct search_candidate *list;
    uint32_t n, max;
};

static struct search_candidate *listing_add(struct listing *l, enum verdict verdict,
                                            uint32_t n_nodes)
{
    if (l->n == l->max)
        return NULL;
    struct search_candidate *c = &l->list[l->n++];
    memset(c, 0, sizeof *c);
    c->verdict = verdict;
    c->n_nodes = n_nodes;
    return c;
}

static void describe(const struct listing *l, struct search_candidate *c)
{
    const struct cost *cost = &c->cost;
    const char *part = cost->bottleneck_link ? "the link after stage" : "stage";
    if (c->verdict == VERDICT_CHOSEN) {
        (void)err_set(
            &c->why, ERR_OK,
            "chosen: %.2f ms per output token, %.3f ms per prompt token; the slowest part "
            "is %s %u; a KV cache of %u positions for all requests together",
            cost->token_us / 1e3, cost->prefill_us / 1e3, part, cost->bottleneck,
            c->plan.kv_positions);
        return;
    }
    double more = (cost->objective_us / l->chosen_cost.objective_us - 1) * 100;
    (void)err_set(&c->why, ERR_OK,
                  "%.0f %% slower: %.2f ms per output token, %.3f ms per prompt token; the slowest "
                  "part is %s %u",
                  more > 0 ? more : 0, cost->token_us / 1e3, cost->prefill_us / 1e3, part,
                  cost->bottleneck);
}

static void listing_plan(struct listing *l, enum verdict verdict, const struct plan *p)
{
    struct search_candidate *c = listing_add(l, verdict, p->n_stages);
    if (!c)
        return;
    c->plan = *p;
    (void)cost_plan(l->t, l->shape, p, l->options->objective, l->options->n_concurrent, &c->cost);
    describe(l, c);
}

/* Node i alone. */
static void listing_single(struct listing *l, uint32_t i)
{
    const struct topology_node *node = &l->t->nodes[i];
    struct search_candidate *c;
    if (l->chosen.n_stages == 1 && node_id_eq(&l->chosen.stages[0].node, &node->id))
        return;
    uint64_t need =
        cost_stage_memory(l->shape, cost_run_of(l->shape, 0, l->shape->n_layers), l->context);
    if (!cost_node_usable(node) || node->budget_bytes < need) {
        enum verdict v = !node->eligible           ? VERDICT_NOT_ELIGIBLE
                         : !cost_node_usable(node) ? VERDICT_NO_RATES
                                                   : VERDICT_NO_MEMORY;
        c = listing_add(l, v, 1);
        if (!c)
            return;
        c->plan.stages[0].node = node->id; /* who; there is no plan */
        if (v == VERDICT_NO_MEMORY)
            (void)err_set(&c->why, ERR_NO_FIT, "needs %llu MiB, has %llu MiB",
                          (unsigned long long)mib(need),
                          (unsigned long long)mib(node->budget_bytes));
        else
            (void)err_set(&c->why, ERR_NO_FIT, "%s",
                          v == VERDICT_NO_RATES ? "its speed is not known yet"
                                                : "does not count for plans now");
        return;
    }
    struct field f;
    struct route r;
    struct plan p;
    search_field_init(&f, l->t, l->shape, l->options->objective, l->context, i);
    search_single_route(l->t, l->shape, &f, l->options->objective, l->context, i, &r);
    search_route_to_plan(l->t, l->shape, &f, &r, l->options, l->context, &p);
    listing_plan(l, VERDICT_SLOWER, &p);
}

/* The best of each size over all groups of equal arithmetic. */
static enum err listing_sizes(struct listing *l)
{
    struct plan plans[NODES_MAX + 1];
    double costs[NODES_MAX + 1];
    for (uint32_t k = 0; k <= NODES_MAX; k++)
        costs[k] = INFINITY;
    uint32_t done = 0, n_usable = 0;
    for (uint32_t like = 0; like < l->t->n_nodes; like++) {
        if (done >> like & 1 || !cost_node_usable(&l->t->nodes[like]))
            continue;
        struct field f;
        struct route best[NODES_MAX + 1];
        search_field_init(&f, l->t, l->shape, l->options->objective, l->context, like);
        for (uint32_t i = 0; i < f.n; i++)
            done |= 1u << f.index[i];
        n_usable += f.n;
        TRY(search_field_search(&f, SEARCH_BY_SIZE, INFINITY, best));
        for (uint32_t k = 2; k <= f.n; k++)
            if (best[k].cost < costs[k]) {
                costs[k] = best[k].cost;
                search_route_to_plan(l->t, l->shape, &f, &best[k], l->options, l->context,
                                     &plans[k]);
            }
    }
    for (uint32_t k = 2; k <= n_usable; k++) {
        if (k == l->chosen.n_stages)
            continue;
        if (!isinf(costs[k])) {
            listing_plan(l, VERDICT_SLOWER, &plans[k]);
            continue;
        }
        struct search_candidate *c = listing_add(l, VERDICT_NO_PLAN, k);
        if (c)
            (void)err_set(&c->why, ERR_NO_FIT,
                          "no split over %u machines fits their memory and links", k);
    }
    return ERR_OK;
}

enum err search_explain(const struct topology *t, const struct model_shape *shape,
                        const struct search_options *options, struct search_candidate *ret,
                        uint32_t max, uint32_t *ret_n)
{
    struct listing l;
    memset(&l, 0, sizeof l);
    l.t = t;
    l.shape = shape;
    l.options = options;
    l.list = ret;
    l.max = max;
    enum err e = search_plan(t, shape, options, &l.chosen, NULL);
    if (e == ERR_OK) {
        l.context = l.chosen.context;
        TRY(cost_plan(t, shape, &l.chosen, options->objective, options->n_concurrent,
                      &l.chosen_cost));
        listing_plan(&l, VERDICT_CHOSEN, &l.chosen);
    } else if (e == ERR_NO_FIT) {
        l.context = options->context ? options->context
                                     : MIN_OF((uint32_t)SEARCH_CONTEXT_MIN, shape->context_max);
        l.chosen.n_stages = 0;
    } else {
        return e;
    }
    for (uint32_t i = 0; i < t->n_nodes; i++)
        listing_single(&l, i);
    TRY(listing_sizes(&l));
    *ret_n = l.n;
    return ERR_OK;
}
