/* When a plan changes, to what, and how far the change has come (DESIGN section 5, PROTOCOL 3.7 and
 * 3.8). One change at a time for each instance:
 *
 *   must    nothing runs, or what runs cannot, or something else is wanted: at once
 *   should  a participant leaves, no longer counts, or lacks the memory: at once, the old one stays
 *   may     the topology changed: when the predicted gain is CONTROL_GAIN, at most once a minute
 *
 *   ROOM -> PREPARE -> COMMIT -> active. ROOM is passed at once where every participant has memory
 *   beside what it holds; else the old epochs of the instance are retired first. */
#include "planner/control_private.h"

#include "base/util.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum need { NEED_NONE, NEED_MAY, NEED_SHOULD, NEED_MUST };

/* The record of a wanted model; slots of models that are not wanted any more are taken over. */
struct instance *control_instance_of(struct control *c, const struct hash256 *model)
{
    struct instance *spare = NULL;
    for (uint32_t i = 0; i < c->n_instances; i++) {
        if (hash256_eq(&c->instances[i].model, model))
            return &c->instances[i];
        struct wanted *w = control_wanted_find(c, &c->instances[i].model);
        bool busy = control_tracked_of(c, &c->instances[i].model, TRACK_NEXT) ||
                    control_tracked_of(c, &c->instances[i].model, TRACK_ACTIVE);
        if ((!w || !w->wanted) && !busy)
            spare = &c->instances[i];
    }
    if (c->n_instances < CONTROL_MODELS_MAX)
        spare = &c->instances[c->n_instances++];
    if (!spare)
        return NULL;
    memset(spare, 0, sizeof *spare);
    spare->model = *model;
    spare->consider_us = c->now_us + CONTROL_SETTLE_US;
    return spare;
}

double control_plan_objective(struct control *c, const struct plan *p)
{
    struct cost cost;
    const struct model_shape *shape = control_shape_find(c, &p->model, p->precision);
    if (!shape || cost_plan(&c->view.topology, shape, p, OBJECTIVE_CHAT, 1, &cost) != ERR_OK ||
        !isfinite(cost.objective_us))
        return INFINITY;
    return cost.objective_us; /* whether it fits is another question */
}

/* A change of the view may make another plan better: to be considered after it has settled. */
void control_view_changed(struct control *c)
{
    c->version++;
    for (uint32_t i = 0; i < c->n_instances; i++)
        if (c->instances[i].consider_us == 0)
            c->instances[i].consider_us = c->now_us + CONTROL_SETTLE_US;
}

static void refusal_add(struct control *c, struct instance *in, const struct node_id *node,
                        uint64_t boot_id, const char *reason)
{
    uint32_t at = 0;
    while (at < in->n_refusals && !node_id_eq(&in->refusals[at].node, node))
        at++;
    if (at == NODES_MAX)
        at = 0;
    if (at == in->n_refusals)
        in->n_refusals++;
    struct refusal *r = &in->refusals[at];
    r->node = *node;
    r->boot_id = boot_id;
    r->until_us = c->now_us + CONTROL_REFUSED_US;
    (void)snprintf(r->reason, sizeof r->reason, "%s", reason);
    char who[SHORT_ID_MAX];
    short_of_32(node->bytes, who);
    control_note(c, "%s does not take part: %s", who, reason);
    c->version++;
}

/* Something has changed for the model: a new wish, other files. Those that refused are asked again.
 */
void control_refusals_forget(struct control *c, const struct hash256 *model)
{
    for (uint32_t i = 0; i < c->n_instances; i++) {
        struct instance *in = &c->instances[i];
        if (!hash256_eq(&in->model, model) || in->n_refusals == 0)
            continue;
        in->n_refusals = in->n_failures = 0;
        in->not_before_us = c->now_us;
        in->refused = false;
        memset(in->sentence, 0, sizeof in->sentence);
        c->version++;
    }
}

