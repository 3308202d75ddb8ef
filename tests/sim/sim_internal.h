/* What the files of the simulator share:
 *   sim.c          the queue of events, the run
 *   sim_machine.c  life of a machine; the shell around its node core
 *   sim_stage.c    the shell around its data-plane core
 *   sim_net.c      sessions, datagrams, data links, discovery
 *   sim_chaos.c    faults, people and clients
 *   sim_check.c    what must hold */
#ifndef COVEY_TESTS_SIM_SIM_INTERNAL_H
#define COVEY_TESTS_SIM_SIM_INTERNAL_H

#include "agent/node.h"
#include "agent/pipeline.h"
#include "base/rng.h"
#include "tests/sim/hash_stage.h"
#include "tests/sim/sim.h"

enum {
    MACHINES = 12,
    MODELS = 2,
    LAYERS = 8,
    CONTEXT = 96,
    REQUESTS = 48,
    LOADING = 64,   /* epochs of one machine, as AGENT_EPOCHS_MAX */
    INSTANCES = 32, /* as in agent/inference.c */
    PLANS = 512,
    CONNS = 8192,
    DISK_ADDRESSES = 64,
    OUTPUTS = 1 << 14,
    MS = 1000,
    SECOND = 1000 * 1000,
    CONTROL_PORT = 26840,
    DATA_PORT = 26841,
    ARITHMETIC = 7,
};

enum kind {
    EV_TICK,       /* machine */
    EV_PIPE_TICK,  /* machine */
    EV_READ,       /* conn x, end y */
    EV_DATAGRAM,   /* p: struct datagram_in_flight */
    EV_DIAL,       /* p: struct dial */
    EV_READY,      /* conn x: the dialler's end */
    EV_DEADLINE,   /* conn x, end y: still not authenticated? */
    EV_DOWN,       /* conn x, end y */
    EV_LINK_DIAL,  /* machine, peer x, conn y of the session */
    EV_MEASURED,   /* machine, peer x, y: bytes per second */
    EV_FOUND,      /* machine hears of x; p: struct node_found */
    EV_ANNOUNCE,   /* machine, again and again */
    EV_INBOX,      /* machine: mail for the data plane */
    EV_LOOP_MAIL,  /* machine: mail for the node core */
    EV_COMPUTED,   /* machine */
    EV_LOADED,     /* machine, x: index of its loading table */
    EV_STOP_LATE,  /* machine */
    EV_START,      /* machine x */
    EV_WAKE,       /* machine x */
    EV_PERSON,     /* members are invited until all are in */
    EV_WANT,       /* x: model, y: 1 want, 0 no longer */
    EV_SUBMIT,     /* x: request */
    EV_CANCEL,     /* x: request */
    EV_NAP,        /* x: request, whose entry falls asleep */
    EV_CLONE_GONE, /* the clone is found and stopped */
    EV_FAULT,
    EV_DISK,    /* room again */
    EV_UNBLOCK, /* x, y: machines; y == MACHINES: a whole side */
    EV_HEAL,
    EV_CHECK,
};

enum { NOBODY = MACHINES }; /* an event that belongs to no machine */

struct event {
    uint64_t at, order;
    enum kind kind;
    uint32_t machine, boot;
    uint32_t x, y;
    void *p; /* owned */
};

enum packet_kind { PACKET_DATA, PACKET_READY, PACKET_FIN };
struct packet {
    struct packet *next;
    enum packet_kind kind;
    uint64_t due_us;
    uint8_t channel;
    uint32_t len;
    _Alignas(16) uint8_t bytes[];
};

struct conn_end {
    uint32_t machine, boot;
    uint64_t id;  /* of the session at this machine */
    bool open;    /* this machine still holds it */
    bool ready;   /* handshake done, or the link handed to the data plane */
    bool keyed;   /* authenticated: links may be dialled */
    bool reading; /* an EV_READ is on its way */
    uint64_t psk_tag;
    struct packet *first, *last; /* towards this end */
    uint64_t last_us, stalled_until_us, blocked_since_us;
};

