/* The inside of agent/node, shared by its files. Nobody else includes this.
 *   node.c           life, events, the cores and what their effects mean
 *   node_addresses.c the addresses of a peer, and which are proved
 *   node_sessions.c  dialling, joining, which session of a pair is kept, what discovery says
 *   node_records.c   what gossip carries: facts and links; shapes on the node channel
 *   node_holdings.c  who holds which bytes of which model
 *   node_plan.c      the snapshot for the planner, and what control wants done
 *   node_view.c      queries */
#ifndef COVEY_AGENT_NODE_INTERNAL_H
#define COVEY_AGENT_NODE_INTERNAL_H

#include "agent/node.h"

#include "base/rng.h"
#include "base/util.h"

#include <protobuf-c/protobuf-c.h>

enum {
    PEERS_MAX = SWIM_MEMBERS_MAX,
    DIAL_FIRST_US = 100 * 1000,
    DIAL_REPLACED_US = 300 * 1000,        /* while another session to the peer may be on its way */
    DIAL_MEMBER_MAX_US = 2 * 1000 * 1000, /* after healing all meet within 5 s */
    DIAL_STRANGER_MAX_US = 10 * 1000 * 1000,
    DIAL_JOIN_US = 400 * 1000,
    /* With a token the next address is not kept waiting for one that says nothing (RFC 8305). */
    DIAL_STAGGER_US = 250 * 1000,
    DIAL_CLONE_US = 1000 * 1000, /* so often its life is proved: sooner than gossip doubts it */
    DIAL_DEADLINE_US = 4 * 1000 * 1000, /* a dial that the shell never reported back on */
    /* Of several addresses some may be dead and say nothing: the first round over them is quick,
     * each further one twice as patient, up to the deadline. */
    DIAL_PATIENCE_US = 400 * 1000,
    DIAL_SILENT_US = 2 * 1000 * 1000, /* no answer anywhere for so long is told to gossip */
    JOIN_DEADLINE_US = 20 * 1000 * 1000,
    JOIN_WIDE_US = 1000 * 1000, /* then nodes that announce no open invitation are tried too */
    /* No verdict on a token before: names are looked up, and announcements come in. */
    JOIN_VERDICT_US = 1000 * 1000,
    JOIN_VERDICT_WIDE_US = 2500 * 1000,
    JOIN_BROWSE_US = 5 * 1000 * 1000, /* after the start of this node it has seen who is there */
    JOIN_DIALS_MAX = 4,  /* at one node that answers and never accepts: the token is no good */
    JOIN_DENIED_MIN = 2, /* of these it must have denied; the others did not reach it */
    SIMULTANEOUS_US = 2 * 1000 * 1000, /* two sessions this close together were dialled at once */
    STABLE_US = 1000 * 1000,           /* a session that lived shorter is not redialled at once */
    MEASURE_FIRST_US = 500 * 1000,
    MEASURE_EVERY_US = 600 * 1000 * 1000, /* bandwidth: every ten minutes */
    MEASURE_RETRY_US = 10 * 1000 * 1000,
    LINKS_RECORD_US = 1000 * 1000, /* own LINKS record: at most this often */
    SHAPE_RETRY_US = 500 * 1000,
    LINK_REQUEST_US = 1000 * 1000, /* then the larger key dials itself */
    AWAKE_US = 20 * 1000 * 1000,   /* PROTOCOL 2.5 */
    SHAPE_REQUESTS_MAX = 16,
    ADDRESS_CHECK_US = 5 * 1000 * 1000,
    ADDRESS_DEAD_US = 600 * 1000 * 1000, /* not proved for so long while others are: forgotten */
};

enum purpose { PURPOSE_MEMBER, PURPOSE_FOUND, PURPOSE_JOIN };
enum session_state { SESSION_DIALLING, SESSION_OPEN, SESSION_AUTHENTICATED };