bool control_is_refused(const struct control *c, const struct hash256 *model)
{
    for (uint32_t i = 0; i < c->state.n_no_fit; i++)
        if (hash256_eq(&c->state.no_fit[i].model, model))
            return c->state.no_fit[i].refused;
    return false;
}

static const struct refusal *refused(const struct control *c, const struct instance *in,
                                     const struct topology_node *node)
{
    for (uint32_t i = 0; i < in->n_refusals; i++)
        if (node_id_eq(&in->refusals[i].node, &node->id) &&
            in->refusals[i].boot_id == node->boot_id && c->now_us < in->refusals[i].until_us)
            return &in->refusals[i];
    return NULL;
}

/* Memory that epochs of other models hold on a member. */
static uint64_t held_by_others(struct control *c, const struct member *m,
                               const struct hash256 *model)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < m->n_epochs; i++)
        if (!hash256_eq(&m->epochs[i].model, model))
            sum += m->epochs[i].memory_bytes;
    /* Ordered, and not in a report yet. */
    for (uint32_t i = 0; i < c->n_tracked; i++) {
        const struct tracked *t = &c->tracked[i];
        int stage = plan_stage_of(&t->plan, &m->id);
        if (t->track != TRACK_NEXT || stage < 0 || hash256_eq(&t->plan.model, model) ||
            (t->at[stage] != AT_UNKNOWN && t->at[stage] != EPOCH_NONE))
            continue;
        sum += t->plan.stages[stage].memory_bytes;
    }
    return sum;
}

/* The topology as this model may use it. */
static void search_topology(struct control *c, const struct instance *in, struct topology *ret)
{
    *ret = c->view.topology;
    for (uint32_t i = 0; i < ret->n_nodes; i++) {
        struct topology_node *node = &ret->nodes[i];
        const struct member *m = control_member_of(c, &node->id);
        if (!m || !m->heard || m->leaving || m->boot_id != node->boot_id ||
            !control_reachable(c, &node->id) || refused(c, in, node)) {
            node->eligible = false;
            continue;
        }
        uint64_t held = held_by_others(c, m, &in->model);
        node->budget_bytes = node->budget_bytes > held ? node->budget_bytes - held : 0;
    }
}

enum moving { MOVING_NOT, MOVING_SOON, MOVING_NOW };

/* Is there a participant that should not be one any longer, though it still computes? One that
 * leaves moves at once; a suspicion or a squeeze may pass. */
static enum moving should_move(struct control *c, const struct tracked *t)
{
    enum moving moving = MOVING_NOT;
    for (uint32_t i = 0; i < t->plan.n_stages; i++) {
        const struct plan_stage *s = &t->plan.stages[i];
        const struct member *m = control_member_of(c, &s->node);
        int at = control_view_index(c, &s->node);
        if (m && m->leaving)
            return MOVING_NOW;
        if (at < 0 || !c->view.topology.nodes[at].eligible ||
            s->memory_bytes > c->view.topology.nodes[at].budget_bytes)
            moving = MOVING_SOON;
    }
    return moving;
}

static bool differs(const struct plan *p, const struct wanted *w)
{
    return p->precision != w->precision || (w->context && p->context != w->context);
}

/* A forced search: not during the back-off after a failure, and where nothing fitted only when the
 * world has changed or some time has passed. */
static bool may_search(const struct control *c, const struct instance *in)
{
    return c->now_us >= in->not_before_us &&
           (c->now_us >= in->retry_us || in->searched_version != c->version);
}

static enum need need_of(struct control *c, struct instance *in, const struct wanted *w,
                         struct tracked *active)
{
    if (!active || differs(&active->plan, w) || active->lost)
        return may_search(c, in) ? NEED_MUST : NEED_NONE;
    enum moving moving = should_move(c, active);
    if (moving == MOVING_NOT) {
        in->should_us = 0;
        in->cannot_move = false;
    } else {
        if (in->should_us == 0)
            in->should_us = c->now_us;
        bool settled = moving == MOVING_NOW || c->now_us - in->should_us >= CONTROL_SETTLE_US;
        return settled && may_search(c, in) ? NEED_SHOULD : NEED_NONE;
    }
    if (in->consider_us == 0 || c->now_us < in->consider_us ||
        (in->changed_us && c->now_us < in->changed_us + CONTROL_REBALANCE_US) ||
        (in->considered_us && c->now_us < in->considered_us + CONSIDER_US) ||
        c->now_us < in->not_before_us || control_tracked_of(c, &in->model, TRACK_DRAIN))
        return NEED_NONE;
    return NEED_MAY;
}

