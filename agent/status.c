/* The JSON that people and programs see: status, nodes, models, plans. Names in it are kept for
 * scripts and the tray. */
#include "agent/agent.h"

#include "base/clock.h"
#include "base/util.h"
#include "agent/sysinfo.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { VIEWS_MAX = 320, HELD_MAX = 256 };

static json_t *hex_json(const uint8_t bytes[32])
{
    char hex[HEX_ID_MAX];
    hex_of_32(bytes, hex);
    return json_string(hex);
}

static json_t *text_json(const char *text)
{
    json_t *s = json_string(text); /* NULL when it is not UTF-8 */
    return s ? s : json_string("?");
}

static json_t *paths_json(const struct node_view *v)
{
    json_t *paths = json_array();
    for (uint32_t i = 0; i < v->n_paths; i++) {
        const struct node_path_view *p = &v->paths[i];
        char text[ADDRESS_TEXT_MAX];
        address_text(&p->address, text);
        (void)json_array_append_new(paths, json_pack("{s:s, s:s, s:b, s:f, s:f, s:f}", "interface",
                                                     p->address.interface, "address", text, "up",
                                                     p->up, "rtt_us", p->rtt_us, "rtt_p99_us",
                                                     p->rtt_p99_us, "bytes_per_s", p->bytes_per_s));
    }
    return paths;
}

static json_t *node_json(const struct node_view *v)
{
    const struct node_local *l = &v->local;
    json_t *memory =
        json_pack("{s:I, s:I, s:I, s:I}", "total_bytes", (json_int_t)l->memory_total_bytes,
                  "available_bytes", (json_int_t)l->memory_available_bytes, "limit_bytes",
                  (json_int_t)l->memory_limit_bytes, "budget_bytes", (json_int_t)l->budget_bytes);
    json_t *compute =
        json_pack("{s:i, s:i, s:f, s:f, s:i}", "cores", (int)l->cores, "threads", (int)l->threads,
                  "stream_bytes_per_s", l->stream_bytes_per_s, "macs_per_s", l->macs_per_s,
                  "arithmetic_version", (int)l->arithmetic_version);
    return json_pack("{s:o, s:o, s:b, s:b, s:b, s:s, s:o, s:o, s:o, s:b, s:o}", "id",
                     v->has_id ? hex_json(v->id.bytes) : json_null(), "name", text_json(v->name),
                     "self", v->self, "member", v->member, "worker", v->worker, "state", v->state,
                     "version", text_json(v->version), "memory", memory, "compute", compute,
                     "on_mains", l->on_mains, "paths", paths_json(v));
}

json_t *status_nodes_json(struct agent *a)
{
    struct node_view *views = calloc(VIEWS_MAX, sizeof *views);
    if (!views)
        return NULL;
    uint32_t n = node_views(a->node, views, VIEWS_MAX);
    json_t *nodes = json_array();
    for (uint32_t i = 0; i < n; i++)
        (void)json_array_append_new(nodes, node_json(&views[i]));
    free(views);
    return json_pack("{s:o}", "nodes", nodes);
}

static json_t *name_of_node(struct agent *a, const struct node_id *id)
{
    struct node_view *views = calloc(VIEWS_MAX, sizeof *views);
    json_t *name = NULL;
    uint32_t n = views ? node_views(a->node, views, VIEWS_MAX) : 0;
    for (uint32_t i = 0; i < n && !name; i++) {
        if (views[i].has_id && node_id_eq(&views[i].id, id))
            name = text_json(views[i].name);
    }
    free(views);
    return name ? name : json_string("");
}

static json_t *stages_json(struct agent *a, const struct plan *p)
{
    json_t *stages = json_array();
    for (uint32_t i = 0; i < p->n_stages; i++) {
        const struct plan_stage *s = &p->stages[i];
        (void)json_array_append_new(stages, json_pack("{s:[o], s:[o], s:i, s:i, s:I}", "nodes",
                                                      hex_json(s->node.bytes), "names",
                                                      name_of_node(a, &s->node), "first_layer",
                                                      (int)s->first_layer, "last_layer",
                                                      (int)(s->first_layer + s->n_layers - 1),
                                                      "memory_bytes", (json_int_t)s->memory_bytes));
    }
    return stages;
}

json_t *status_plan_object(struct agent *a, const struct plan *p)
{
    return json_pack("{s:o, s:i, s:i, s:s, s:s, s:f, s:f, s:o}", "model", text_json(p->model_name),
                     "context", (int)p->context, "kv_positions", (int)p->kv_positions, "precision",
                     precision_name(p->precision), "kv_type", precision_kv_name(p->precision),
                     "predicted_token_ms", p->predicted_token_us / 1e3, "predicted_prefill_ms",
                     p->predicted_prefill_us / 1e3, "stages", stages_json(a, p));
}

