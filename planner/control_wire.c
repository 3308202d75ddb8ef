/* Messages of the control channel: packing, unpacking, and the loop by which a planner that is its
 * own participant sends itself the same bytes as everybody else. */
#include "planner/control_private.h"

#include "base/util.h"

#include <string.h>

/* protobuf-c's views have no const; packing only reads. */
ProtobufCBinaryData control_view_bytes(const uint8_t *bytes, size_t n)
{
    union {
        const uint8_t *in;
        uint8_t *out;
    } u = {.in = bytes};
    return (ProtobufCBinaryData){n, u.out};
}

char *control_view_text(const char *text)
{
    union {
        const char *in;
        char *out;
    } u = {.in = text};
    return u.out;
}

bool control_take_id(const ProtobufCBinaryData *b, struct node_id *ret)
{
    if (b->len != sizeof ret->bytes)
        return false;
    memcpy(ret->bytes, b->data, sizeof ret->bytes);
    return true;
}

bool control_take_hash(const ProtobufCBinaryData *b, struct hash256 *ret)
{
    if (b->len != sizeof ret->bytes)
        return false;
    memcpy(ret->bytes, b->data, sizeof ret->bytes);
    return true;
}

static void loop_push(struct control *c, uint8_t *take_bytes, size_t n)
{
    if (c->loop_n == LOOP_MAX) { /* as good as lost: it is sent again */
        free(take_bytes);
        return;
    }
    c->loop[(c->loop_first + c->loop_n++) % LOOP_MAX] = (struct loop_message){take_bytes, n};
}

void control_loop_clear(struct control *c)
{
    for (; c->loop_n > 0; c->loop_n--) {
        free(c->loop[c->loop_first].bytes);
        c->loop_first = (c->loop_first + 1) % LOOP_MAX;
    }
}

void control_loop_drain(struct control *c)
{
    while (c->loop_n > 0) {
        struct loop_message m = c->loop[c->loop_first];
        c->loop_first = (c->loop_first + 1) % LOOP_MAX;
        c->loop_n--;
        (void)control_message_in(c, &c->options.self, m.bytes, m.n);
        free(m.bytes);
    }
}

void control_send_message(struct control *c, const struct node_id *to,
                          const Covey__Control__Message *m)
{
    bool self = control_is_self(c, to);
    if (!self && !control_reachable(c, to))
        return;
    size_t n = covey__control__message__get_packed_size(m);
    uint8_t *bytes = malloc(n ? n : 1);
    if (!bytes) {
        c->failed = ERR_NO_MEMORY;
        return;
    }
    (void)covey__control__message__pack(m, bytes);
    if (self) {
        loop_push(c, bytes, n);
        return;
    }
    struct wire_message w = {.to = *to,
                             .channel = CHANNEL_CONTROL,
                             .way = WAY_SESSION,
                             .len = (uint32_t)n,
                             .bytes = bytes};
    enum err e = n > FRAME_PAYLOAD_MAX ? ERR_LIMIT : outbox_push(&c->update->outbox, &w);
    free(bytes);
    if (e == ERR_NO_MEMORY)
        c->failed = e;
}

void control_send_all(struct control *c, const Covey__Control__Message *m, bool with_self)
{
    for (uint32_t i = 0; i < c->view.topology.n_nodes; i++) {
        const struct node_id *id = &c->view.topology.nodes[i].id;
        if (!control_is_self(c, id))
            control_send_message(c, id, m);
    }
    if (with_self)
        control_send_message(c, &c->options.self, m);
}

void control_send_command(struct control *c, const struct node_id *to, enum verb verb,
                          const struct hash256 *hash)
{
    Covey__Control__Command b = COVEY__CONTROL__COMMAND__INIT;
    b.term = c->planner_term;
    b.verb = verb;
    b.hash = control_view_bytes(hash->bytes, 32);
    Covey__Control__Message m = COVEY__CONTROL__MESSAGE__INIT;
    m.body_case = COVEY__CONTROL__MESSAGE__BODY_COMMAND;
    m.command = &b;
    control_send_message(c, to, &m);
}