static bool same_split(const struct plan *a, const struct plan *b)
{
    if (a->n_stages != b->n_stages || a->context != b->context || a->precision != b->precision)
        return false;
    for (uint32_t i = 0; i < a->n_stages; i++)
        if (!node_id_eq(&a->stages[i].node, &b->stages[i].node) ||
            a->stages[i].boot_id != b->stages[i].boot_id ||
            a->stages[i].n_layers != b->stages[i].n_layers)
            return false;
    return true;
}

/* Is there memory for the plan beside everything that its participants hold? */
static bool has_room(struct control *c, const struct plan *p)
{
    for (uint32_t i = 0; i < p->n_stages; i++) {
        const struct member *m = control_member_of(c, &p->stages[i].node);
        int at = control_view_index(c, &p->stages[i].node);
        uint64_t need = p->stages[i].memory_bytes;
        if (!m || at < 0)
            return false;
        uint64_t budget = c->view.topology.nodes[at].budget_bytes;
        if (need > budget || m->reserved_bytes > budget - need)
            return false;
    }
    return true;
}

/* Everything that the instance holds goes first. */
static void retire_old(struct control *c, const struct hash256 *model)
{
    for (uint32_t i = 0; i < c->n_tracked; i++) {
        struct tracked *t = &c->tracked[i];
        if (!hash256_eq(&t->plan.model, model) || t->track == TRACK_NEXT)
            continue;
        if (t->track != TRACK_RETIRE && t->track != TRACK_ABORT)
            control_track_as(c, t, TRACK_RETIRE);
    }
}

static void describe_change(struct control *c, const struct plan *p, const char *what)
{
    char line[ERR_TEXT_MAX];
    size_t n = 0;
    for (uint32_t i = 0; i < p->n_stages && n < sizeof line; i++) {
        const struct plan_stage *s = &p->stages[i];
        char who[SHORT_ID_MAX];
        short_of_32(s->node.bytes, who);
        int w = snprintf(line + n, sizeof line - n, "%s%s %u-%u", i ? ", " : "", who,
                         s->first_layer, s->first_layer + s->n_layers - 1);
        n += w > 0 ? (size_t)w : 0;
    }
    control_note(c, "%s of %.40s (context %u): %.200s", what, p->model_name, p->context, line);
}

/* A plan that has no room beside the one that runs may have it with a smaller KV cache: then
 * nothing stops. Otherwise it stays as it is, and the old one goes first. */
static bool fit_beside(struct control *c, const struct instance *in, struct plan *p)
{
    const struct model_shape *shape = control_shape_find(c, &in->model, p->precision);
    struct plan small = *p;
    const uint32_t least = cost_whole_blocks(p->context);
    while (!has_room(c, &small)) {
        if (!shape || small.kv_positions <= least)
            return false;
        uint32_t half = cost_whole_blocks(small.kv_positions / 2);
        cost_give_kv(shape, MAX_OF(half, least), &small);
    }
    *p = small;
    return true;
}

static void change_start(struct control *c, struct instance *in, const struct plan *found)
{
    struct plan p = *found;
    p.epoch.term = c->planner_term;
    p.epoch.planner = c->options.self;
    p.epoch.sequence = ++c->sequence;
    bool room_first = in->retire_first || !fit_beside(c, in, &p);
    plan_seal(&p);
    struct tracked *t = control_tracked_add(c, &p, TRACK_NEXT);
    if (!t)
        return;
    t->phase = PHASE_PREPARE;
    if (room_first) {
        t->phase = PHASE_ROOM;
        retire_old(c, &in->model);
    }
    in->retire_first = false;
    describe_change(c, &p, "new plan");
}

