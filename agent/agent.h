/* The running agent: everything of one node wired together around the loop thread. The inside,
 * shared by serve.c        start, loop, timers, stop serve_node.c   carrying out what the node core
 * wants serve_mail.c   mail from other threads serve_calls.c  what HTTP threads ask for status.c
 * the JSON that people and programs see */
#ifndef COVEY_AGENT_AGENT_H
#define COVEY_AGENT_AGENT_H

#include "agent/call.h"
#include "agent/config.h"
#include "agent/control_net.h"
#include "agent/inference.h"
#include "agent/loader.h"
#include "agent/models.h"
#include "agent/node.h"
#include "agent/peer_fds.h"
#include "agent/store.h"
#include "agent/worker.h"
#include "base/log.h"
#include "transport/hello_net.h"
#include "transport/mailbox.h"

#include <jansson.h>
#include <pthread.h>
#include <uv.h>

#define COVEY_VERSION "0.1.0"

enum {
    AGENT_EPOCHS_MAX = 64,
    AGENT_CALLS_MAX = 256,
    AGENT_DOWNS_MAX = NODE_SESSIONS_MAX,
    AGENT_DATA_DIALS_MAX = 64,
    AGENT_LOCAL_US = 5 * 1000 * 1000,  /* memory and power are read again */
    AGENT_PEERS_US = 15 * 1000 * 1000, /* names given with --peer are looked up again */
    AGENT_SHAPE_US =
        5 * 1000 * 1000, /* a member that is asked for a model's shape answers by then */
    AGENT_LOAD_US = 120 * 1000 * 1000, /* a model that is asked for must run by then */
    AGENT_NO_FIT_US = 3 * 1000 * 1000, /* so long "does not fit" must last before clients hear it */
    AGENT_REFUSED_US = 1000 * 1000,    /* and so long a refusal: another member may do it */
    AGENT_STOP_US = 12 * 1000 * 1000,  /* a polite stop gives up waiting then */
    AGENT_DRAIN_US = 2 * 1000 * 1000,  /* so long answers may still end that nobody takes over */
    AGENT_REMEMBER_US = 2 * 1000 * 1000,
    AGENT_SWEEP_US = 500 * 1000, /* clients that wait are looked after */
    AGENT_DISK_US = 1000 * 1000, /* a full disk is tried again */
};

/* A plan that this node takes part in, from PREPARE until its memory is free. */
struct agent_epoch {
    struct epoch epoch;
    struct plan *plan; /* NULL: free slot */
    enum { AGENT_LOADING, AGENT_ABORTED, AGENT_INSTALLED } state;
    bool broken; /* its file has changed: said to the node core */
};

/* A call that is answered later. */
struct agent_call {
    uint64_t number; /* 0: free */
    struct call *call;
    bool wants_model; /* waits until `model` runs and is open here */
    bool wants_plan;  /* waits until the shape of `model` has come */
    struct hash256 model;
    uint64_t until_us;
};

struct agent_dial {
    struct agent *agent;
    struct data_dial *dial; /* NULL: free */
    struct node_id peer;
    struct address address;
    uint8_t kind; /* enum hello_kind */
};

/* A model that the planner cannot place. Said to clients only when it lasts: a model that was just
 * asked for, or a node that just left, may be a matter of a second. */
struct agent_no_fit {
    bool used;
    struct hash256 model;
    uint64_t since_us, patience_us;
    char text[ERR_TEXT_MAX];
};

/* The data secret of an authenticated session, known to the gate of the data port. */
struct agent_key {
    uint64_t session; /* 0: free */
    uint8_t secret[HELLO_SECRET_BYTES];
};

struct agent {
    struct config config;
    struct log log;
    uv_loop_t loop;
    uv_timer_t timer;
    uv_poll_t mail_poll;
    uv_signal_t on_int, on_term;
    struct mailbox *mailbox;
    struct mailbox_sender *from_http; /* of all HTTP threads together */
    pthread_mutex_t from_http_mutex;

    struct identity identity;
    uint64_t boot_id;
    struct node *node;
    bool in_step;
    struct node_event downs[AGENT_DOWNS_MAX]; /* reported while a step was carried out */
    uint32_t n_downs;

    struct control_net *control;
    struct hello_gate *gate;
    struct agent_key keys[HELLO_KEYS_MAX];
    struct agent_no_fit no_fits[CONTROL_MODELS_MAX];
    struct data_port *data_port;
    struct hello_facts hello;
    struct agent_dial dials[AGENT_DATA_DIALS_MAX];

    struct pool *pool;
    struct store *store;
    struct models *models;
    struct peer_fds *fds; /* data connections by peer, of all threads */
    struct inference *inference;
    struct loader *loader;
    struct worker *worker;
    struct discovery_shell *discovery;
    struct http_server *http, *local_http;