void control_send_prepare(struct control *c, const struct node_id *to, const struct plan *p)
{
    struct plan_message storage;
    plan_to_message(p, &storage);
    Covey__Control__Prepare b = COVEY__CONTROL__PREPARE__INIT;
    b.term = c->planner_term;
    b.plan = &storage.plan;
    Covey__Control__Message m = COVEY__CONTROL__MESSAGE__INIT;
    m.body_case = COVEY__CONTROL__MESSAGE__BODY_PREPARE;
    m.prepare = &b;
    control_send_message(c, to, &m);
}

void control_send_heartbeat(struct control *c, const struct node_id *to, bool full, bool resigns)
{
    Covey__Control__Heartbeat b = COVEY__CONTROL__HEARTBEAT__INIT;
    b.term = c->planner_term;
    b.wanted_digest = control_wanted_digest(c);
    b.state_digest = control_state_digest(&c->state);
    b.full = full;
    b.resigns = resigns;
    b.settled = c->settled;
    b.wall_ms = c->wall_ms;
    Covey__Control__Message m = COVEY__CONTROL__MESSAGE__INIT;
    m.body_case = COVEY__CONTROL__MESSAGE__BODY_HEARTBEAT;
    m.heartbeat = &b;
    control_send_message(c, to, &m);
}

void control_send_sync(struct control *c, const struct node_id *to)
{
    Covey__Control__Sync b = COVEY__CONTROL__SYNC__INIT;
    b.term = c->planner_term;
    Covey__Control__Message m = COVEY__CONTROL__MESSAGE__INIT;
    m.body_case = COVEY__CONTROL__MESSAGE__BODY_SYNC;
    m.sync = &b;
    control_send_message(c, to, &m);
}

/* How long ago the planner was heard, for hearsay. */
static uint64_t planner_age_ms(const struct control *c)
{
    return c->role == ROLE_PLAN ? 0 : (c->now_us - c->planner_heard_us) / 1000;
}

struct state_message {
    Covey__Control__State state;
    struct plan_message plans[CONTROL_MODELS_MAX];
    Covey__Control__Plan *plan_pointers[CONTROL_MODELS_MAX];
    Covey__Control__NoFit no_fit[CONTROL_MODELS_MAX];
    Covey__Control__NoFit *no_fit_pointers[CONTROL_MODELS_MAX];
};

void control_send_state(struct control *c, const struct node_id *to)
{
    struct state_message s;
    covey__control__state__init(&s.state);
    s.state.term = c->planner_term;
    s.state.planner = control_view_bytes(c->planner_id.bytes, 32);
    s.state.age_ms = planner_age_ms(c);
    s.state.active = s.plan_pointers;
    s.state.no_fit = s.no_fit_pointers;
    for (uint32_t i = 0; i < c->state.n_active; i++) {
        plan_to_message(&c->state.active[i], &s.plans[i]);
        s.plan_pointers[s.state.n_active++] = &s.plans[i].plan;
    }
    for (uint32_t i = 0; i < c->state.n_no_fit; i++) {
        covey__control__no_fit__init(&s.no_fit[i]);
        s.no_fit[i].model = control_view_bytes(c->state.no_fit[i].model.bytes, 32);
        s.no_fit[i].sentence = control_view_text(c->state.no_fit[i].sentence);
        s.no_fit[i].refused = c->state.no_fit[i].refused;
        s.no_fit_pointers[s.state.n_no_fit++] = &s.no_fit[i];
    }
    Covey__Control__Message m = COVEY__CONTROL__MESSAGE__INIT;
    m.body_case = COVEY__CONTROL__MESSAGE__BODY_STATE;
    m.state = &s.state;
    if (to)
        control_send_message(c, to, &m);
    else
        control_send_all(c, &m, true);
}

struct report_message {
    Covey__Control__Report report;
    Covey__Control__EpochState epochs[CONTROL_LOCAL_MAX];
    Covey__Control__EpochState *epoch_pointers[CONTROL_LOCAL_MAX];
    struct plan_message plans[CONTROL_LOCAL_MAX];
    Covey__Control__Used used[CONTROL_WANTED_MAX];
    Covey__Control__Used *used_pointers[CONTROL_WANTED_MAX];
};