static json_t *model_json(struct agent *a, const struct agent_spares *spares,
                          const struct control_model *m)
{
    const struct plan *p = m->active;
    char alias[20] = "";
    if (p)
        (void)snprintf(alias, sizeof alias, "%016llx", (unsigned long long)epoch_alias(&p->epoch));
    return json_pack(
        "{s:o, s:o, s:s, s:s, s:s, s:i, s:i, s:f, s:o, s:o, s:o}", "name", text_json(m->name), "id",
        hex_json(m->model.bytes), "epoch", alias, "state",
        p              ? "active"
        : m->refused   ? "failed"
        : m->no_fit[0] ? "does not fit"
                       : "starting",
        "why", m->no_fit, "context", (int)(p ? p->context : m->context), "kv_positions",
        (int)(p ? p->kv_positions : 0), "predicted_token_ms", p ? p->predicted_token_us / 1e3 : 0.0,
        "stages", p ? stages_json(a, p) : json_array(), "fatal_losses",
        agent_spare_fatal(spares, &m->model), "second_copy", agent_spare_json(spares, &m->model));
}

static json_t *requests_json(struct agent *a)
{
    struct inference_view *v = malloc(sizeof *v);
    json_t *requests = json_array();
    if (!v)
        return requests;
    inference_look(a->inference, v);
    for (uint32_t i = 0; i < v->n_requests; i++) {
        char id[33];
        hex_encode(v->requests[i].request.bytes, sizeof v->requests[i].request.bytes, id);
        (void)json_array_append_new(requests,
                                    json_pack("{s:s, s:o, s:i, s:i, s:i}", "id", id, "model",
                                              hex_json(v->requests[i].model.bytes), "prompt_tokens",
                                              (int)v->requests[i].n_prompt, "emitted_tokens",
                                              (int)v->requests[i].n_emitted, "attempt",
                                              (int)v->requests[i].attempt));
    }
    free(v);
    return requests;
}

/* The KV caches of this node's stages together. */
static json_t *kv_json(struct agent *a)
{
    struct inference_view *v = malloc(sizeof *v);
    if (!v)
        return json_null();
    inference_look(a->inference, v);
    const struct pipeline_progress *p = &v->progress;
    json_t *kv =
        json_pack("{s:I, s:I, s:i, s:I}", "positions", (json_int_t)p->n_blocks * STAGE_BLOCK,
                  "used_positions", (json_int_t)p->n_blocks_used * STAGE_BLOCK, "running",
                  (int)p->n_slots_used, "put_back", (json_int_t)p->n_preempted);
    free(v);
    return kv;
}

/* What people call the nodes whose ids stand elsewhere in the status: {id: name}. */
static json_t *node_names_json(struct agent *a)
{
    struct node_view *views = calloc(VIEWS_MAX, sizeof *views);
    json_t *names = json_object();
    uint32_t n = views ? node_views(a->node, views, VIEWS_MAX) : 0;
    for (uint32_t i = 0; i < n; i++) {
        char hex[HEX_ID_MAX];
        if (!views[i].has_id)
            continue;
        hex_of_32(views[i].id.bytes, hex);
        (void)json_object_set_new(names, hex, text_json(views[i].name));
    }
    free(views);
    return names;
}

json_t *status_json(struct agent *a)
{
    struct node_id planner;
    uint64_t term = 0;
    bool has_planner = node_planner(a->node, &planner, &term);
    json_t *models = json_array();
    struct agent_spares *spares = agent_spares_new(a);
    uint32_t n = control_n_models(node_control(a->node));
    for (uint32_t i = 0; i < n; i++) {
        struct control_model m;
        control_model_at(node_control(a->node), i, &m);
        json_t *j = model_json(a, spares, &m);
        (void)json_object_set_new(j, "keep_alive_s", json_integer(m.keep_alive_s));
        (void)json_array_append_new(models, j);
    }
    free(spares);
    struct node_id self = node_self(a->node);
    struct hash256 fetching;
    uint64_t got = 0, total = 0;
    loader_progress(a->loader, &fetching, &got, &total);
    return json_pack("{s:o, s:s, s:s, s:s, s:i, s:i, s:o, s:I, s:o, s:o, s:I, s:I, s:{s:I, s:I}, "
                     "s:o, s:o, s:b}",
                     "id", hex_json(self.bytes), "name", a->config.name, "version", COVEY_VERSION,
                     "http", a->http_url, "control_port", (int)control_net_port(a->control),
                     "data_port", (int)data_port_port(a->data_port), "planner",
                     has_planner ? hex_json(planner.bytes) : json_null(), "term", (json_int_t)term,
                     "models", models, "requests", requests_json(a), "uptime_s",
                     (json_int_t)((clock_monotonic_us() - a->started_us) / 1000000),
                     "resident_bytes", (json_int_t)sysinfo_resident_bytes(), "fetch", "done",
                     (json_int_t)got, "total", (json_int_t)total, "kv_cache", kv_json(a),
                     "node_names", node_names_json(a), "disk_full", a->disk_full);
}