static void sentence_set(struct instance *in, const char *text)
{
    memset(in->sentence, 0, sizeof in->sentence);
    (void)snprintf(in->sentence, sizeof in->sentence, "%s", text);
}

/* Nothing fits, or not now: say so, and look again when the world has changed. */
static void no_plan(struct control *c, struct instance *in, const struct tracked *active,
                    const char *sentence)
{
    in->not_before_us = c->now_us + SEARCH_SPACING_US;
    in->retry_us = c->now_us + NO_FIT_RETRY_US;
    in->searched_version = c->version;
    bool any = false;
    char text[ERR_TEXT_MAX];
    (void)snprintf(text, sizeof text, "%s", sentence);
    for (uint32_t i = 0; i < in->n_refusals; i++)
        if (c->now_us < in->refusals[i].until_us) {
            char who[SHORT_ID_MAX];
            short_of_32(in->refusals[i].node.bytes, who);
            (void)snprintf(text, sizeof text, "%s refused: %.260s (%.80s)", who,
                           in->refusals[i].reason, sentence);
            any = true;
        }
    sentence_set(in, text);
    in->refused = any;
    if (!active || in->cannot_move)
        return;
    in->cannot_move = true;
    for (uint32_t i = 0; i < active->plan.n_stages; i++) {
        const struct member *m = control_member_of(c, &active->plan.stages[i].node);
        if (m && m->leaving)
            control_send_command(c, &m->id, VERB_CANNOT_MOVE, &active->plan.epoch.hash);
    }
}

static void change_consider(struct control *c, struct instance *in, const struct wanted *w,
                            const struct tracked *active, enum need need)
{
    const struct model_shape *shape = control_shape_find(c, &in->model, w->precision);
    if (!shape) {
        no_plan(c, in, active, "the description of this model has not arrived yet");
        return;
    }
    struct topology t;
    search_topology(c, in, &t);
    struct search_options o = SEARCH_OPTIONS_INIT;
    o.context = w->context;
    o.precision = w->precision;
    struct plan p;
    struct err_text text;
    enum err e = search_plan(&t, shape, &o, &p, &text);
    if (e == ERR_NO_MEMORY) {
        c->failed = e;
        return;
    }
    if (need == NEED_MAY) {
        in->consider_us = 0;
        in->considered_us = c->now_us;
        if (e != ERR_OK || same_split(&p, &active->plan))
            return;
        double now_us = control_plan_objective(c, &active->plan),
               then_us = control_plan_objective(c, &p);
        if (!(then_us <= now_us * (1 - CONTROL_GAIN)))
            return;
    }
    if (e != ERR_OK || (active && !active->lost && same_split(&p, &active->plan) &&
                        p.kv_positions >= active->plan.kv_positions)) {
        no_plan(c, in, active, e == ERR_OK ? "nothing better is possible now" : text.text);
        return;
    }
    sentence_set(in, "");
    change_start(c, in, &p);
}

static void change_abort(struct control *c, struct instance *in, struct tracked *t, const char *why)
{
    control_note(c, "plan of %.40s given up: %s", t->plan.model_name, why);
    control_track_as(c, t, TRACK_ABORT);
    in->n_failures = MIN_OF(in->n_failures + 1, 6u);
    in->not_before_us = c->now_us + ((uint64_t)RESEND_US << in->n_failures);
    in->retry_us = 0;
}

/* A participant was lost or the wish has changed: the change makes no sense any more. */
static bool change_is_off(struct control *c, const struct tracked *t, const struct wanted *w)
{
    if (differs(&t->plan, w))
        return true;
    for (uint32_t i = 0; i < t->plan.n_stages; i++) {
        const struct member *m = control_member_of(c, &t->plan.stages[i].node);
        if (!control_stage_alive(c, t, i) || !m || m->leaving)
            return true;
    }
    return false;
}