static void report_fill(struct control *c, bool full, struct report_message *r)
{
    covey__control__report__init(&r->report);
    r->report.term_seen = c->term_seen;
    r->report.boot_id = c->options.boot_id;
    r->report.reserved_bytes = control_reserved_bytes(c);
    r->report.leaving = c->leaving;
    r->report.wall_ms = c->wall_ms;
    r->report.serial = ++c->report_serial;
    if (c->planner_direct && control_planner_lives(c)) {
        r->report.planner = control_view_bytes(c->planner_id.bytes, 32);
        r->report.planner_term = c->planner_term;
    }
    r->report.epochs = r->epoch_pointers;
    for (uint32_t i = 0; i < c->n_locals; i++) {
        const struct local *l = &c->locals[i];
        Covey__Control__EpochState *e = &r->epochs[i];
        covey__control__epoch_state__init(e);
        e->hash = control_view_bytes(l->plan.epoch.hash.bytes, 32);
        e->model = control_view_bytes(l->plan.model.bytes, 32);
        e->state = l->state;
        e->memory_bytes = l->state == EPOCH_FAILED ? 0 : l->plan.stages[l->stage].memory_bytes;
        e->error = (uint32_t)l->error;
        e->reason = control_view_text(l->reason);
        if (full && l->state != EPOCH_FAILED) {
            plan_to_message(&l->plan, &r->plans[i]);
            e->plan = &r->plans[i].plan;
        }
        r->epoch_pointers[r->report.n_epochs++] = e;
    }
    r->report.used = r->used_pointers;
    for (uint32_t i = 0; i < c->n_wanted; i++) {
        const struct wanted *w = &c->wanted[i];
        if (!w->wanted || w->used_us == 0)
            continue;
        Covey__Control__Used *u = &r->used[r->report.n_used];
        covey__control__used__init(u);
        u->model = control_view_bytes(w->model.bytes, 32);
        u->age_ms = (c->now_us - w->used_us) / 1000;
        r->used_pointers[r->report.n_used++] = u;
    }
}

void control_send_report(struct control *c, const struct node_id *to, bool full)
{
    struct report_message *r = malloc(sizeof *r);
    if (!r) {
        c->failed = ERR_NO_MEMORY;
        return;
    }
    report_fill(c, full, r);
    Covey__Control__Message m = COVEY__CONTROL__MESSAGE__INIT;
    m.body_case = COVEY__CONTROL__MESSAGE__BODY_REPORT;
    m.report = &r->report;
    control_send_message(c, to, &m);
    free(r);
}

void control_send_claim_answer(struct control *c, const struct node_id *to, uint64_t term,
                               bool agree)
{
    struct report_message *r = malloc(sizeof *r);
    if (!r) {
        c->failed = ERR_NO_MEMORY;
        return;
    }
    report_fill(c, true, r);
    Covey__Control__ClaimAnswer b = COVEY__CONTROL__CLAIM_ANSWER__INIT;
    b.term = term;
    b.agree = agree;
    b.term_seen = c->term_seen;
    if (!agree && control_planner_lives(c)) {
        b.planner = control_view_bytes(c->planner_id.bytes, 32);
        b.planner_term = c->planner_term;
        b.planner_age_ms = planner_age_ms(c);
    }
    b.report = &r->report;
    Covey__Control__Message m = COVEY__CONTROL__MESSAGE__INIT;
    m.body_case = COVEY__CONTROL__MESSAGE__BODY_CLAIM_ANSWER;
    m.claim_answer = &b;
    control_send_message(c, to, &m);
    free(r);
}

static enum err sync_in(struct control *c, const struct node_id *from)
{
    if (control_planner_lives(c) && (c->role != ROLE_PLAN || c->settled))
        control_send_state(c, from);
    return ERR_OK;
}