    struct node_local local;
    struct spare_pace spare;
    uint64_t spare_due_us;
    struct agent_epoch epochs[AGENT_EPOCHS_MAX];
    struct agent_call calls[AGENT_CALLS_MAX];
    struct call *listeners[AGENT_CALLS_MAX]; /* of the event stream */
    uint64_t next_call;
    uint64_t local_due_us, peers_due_us, remember_due_us, started_us;
    uint64_t stop_until_us, drain_until_us, sweep_due_us;
    uint64_t slept_us;                /* of clock_slept_us: sleep that the node core has heard of */
    char instance[NODE_INSTANCE_MAX]; /* of the mDNS announcement */
    char http_url[CONFIG_WORD_MAX + 32];
    struct hash256 measured_model;
    double measured_token_us; /* from token to token, in the last long answer that this node gave */
    bool disk_full;           /* the data folder could not be written: NODE_EVENT_DISK */
    uint64_t disk_due_us;
    bool stopping, stopped, failed;
    char failure[ERR_TEXT_MAX]; /* why, when it failed */
};

/* serve.c */
void agent_fatal(struct agent *a, const char *format, ...) __attribute__((format(printf, 2, 3)));
void agent_schedule(struct agent *a);
void agent_begin_stop(struct agent *a);
void agent_refresh_local(struct agent *a);
/* clock_slept_us has jumped, as this thread or the inference thread saw (PROTOCOL 2.5). */
void agent_slept(struct agent *a, uint64_t slept_us);
/* Hands a call to the loop; from any HTTP thread. The reference is taken, also on failure (the call
 * then fails). */
void agent_post_call(struct agent *a, struct call *take_call);
void agent_post_dropped(struct agent *a, const struct request_id *request);
void agent_tell_models(struct agent *a, const struct hash256 *only);

/* serve_node.c */
enum err agent_step(struct agent *a, const struct node_event *event);
void agent_session_event(void *context, const struct node_event *event);
uint32_t agent_psks(void *context, struct session_psk *ret, uint32_t max);
struct agent_epoch *agent_epoch_find(struct agent *a, const struct epoch *epoch);
void agent_epoch_forget(struct agent_epoch *e);
void agent_dial_data(struct agent *a, const struct node_id *peer, const struct address *to,
                     uint8_t kind);
void agent_on_data_connection(void *context, int fd, const struct hello_result *result);
/* The file of a stage that runs cannot be read, or is not what was loaded: its plan ends. */
void agent_stage_broken(struct agent *a, const struct epoch *epoch);
/* Looks whether the files of what runs are as they were. */
void agent_check_files(struct agent *a);
void agent_event_out(struct agent *a, const char *kind, const char *text);

/* Can what a wish or an election changes be written to the data folder? */
bool agent_has_disk_room(struct agent *a);
/* A disk that was full is looked at again. */
void agent_disk_tick(struct agent *a, uint64_t now_us);

/* serve_spare.c */
/* What agent/spare.h makes of the present view; free() it. */
struct agent_spares {
    struct spare_view view;
    struct spare_share shares[SPARE_MODELS_MAX];
    bool busy; /* this node */
};
struct agent_spares *agent_spares_new(struct agent *a);
uint64_t agent_spare_room(const struct agent *a);
void agent_spare_tick(struct agent *a, uint64_t now_us);
void agent_spare_done(struct agent *a, const struct mail_spare *m);
/* Ids of the nodes whose loss would take bytes of the model with it; how its second copy stands,
 * null for a model that is not wanted. `s` may be NULL. */
json_t *agent_spare_fatal(const struct agent_spares *s, const struct hash256 *model);
json_t *agent_spare_json(const struct agent_spares *s, const struct hash256 *model);

/* serve_mail.c */
void agent_read_mail(struct agent *a);

/* serve_calls.c */
void agent_on_call(struct agent *a, struct call *take_call);
void agent_answer(struct agent *a, uint64_t number, enum err e, const char *text,
                  uint64_t expires_in_us);
void agent_calls_tick(struct agent *a, uint64_t now_us);
void agent_model_runs(struct agent *a, const struct hash256 *model);
void agent_model_cannot(struct agent *a, const struct hash256 *model, enum err e, const char *text);
/* NULL: it fits again, or runs. */
void agent_no_fit(struct agent *a, const struct hash256 *model, const char *text,
                  uint64_t patience_us);
/* It was asked for again: what is said of it has to last once more before a client hears it. */
void agent_no_fit_again(struct agent *a, const struct hash256 *model);
void agent_calls_end(struct agent *a);

/* status.c: new references */
json_t *status_json(struct agent *a);
json_t *status_nodes_json(struct agent *a);
json_t *status_models_json(struct agent *a);
json_t *status_plan_json(struct agent *a, const struct hash256 *model, uint32_t context,
                         bool explain, enum err *ret_err, struct err_text *text);
json_t *status_plan_object(struct agent *a, const struct plan *p);

/* doctor.c: what is wrong, in plain words; never NULL but for want of memory */
json_t *doctor_json(struct agent *a);

#endif