struct node_session {
    uint64_t id; /* 0: free */
    enum session_state state;
    enum purpose purpose;
    bool inbound;
    struct address address;
    struct node_id peer; /* dialled for (PURPOSE_MEMBER), or authenticated as */
    uint64_t boot_id;
    char instance[NODE_INSTANCE_MAX]; /* of the found entry that it was dialled for */
    uint32_t nth;                     /* … and which of its addresses */
    uint64_t since_us;
    uint64_t patience_us; /* with a dial */
};

struct peer_address {
    struct address address;
    uint32_t path; /* never 0 */
    double bytes_per_s;
    uint64_t measured_us, measure_due_us;
    uint64_t added_us, proved_us; /* last known to lead to the peer; 0: not in this run */
};

struct peer {
    struct node_id id;
    uint64_t session;       /* the authenticated one that is kept; 0: none */
    struct trust_self self; /* as it introduced itself */
    bool introduced;
    struct peer_address addresses[NODE_ADDRESSES_MAX];
    uint32_t n_addresses, next_address;
    uint32_t n_failed_refused, n_failed; /* in this round over the addresses */
    uint32_t n_rounds;                   /* since the last session */
    uint64_t dialled_us;                 /* first, since then or since gossip was told; 0: not */
    uint64_t dial_due_us, dial_wait_us;
    uint64_t lived_us; /* the last session */
    uint64_t dialling; /* session id, 0: none */
    uint32_t
        n_dropped; /* first messages in a row that it did not answer: an older secret is tried */
    bool link_up, link_wanted;
    uint64_t link_due_us; /* when the larger key dials itself */
    /* from gossip */
    struct node_local local;
    bool has_facts, draining, awake;
    char name[NODE_NAME_MAX];
    char version[32];
    uint64_t up_since_ms;
    uint16_t data_port;
};

struct found {
    struct node_found is;
    bool used, ours, invites;         /* tag matches; its invite tag is the one we look for */
    bool has_peer, is_self, is_clone; /* clone: our own key, at the last try */
    struct node_id peer;
    uint64_t heard_us; /* its last announcement */
    uint64_t dial_due_us, dial_wait_us, dialling;
    uint32_t n_dropped;
    uint32_t n_join_denied, n_join_failed; /* dials of the present join: dropped, not reached */
    uint32_t join_answers;                 /* bit i: address i was reached in the present join */
    uint32_t next_address;
    uint64_t order; /* of discovery: the least is the oldest */
};

#define NODE_TOKEN_REFUSED                                                                         \
    "the token was not accepted: it was used, has expired, or is of another machine (or of one "   \
    "that was restarted since). `covey invite` there makes a new one"

struct shape_request {
    struct hash256 model;
    uint64_t due_us;
    bool used;
};

struct node {
    struct identity identity;
    struct node_options options;
    struct rng rng;
    uint64_t now_us, started_us, wall_base_ms; /* the Unix time at started_us, by the last word */
    struct node_update *u;                     /* during a step */

    struct trust *trust;
    struct swim *swim;
    struct control *control;

    struct node_session sessions[NODE_SESSIONS_MAX];
    uint64_t next_session;
    struct peer peers[PEERS_MAX];
    uint32_t n_peers;
    struct found found[NODE_FOUND_MAX];
    uint64_t found_order;
    uint32_t next_path;
    uint64_t addresses_due_us;   /* when they are looked through again */
    uint64_t measuring_until_us; /* a bandwidth measurement is under way until then */

    struct node_local local;
    bool has_local, stopping, left, tags_changed, announced;
    uint64_t invite_call;                      /* whom the token of the present step goes to */
    struct node_model models[NODE_MODELS_MAX]; /* held here */
    uint32_t n_models;
    struct model_shape shapes[NODE_MODELS_MAX]; /* learned from others */
    uint32_t n_shapes;
    struct shape_request shape_requests[SHAPE_REQUESTS_MAX];
    uint64_t links_due_us; /* UINT64_MAX: nothing to say */
    uint64_t view_due_us;
    uint64_t term_on_disk; /* control's, when the last update was carried out */

