/* Shared by search.c and explain.c, not by other rooms. */
#ifndef COVEY_PLANNER_SEARCH_PRIVATE_H
#define COVEY_PLANNER_SEARCH_PRIVATE_H

#include "planner/search.h"

/* One search: nodes of equal arithmetic at one context, fastest layer first, so that ascending bits
 * of a mask are the order in which layers are dealt. */
struct field {
    uint32_t n, n_layers;
    uint32_t index[NODES_MAX]; /* in the topology */
    double layer_us[NODES_MAX], head_us[NODES_MAX], tail_us[NODES_MAX];
    uint32_t cap[NODES_MAX], cap_head[NODES_MAX], cap_tail[NODES_MAX]; /* layers that fit */
    double hop[NODES_MAX][NODES_MAX], back[NODES_MAX][NODES_MAX];      /* INFINITY: no link */
};

/* A way through some nodes; cost is INFINITY when there is none. */
struct route {
    double cost;
    uint32_t n;
    uint8_t path[NODES_MAX];    /* places in the field, head first */
    uint32_t layers[NODES_MAX]; /* for each place of the path */
};

enum search_mode {
    SEARCH_BEST,    /* only the best of all sizes is exact */
    SEARCH_BY_SIZE, /* the best of each number of nodes is exact */
};

enum err search_check(const struct topology *t, const struct model_shape *shape,
                      const struct search_options *options);
/* Usable nodes with the arithmetic and backend of nodes[like]. */
void search_field_init(struct field *f, const struct topology *t, const struct model_shape *shape,
                       enum objective objective, uint32_t context, uint32_t like);
/* The same with memory weighed by the mean layer instead of the largest: what it finds must still
 * be cut. */
void search_field_init_mean(struct field *f, const struct topology *t,
                            const struct model_shape *shape, enum objective objective,
                            uint32_t context, uint32_t like);
/* Best routes of at least two nodes: best[k] for k nodes. ERR_NO_MEMORY. */
enum err search_field_search(const struct field *f, enum search_mode mode, double bound,
                             struct route best[NODES_MAX + 1]);
/* The best single node, or the one at `place` of the topology only (NODES_MAX for any). */
void search_single_route(const struct topology *t, const struct model_shape *shape,
                         const struct field *f, enum objective objective, uint32_t context,
                         uint32_t only, struct route *ret);
bool search_layers_alike(const struct model_shape *shape);
/* The best cut of the layers as they are for the route's order: fills layers and cost (INFINITY
 * when none fits). ERR_NO_MEMORY. */
enum err search_cut(const struct topology *t, const struct model_shape *shape,
                    const struct field *f, enum objective objective, uint32_t context,
                    struct route *r);
enum { CUT_NODES_MAX = 5 }; /* so many nodes have few enough orders to cut them all */
/* The best of all orders and cuts, where it is better than *ret: exact. */
enum err search_cut_all(const struct topology *t, const struct model_shape *shape,
                        const struct field *f, enum objective objective, uint32_t context,
                        struct route *ret);
void search_route_to_plan(const struct topology *t, const struct model_shape *shape,
                          const struct field *f, const struct route *r,
                          const struct search_options *options, uint32_t context, struct plan *ret);
/* The sentence for ERR_NO_FIT. */
void search_explain_shortage(const struct topology *t, const struct model_shape *shape,
                             uint32_t context, struct err_text *text);

#endif