struct conn {
    bool link;
    struct conn_end ends[2]; /* [0] dialled */
};

enum mail_type {
    MAIL_INSTALL,
    MAIL_COMMIT,
    MAIL_DRAIN,
    MAIL_RETIRE,
    MAIL_ROUTE,
    MAIL_NO_ROUTE,
    MAIL_SUBMIT,
    MAIL_CANCEL,
    MAIL_LINK,
    MAIL_UNLINK,
    MAIL_SLEPT,
    /* to the loop */
    MAIL_WOKEN,
    MAIL_WANT_LINK,
    MAIL_LINK_STATE,
    MAIL_RELEASED,
    MAIL_DRAINED,
    MAIL_USED,
    MAIL_PROGRESS,
};
struct mail {
    struct mail *next;
    enum mail_type type;
    uint64_t due_us;
    struct plan *plan; /* owned */
    struct epoch epoch;
    struct hash256 model;
    struct node_id peer;
    enum err error;
    uint32_t number; /* request, conn, instance */
    uint32_t sleep;  /* that the loop knew of when it was sent */
    uint64_t step;
    bool up;
    char text[ERR_TEXT_MAX];
};
struct mailbox_sim {
    struct mail *first, *last;
    uint64_t last_us;
};

struct loading {
    struct plan *plan; /* NULL: free */
    uint32_t stage;
    enum { LOADING_NOW, LOADING_ABORTED, LOADING_INSTALLED } state;
};

struct instance {
    bool used, committed;
    uint32_t sleep; /* after which it was confirmed */
    struct plan plan;
    uint32_t stage;
    uint64_t last_step;
    struct hash_stage *hash;
};

struct machine {
    uint32_t number;
    struct identity identity;
    struct rng rng; /* what its random source draws from */
    struct address address;
    struct address shown[4]; /* by discovery: it, and perhaps some where nobody answers */
    uint32_t n_shown;
    uint64_t budget_bytes, budget_usual_bytes;
    uint64_t budget_most_bytes; /* since it started: what was reserved then may stay */
    double speed;

    bool powered, alive, asleep;
    uint32_t n_sleeps, n_sleeps_told; /* in this boot, of more than a second; known to the loop */
    bool kill_pending, kill_polite, kill_power; /* at the end of the present step */
    bool disk_full;
    uint64_t term_on_disk;
    int crash_at; /* 1: before the next persist, 2: right after */
    bool stopping;
    uint32_t boot;
    uint64_t boot_id;
    uint64_t offset_us, slept_us, sleep_began_us, wake_at_us;
    int64_t wall_offset_ms;
    uint64_t slow_us; /* every answer takes up to so much longer */

    /* disk */
    uint8_t *trust_bytes, *control_bytes;
    size_t n_trust_bytes, n_control_bytes;
    struct node_id remembered_ids[DISK_ADDRESSES];
    struct address remembered[DISK_ADDRESSES];
    uint32_t n_remembered;
    bool holds[MODELS];

    struct node *node;
    uint32_t depth; /* of steps within steps */
    uint64_t tick_at_us;
    uint32_t n_spins;
    uint64_t next_accepted;
    struct loading loading[LOADING];
    bool link_dialling[MACHINES];

    struct pipeline *pipeline;
    uint64_t pipe_tick_at_us;
    bool busy;
    uint64_t busy_until_us;
    uint32_t busy_sleep; /* the last one before the computation began */
    bool stale_result;   /* we slept during it, and the core is being told its result */
    struct pipeline_event computed;
    struct pipeline_sampled sampled[STAGE_SEGMENTS_MAX];
    _Alignas(16) uint8_t rows_out[STAGE_ROWS_MAX * HASH_STAGE_ROW_BYTES];
    struct instance instances[INSTANCES];
    uint32_t links[MACHINES]; /* conn + 1 */
    struct mailbox_sim inbox, loop;
    uint64_t progress_due_us;