static void drive_room(struct control *c, struct instance *in, struct tracked *t)
{
    retire_old(c, &in->model); /* what came to light since the change began goes too */
    bool pending = false, late = c->now_us - t->since_us >= CONTROL_RETIRE_US;
    for (uint32_t i = 0; i < c->n_tracked; i++) {
        const struct tracked *old = &c->tracked[i];
        if (old == t || !hash256_eq(&old->plan.model, &in->model))
            continue;
        for (uint32_t k = 0; k < old->plan.n_stages; k++) {
            if (!control_stage_alive(c, old, k) || old->at[k] == EPOCH_NONE ||
                old->at[k] == EPOCH_FAILED)
                continue;
            pending = true;
            if (late)
                refusal_add(c, in, &old->plan.stages[k].node, old->plan.stages[k].boot_id,
                            "its memory was not freed in time");
        }
    }
    if (late) {
        change_abort(c, in, t, "memory was not freed in time");
        in->not_before_us = c->now_us;
    } else if (!pending && has_room(c, &t->plan)) {
        control_track_as(c, t, TRACK_NEXT);
        t->phase = PHASE_PREPARE;
    }
}

static bool send_due(struct control *c, struct tracked *t, uint32_t stage)
{
    if (t->sent_us[stage] && c->now_us - t->sent_us[stage] < RESEND_US)
        return false;
    t->sent_us[stage] = c->now_us;
    return true;
}

static void change_refused(struct control *c, struct instance *in, struct tracked *t)
{
    const struct plan_stage *s = &t->plan.stages[t->failed_stage];
    const struct member *m = control_member_of(c, &s->node);
    bool holds_old = false; /* of this model: that can go first */
    for (uint32_t i = 0; m && i < m->n_epochs; i++)
        holds_old |= hash256_eq(&m->epochs[i].model, &in->model) && m->epochs[i].memory_bytes > 0;
    if (t->error == ERR_NO_FIT && holds_old)
        in->retire_first = true;
    else
        refusal_add(c, in, &s->node, s->boot_id, t->reason);
    change_abort(c, in, t, t->reason);
    in->not_before_us = c->now_us;
}

static void drive_prepare(struct control *c, struct instance *in, struct tracked *t)
{
    bool all = true;
    for (uint32_t i = 0; i < t->plan.n_stages; i++) {
        const struct plan_stage *s = &t->plan.stages[i];
        if (t->at[i] == EPOCH_FAILED) {
            change_refused(c, in, t);
            return;
        }
        if (t->at[i] == EPOCH_GOING) {
            change_abort(c, in, t, "a participant dropped it");
            return;
        }
        all &= t->at[i] == EPOCH_PREPARED;
        if (t->at[i] != AT_UNKNOWN && t->at[i] != EPOCH_NONE)
            continue;
        if (c->now_us - t->since_us >= CONTROL_RETIRE_US) {
            refusal_add(c, in, &s->node, s->boot_id, "it does not accept the plan");
            change_abort(c, in, t, "a participant does not accept it");
            return;
        }
        if (send_due(c, t, i))
            control_send_prepare(c, &s->node, &t->plan);
    }
    if (all) {
        control_track_as(c, t, TRACK_NEXT);
        t->phase = PHASE_COMMIT;
    }
}

static void change_done(struct control *c, struct instance *in, struct tracked *t)
{
    struct tracked *old = control_tracked_of(c, &in->model, TRACK_ACTIVE);
    if (old)
        control_track_as(c, old, TRACK_DRAIN);
    control_track_as(c, t, TRACK_ACTIVE);
    in->changed_us = c->now_us;
    in->n_failures = 0;
    in->cannot_move = false;
    sentence_set(in, "");
    describe_change(c, &t->plan, "active plan");
}