    uint64_t join_call, join_began_us; /* 0: no join open */
    bool join_wide;                    /* no announcement shows the invitation */
    uint64_t asleep_until_us; /* after sleep: facts are published again then; 0: never slept */
};

/* node.c */
struct node_effect *node_effect(struct node *n, enum node_effect_type type); /* NULL: no memory */
void node_note(struct node *n, const char *word, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void node_answer(struct node *n, uint64_t call, enum err e, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
enum err node_feed_trust(struct node *n, struct trust_event *event);
enum err node_feed_swim(struct node *n, const struct swim_event *event);
enum err node_feed_control(struct node *n, const struct control_event *event);
enum err node_send(struct node *n, const struct node_id *to, uint8_t channel, const uint8_t *bytes,
                   uint32_t len);

/* node_sessions.c */
struct node_session *session_find(struct node *n, uint64_t id);
struct peer *peer_find(const struct node *n, const struct node_id *id);
void peer_sync_with_trust(struct node *n);
enum err sessions_ready(struct node *n, const struct node_event *e);
void sessions_authenticated(struct node *n, uint64_t session, const struct trust_peer *who);
void sessions_down(struct node *n, uint64_t session, enum node_down how);
void sessions_close(struct node *n, uint64_t session);
enum err sessions_found(struct node *n, const struct node_found *f);
void sessions_retag(struct node *n); /* secrets or invites changed */
void sessions_join(struct node *n, uint64_t call);
void sessions_rejected(struct node *n, uint64_t session, enum trust_reason reason);
void sessions_tick(struct node *n);
uint64_t sessions_next_due(const struct node *n);
void sessions_redial(struct node *n, const struct node_id *id);
uint32_t sessions_path_of(struct node *n, struct peer *p, const struct address *from);
enum err sessions_want_link(struct node *n, const struct node_id *id);
void sessions_link_requested(struct node *n, struct peer *p);
void sessions_link(struct node *n, const struct node_id *id, bool up);
void sessions_bandwidth(struct node *n, const struct node_event *e);

/* node_addresses.c */
bool address_same_place(const struct address *a, const struct address *b); /* but for the scope */
void peer_paths_changed(struct node *n, struct peer *p);
/* NULL when there is no room. `first`: from discovery or a session, not by hearsay. */
struct peer_address *peer_add_address(struct node *n, struct peer *p, const struct address *a,
                                      bool first);
/* The next to dial: in each round one that probes come through on, then all in turn. */
const struct address *peer_dial_address(struct node *n, struct peer *p);
void addresses_tick(struct node *n);
bool address_is_of_member(const struct node *n, const struct address *a); /* and leads to it now */

/* node_holdings.c */
void records_publish_models(struct node *n);

/* node_records.c */
void records_set(struct node *n, uint8_t kind, const ProtobufCMessage *m);
void records_publish_facts(struct node *n);
/* Is it the tag of an invitation that a member says it holds open? */
bool records_invited_by_member(const struct node *n, const uint8_t tag[TOKEN_TAG_BYTES]);
void records_publish_links(struct node *n);
/* Takes what others call `about` by (LINKS records) as addresses to dial it at. */
void records_hear_addresses(struct node *n, const struct peer *about);
void records_changed(struct node *n, const struct node_id *owner, uint8_t kind);
enum err records_message(struct node *n, struct peer *p, const uint8_t *bytes, uint32_t len);
void records_want_shape(struct node *n, const struct hash256 *model);
void records_tick(struct node *n);
uint64_t records_next_due(const struct node *n);
enum err records_request_link(struct node *n, const struct node_id *to);

/* node_plan.c */
uint32_t plan_arithmetic(uint32_t version, uint64_t kernel_digest);
void plan_view_changed(struct node *n);
void plan_send_view(struct node *n);
void plan_send_shape(struct node *n, const struct model_shape *shape);
enum err plan_control_effects(struct node *n, struct control_update *u);
void plan_report_commits(struct node *n, const struct control_update *u);
enum err plan_event(struct node *n, const struct node_event *e, bool *ret_handled);

#endif