/* Messages take milliseconds, and what is asked is whether clocks differ by minutes. */
static void clock_heard(struct control *c, const struct node_id *from, uint64_t wall_ms)
{
    uint32_t at = 0;
    if (wall_ms == 0 || c->wall_ms == 0 || wall_ms > UINT64_C(1) << 62 || control_is_self(c, from))
        return;
    while (at < c->n_clocks && !node_id_eq(&c->clocks[at].node, from))
        at++;
    if (at == NODES_MAX)
        at = 0;
    if (at == c->n_clocks)
        c->n_clocks++;
    c->clocks[at] = (struct member_clock){*from, (int64_t)(wall_ms - c->wall_ms)};
}

bool control_clock_ahead(const struct control *c, const struct node_id *id, int64_t *ret_ms)
{
    for (uint32_t i = 0; i < c->n_clocks; i++)
        if (node_id_eq(&c->clocks[i].node, id)) {
            *ret_ms = c->clocks[i].ahead_ms;
            return true;
        }
    return false;
}

static enum err dispatch(struct control *c, const struct node_id *from,
                         const Covey__Control__Message *m)
{
    switch (m->body_case) {
    case COVEY__CONTROL__MESSAGE__BODY_CLAIM:
        control_claim_in(c, from, m->claim);
        return ERR_OK;
    case COVEY__CONTROL__MESSAGE__BODY_CLAIM_ANSWER:
        return control_claim_answer_in(c, from, m->claim_answer);
    case COVEY__CONTROL__MESSAGE__BODY_HEARTBEAT:
        clock_heard(c, from, m->heartbeat->wall_ms);
        return control_heartbeat_in(c, from, m->heartbeat);
    case COVEY__CONTROL__MESSAGE__BODY_REPORT:
        clock_heard(c, from, m->report->wall_ms);
        return control_report_in(c, from, m->report);
    case COVEY__CONTROL__MESSAGE__BODY_PREPARE:
        return control_prepare_in(c, from, m->prepare);
    case COVEY__CONTROL__MESSAGE__BODY_COMMAND:
        return control_command_in(c, from, m->command);
    case COVEY__CONTROL__MESSAGE__BODY_STATE:
        return control_state_in(c, from, m->state);
    case COVEY__CONTROL__MESSAGE__BODY_SYNC:
        return sync_in(c, from);
    case COVEY__CONTROL__MESSAGE__BODY_WANTED:
        return control_wanted_in(c, from, m->wanted);
    case COVEY__CONTROL__MESSAGE__BODY__NOT_SET:
    default:
        return ERR_OK; /* of a newer version: skipped */
    }
}

/* A term this large is a lie: none could follow it. */
#define TERM_LIMIT (UINT64_C(1) << 62)

static uint64_t message_term(const Covey__Control__Message *m)
{
    switch (m->body_case) {
    case COVEY__CONTROL__MESSAGE__BODY_CLAIM:
        return m->claim->term;
    case COVEY__CONTROL__MESSAGE__BODY_CLAIM_ANSWER:
        return MAX_OF(m->claim_answer->term_seen, m->claim_answer->planner_term);
    case COVEY__CONTROL__MESSAGE__BODY_HEARTBEAT:
        return m->heartbeat->term;
    case COVEY__CONTROL__MESSAGE__BODY_REPORT:
        return MAX_OF(m->report->term_seen, m->report->planner_term);
    case COVEY__CONTROL__MESSAGE__BODY_PREPARE:
        return m->prepare->term;
    case COVEY__CONTROL__MESSAGE__BODY_COMMAND:
        return m->command->term;
    case COVEY__CONTROL__MESSAGE__BODY_STATE:
        return m->state->term;
    default:
        return 0;
    }
}

enum err control_message_in(struct control *c, const struct node_id *from, const uint8_t *bytes,
                            size_t n)
{
    if (n > FRAME_PAYLOAD_MAX)
        return ERR_LIMIT;
    Covey__Control__Message *m = covey__control__message__unpack(NULL, n, bytes);
    if (!m)
        return ERR_CORRUPT;
    enum err e = message_term(m) < TERM_LIMIT ? dispatch(c, from, m) : ERR_CORRUPT;
    covey__control__message__free_unpacked(m, NULL);
    return e;
}