static void drive_commit(struct control *c, struct instance *in, struct tracked *t)
{
    bool all = true;
    for (uint32_t i = 0; i < t->plan.n_stages; i++) {
        if (t->at[i] == EPOCH_COMMITTED || t->at[i] == EPOCH_CURRENT)
            continue;
        all = false;
        if (t->at[i] != EPOCH_PREPARED) {
            change_abort(c, in, t, "a participant dropped it before the commit");
            return;
        }
        if (send_due(c, t, i))
            control_send_command(c, &t->plan.stages[i].node, VERB_COMMIT, &t->plan.epoch.hash);
    }
    if (all)
        change_done(c, in, t);
    else if (c->now_us - t->since_us >= CONTROL_COMMIT_US)
        change_abort(c, in, t, "not all participants committed in time");
}

/* A broken session alone may be redialled in a moment, and says nothing about the data links; all
 * other reasons for a plan to be broken are final. */
static bool only_a_flap(struct control *c, const struct tracked *t)
{
    for (uint32_t i = 0; i < t->plan.n_stages; i++) {
        const struct plan_stage *s = &t->plan.stages[i];
        int at = control_view_index(c, &s->node);
        bool executes = t->at[i] == EPOCH_COMMITTED || t->at[i] == EPOCH_CURRENT;
        if (!executes || at < 0 || c->view.topology.nodes[at].boot_id != s->boot_id ||
            (!control_reachable(c, &s->node) && !control_counts(c, &s->node)))
            return false;
    }
    return true;
}

/* The active epoch, if any. One that cannot run for long gives its memory back; until then it may
 * come to life again (a link that returns). */
static struct tracked *watch_active(struct control *c, struct instance *in)
{
    struct tracked *active = control_tracked_of(c, &in->model, TRACK_ACTIVE);
    if (!active)
        return NULL;
    if (!control_plan_broken(c, active)) {
        active->broken_us = 0;
        active->lost = false;
        return active;
    }
    for (uint32_t i = 0; i < active->plan.n_stages; i++) {
        const struct plan_stage *s = &active->plan.stages[i];
        if (active->at[i] != EPOCH_FAILED)
            continue;
        refusal_add(c, in, &s->node, s->boot_id, active->reason);
        in->not_before_us = c->now_us;
        control_track_as(c, active, TRACK_RETIRE);
        return NULL;
    }
    if (active->broken_us == 0)
        active->broken_us = c->now_us;
    uint64_t broken_for_us = c->now_us - active->broken_us;
    active->lost = broken_for_us >= FLAP_US || !only_a_flap(c, active);
    if (broken_for_us < CONTROL_DRAIN_US)
        return active;
    control_track_as(c, active, TRACK_RETIRE);
    return NULL;
}

/* Not wanted any more: what runs drains, what was to come is aborted. */
void control_instance_end(struct control *c, const struct hash256 *model)
{
    struct tracked *active = control_tracked_of(c, model, TRACK_ACTIVE);
    struct tracked *next = control_tracked_of(c, model, TRACK_NEXT);
    if (active)
        control_track_as(c, active, TRACK_DRAIN);
    if (next)
        control_track_as(c, next, TRACK_ABORT);
}

void control_instance_drive(struct control *c, struct instance *in, const struct wanted *w)
{
    struct tracked *next = control_tracked_of(c, &in->model, TRACK_NEXT);
    if (next && change_is_off(c, next, w)) {
        control_track_as(c, next, TRACK_ABORT);
        next = NULL;
    }
    struct tracked *active = watch_active(c, in);
    if (!next) {
        enum need need = need_of(c, in, w, active);
        if (need == NEED_NONE)
            return;
        change_consider(c, in, w, active, need);
        next = control_tracked_of(c, &in->model, TRACK_NEXT);
    }
    if (next && next->phase == PHASE_ROOM)
        drive_room(c, in, next);
    if (next && next->track == TRACK_NEXT && next->phase == PHASE_PREPARE)
        drive_prepare(c, in, next);
    if (next && next->track == TRACK_NEXT && next->phase == PHASE_COMMIT)
        drive_commit(c, in, next);
}