json_t *status_models_json(struct agent *a)
{
    struct node_held *held = calloc(HELD_MAX, sizeof *held);
    if (!held)
        return NULL;
    uint32_t n = node_held(a->node, held, HELD_MAX);
    struct agent_spares *spares = agent_spares_new(a);
    json_t *models = json_array();
    for (uint32_t i = 0; i < n; i++) {
        const struct plan *p = control_active(node_control(a->node), &held[i].model);
        struct store_entry own;
        bool here = store_get(a->store, &held[i].model, &own) == ERR_OK;
        (void)json_array_append_new(
            models, json_pack("{s:o, s:o, s:I, s:I, s:I, s:o, s:b, s:s, s:o}", "name",
                              text_json(held[i].name), "id", hex_json(held[i].model.bytes), "bytes",
                              (json_int_t)held[i].n_bytes, "present_bytes",
                              (json_int_t)held[i].present_bytes, "here_bytes",
                              (json_int_t)(here ? own.present_bytes : 0), "holder",
                              hex_json(held[i].holder.bytes), "running", p != NULL, "kv_type",
                              precision_kv_name(p ? p->precision : a->config.precision),
                              "second_copy", agent_spare_json(spares, &held[i].model)));
    }
    free(spares);
    free(held);
    return json_pack("{s:o}", "models", models);
}

/* ---- covey plan ---- */

static const char *verdict_word(enum verdict v)
{
    switch (v) {
    case VERDICT_CHOSEN:
        return "chosen";
    case VERDICT_SLOWER:
        return "slower";
    case VERDICT_NO_MEMORY:
        return "no memory";
    case VERDICT_NOT_ELIGIBLE:
        return "not eligible";
    case VERDICT_NO_RATES:
        return "speed not known";
    default:
        return "no plan";
    }
}

static json_t *candidate_json(struct agent *a, const struct search_candidate *s)
{
    json_t *o = json_pack("{s:s, s:s, s:i}", "verdict", verdict_word(s->verdict), "why",
                          s->why.text, "n_nodes", (int)s->n_nodes);
    if (s->plan.n_stages == 0)
        return o;
    const struct cost *c = &s->cost;
    (void)json_object_set_new(o, "token_ms", json_real(c->token_us / 1e3));
    (void)json_object_set_new(o, "prefill_ms", json_real(c->prefill_us / 1e3));
    (void)json_object_set_new(o, "tokens_per_s",
                              json_real(c->token_us > 0 ? 1e6 / c->token_us : 0));
    (void)json_object_set_new(o, "bottleneck",
                              json_pack("{s:i, s:s}", "stage", (int)c->bottleneck, "what",
                                        c->bottleneck_link ? "link" : "stage"));
    (void)json_object_set_new(o, "stages", stages_json(a, &s->plan));
    return o;
}

json_t *status_plan_json(struct agent *a, const struct hash256 *model, uint32_t context,
                         bool explain, enum err *ret_err, struct err_text *text)
{
    const struct model_shape *shape = node_shape(a->node, model);
    if (!shape) {
        *ret_err = err_set(text, ERR_AGAIN,
                           "the model's shape is not known here yet: try again in a moment");
        return NULL;
    }
    struct topology *t = malloc(sizeof *t);
    struct search_candidate *list = calloc(SEARCH_CANDIDATES_MAX, sizeof *list);
    struct plan plan = PLAN_INIT;
    struct search_options o = {.context = context, .precision = a->config.precision};
    json_t *body = NULL;
    uint32_t n = 0;
    *ret_err = t && list ? ERR_OK : ERR_NO_MEMORY;
    if (*ret_err == ERR_OK) {
        node_topology(a->node, t);
        *ret_err = search_plan(t, shape, &o, &plan, text);
    }
    const struct plan *running = control_active(node_control(a->node), model);
    if (*ret_err == ERR_OK) {
        body = json_pack("{s:o, s:o}", "best", status_plan_object(a, &plan), "running",
                         running ? status_plan_object(a, running) : json_null());
        if (explain && search_explain(t, shape, &o, list, SEARCH_CANDIDATES_MAX, &n) == ERR_OK) {
            json_t *candidates = json_array();
            for (uint32_t i = 0; i < n; i++)
                (void)json_array_append_new(candidates, candidate_json(a, &list[i]));
            (void)json_object_set_new(body, "candidates", candidates);
        }
        if (running && hash256_eq(&a->measured_model, model))
            (void)json_object_set_new(body, "measured",
                                      json_pack("{s:f, s:f}", "token_ms",
                                                a->measured_token_us / 1e3, "predicted_token_ms",
                                                running->predicted_token_us / 1e3));
    }
    free(list);
    free(t);
    return body;
}