    /* people */
    bool wants_in; /* is to be a member */
    bool revoked, revoker;
    uint64_t join_try_us; /* no new token before */
    uint32_t issuer;

    /* what was seen, for checks */
    uint64_t term_seen, own_incarnation;
    uint64_t incarnations[MACHINES];
    uint64_t revoked_since_us[MACHINES]; /* that it knows of; 0: it does not */
    struct hash256 cluster;
    uint64_t dials_since_us[MACHINES];
    uint32_t n_dials[MACHINES]; /* since then */
    uint64_t checked_us;
};

enum request_state { REQUEST_NEW, REQUEST_RUNNING, REQUEST_DONE };
struct request {
    struct request_id id;
    enum request_state state;
    uint32_t entry, boot, model;
    int32_t tokens[CONTEXT]; /* the oracle's */
    uint32_t n_prompt, n_tokens, n_got;
    enum frame_finish finish;
    struct frame_sampler sampler;
    uint64_t deadline_after_us, deadline_us, submitted_us;
    bool cancelled, must_succeed;
};

struct output {
    uint64_t epoch, step, hash;
    uint32_t stage;
};

struct known_plan {
    struct epoch epoch;
};

struct sim {
    struct sim_options o;
    struct sim_result *r;
    struct rng rng;
    uint64_t now, order;
    struct event *heap;
    uint32_t n_heap, cap_heap;
    uint32_t n, n_all; /* without and with the place of a clone, which is the last */
    uint32_t cloned;   /* whose */
    uint64_t clone_gone_us;
    struct machine machines[MACHINES];
    struct conn *conns[CONNS];
    uint32_t n_conns;
    uint32_t live[CONNS]; /* conns with an open end */
    uint32_t n_live;
    uint32_t blocked[MACHINES][MACHINES]; /* [from][to]: how many partitions */
    struct model_shape shapes[MODELS];
    struct request requests[REQUESTS];
    uint32_t n_requests;
    int32_t bases[3][CONTEXT]; /* how conversations begin */
    struct known_plan plans[PLANS];
    uint32_t n_plans;
    struct output *outputs;
    bool healed, agreed, ran, probed;
    uint64_t heal_us, chaos_end_us;
};

struct dial {
    uint64_t session, started_us;
    uint32_t to, n_tries;
    uint8_t psk[32];
    uint64_t psk_tag;
};

struct datagram_in_flight {
    uint32_t conn, end;
    uint8_t channel;
    uint32_t len;
    uint8_t bytes[DATAGRAM_PAYLOAD_MAX];
};

/* sim.c */
void sim_fail(struct sim *w, const char *format, ...) __attribute__((format(printf, 2, 3)));
void sim_trace(struct sim *w, const char *format, ...) __attribute__((format(printf, 2, 3)));
uint32_t sim_below(struct sim *w, uint32_t n);
bool sim_chance(struct sim *w, uint32_t of);
void sim_note(struct sim *w, uint64_t v);
struct event *sim_post(struct sim *w, uint64_t at, enum kind kind, uint32_t machine);
bool sim_has(const struct sim *w, enum sim_fault fault); /* and it is not healed */
uint32_t sim_number(const struct sim *w, const struct node_id *id);
uint64_t sim_local_us(const struct sim *w, const struct machine *m);
void *sim_alloc(size_t n);

/* sim_machine.c */
void machine_start(struct sim *w, struct machine *m);
void machine_kill(struct sim *w, struct machine *m, bool power, bool polite);
enum err machine_step(struct sim *w, struct machine *m, const struct node_event *e);
/* Full: what the node core wants persisted cannot be written; trust still can. */
void machine_disk(struct sim *w, struct machine *m, bool full);
void machine_budget(struct sim *w, struct machine *m, uint64_t bytes);
void machine_tick(struct sim *w, struct machine *m);
void machine_loaded(struct sim *w, struct machine *m, uint32_t index);
void machine_mail(struct sim *w, struct machine *m);
void machine_wake(struct sim *w, struct machine *m);

/* sim_stage.c */
void stage_start(struct sim *w, struct machine *m);
void stage_stop(struct sim *w, struct machine *m);
void stage_mail(struct sim *w, struct machine *m, const struct mail *mail, bool to_loop);
void stage_inbox(struct sim *w, struct machine *m);
void stage_tick(struct sim *w, struct machine *m);
void stage_computed(struct sim *w, struct machine *m);
void stage_woken(struct sim *w, struct machine *m);
void stage_frame(struct sim *w, struct machine *m, uint32_t conn, const uint8_t *bytes, size_t n);
void stage_link_lost(struct sim *w, struct machine *m, uint32_t peer, bool close_it);
uint64_t sim_hash(const void *bytes, size_t n);

/* sim_net.c */
bool net_open(const struct sim *w, uint32_t from, uint32_t to);
struct conn_end *net_session(struct sim *w, const struct machine *m, uint64_t id,
                             uint32_t *ret_conn, uint32_t *ret_end);
void net_send(struct sim *w, uint32_t conn, uint32_t from_end, enum packet_kind kind,
              uint8_t channel, const void *bytes, size_t n, const void *more, size_t n_more);
void net_read(struct sim *w, const struct event *e);
void net_close(struct sim *w, uint32_t conn, uint32_t end);
void net_cut(struct sim *w, uint32_t conn, uint32_t late_us);
void net_down(struct sim *w, uint32_t conn, uint32_t end, enum node_down how);
void net_drop_machine(struct sim *w, struct machine *m, bool power);
void net_dial(struct sim *w, struct machine *m, const struct node_effect *x);
void net_dialled(struct sim *w, struct machine *m, struct event *e);
void net_ready(struct sim *w, struct machine *m, uint32_t conn);
void net_datagram(struct sim *w, struct machine *m, const struct wire_message *msg);
void net_datagram_in(struct sim *w, struct machine *m, const struct datagram_in_flight *d);
void net_dial_link(struct sim *w, struct machine *m, const struct node_effect *x);
void net_link_dialled(struct sim *w, struct machine *m, uint32_t peer, uint32_t session_conn);
void net_announce(struct sim *w, struct machine *m, bool gone);
void net_free(struct sim *w);

/* sim_chaos.c */
void chaos_begin(struct sim *w);
void chaos_fault(struct sim *w);
void chaos_clone_gone(struct sim *w);
void chaos_nap(struct sim *w, uint32_t request);
void chaos_heal(struct sim *w);
void chaos_unblock(struct sim *w, uint32_t x, uint32_t y);
void chaos_person(struct sim *w);
void chaos_answer(struct sim *w, struct machine *m, const struct node_effect *x);
void chaos_want(struct sim *w, uint32_t model, bool want);
void chaos_submit(struct sim *w, uint32_t number);
void chaos_cancel(struct sim *w, uint32_t number);
void chaos_last_requests(struct sim *w);
bool chaos_is_member(const struct sim *w, const struct machine *m);

/* sim_check.c */
void check_step(struct sim *w, struct machine *m);
void check_dial(struct sim *w, struct machine *m, uint32_t to);
void check_plan(struct sim *w, struct machine *m, const struct plan *p);
void check_memory(struct sim *w, struct machine *m);
void check_compute(struct sim *w, struct machine *m, const struct pipeline_compute *c);
void check_send(struct sim *w, struct machine *m, const struct pipeline_send *s);
void check_output(struct sim *w, const struct instance *in, const struct pipeline_compute *c,
                  const uint8_t *rows);
void check_token(struct sim *w, struct machine *m, const struct pipeline_effect *e);
void check_end(struct sim *w, struct machine *m, const struct pipeline_effect *e);
/* Do all machines see the same? If not, *ret says what differs. */
bool check_agree(struct sim *w, char ret[256]);
bool check_runs(struct sim *w, char ret[256]);
void check_conflict(struct sim *w);
void check_all_ended(struct sim *w);

#endif
