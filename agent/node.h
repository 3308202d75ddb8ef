/* The control side of one node as a core: trust, membership, election and plans composed, and what
 * ties them together: which addresses to dial, which session of a pair to keep, which paths a peer
 * has, what gossip says about nodes, links and models, and the snapshot that a planner decides
 * from.
 *
 * Pure: no sockets, clocks, files, threads. The agent's loop thread drives it with real sockets
 * (agent/serve.c), the simulator with virtual ones (tests/sim). The data plane is another core
 * (agent/pipeline.h); the shell carries PREPARE, COMMIT, DRAIN, RETIRE and ROUTE from here to there
 * and PREPARED, RETIRED and WANT_LINK back.
 *
 * An update is carried out in this order: every PERSIST effect, synced to disk; then the other
 * effects in order; then the messages of the outbox in order. A shell that cannot write what
 * PERSIST_CONTROL holds tells NODE_EVENT_DISK at once, before anything else, and sends none of the
 * update's messages on CHANNEL_CONTROL; it tells it again when there is room. One that cannot write
 * what PERSIST_TRUST holds must stop. */
#ifndef COVEY_AGENT_NODE_H
#define COVEY_AGENT_NODE_H

#include "agent/spare.h"
#include "base/address.h"
#include "base/err.h"
#include "base/id.h"
#include "discovery/swim.h"
#include "planner/control.h"
#include "planner/plan.h"
#include "planner/topology.h"
#include "proto/identity.h"
#include "proto/session.h"
#include "proto/trust.h"
#include "proto/wire.h"

#include <stdbool.h>
#include <stdint.h>

enum {
    NODE_SESSIONS_MAX = 256,
    NODE_FOUND_MAX = 256,   /* nodes that discovery knows and that are not members */
    NODE_ADDRESSES_MAX = 8, /* of one node */
    NODE_MODELS_MAX = 64,   /* shapes known */
    NODE_NAME_MAX = 64,
    NODE_INSTANCE_MAX = 64,
    NODE_TAG_MAX = 64, /* bytes of a TXT tag */
};

/* Gossip's record kinds. Never renumbered. */
enum node_record { RECORD_FACTS = 1, RECORD_LINKS = 2, RECORD_MODELS = 3 };

struct node_options {
    const struct identity *identity; /* copied */
    uint64_t boot_id;
    struct random_source random;
    char name[NODE_NAME_MAX];
    char version[32];
    uint16_t control_port, data_port;
    uint32_t arithmetic_version;
    uint64_t kernel_digest;
    uint64_t wall_ms; /* Unix time of the start */
    /* what an earlier start stored through PERSIST; NULL when nothing */
    const uint8_t *trust_bytes, *control_bytes;
    size_t n_trust_bytes, n_control_bytes;
    const struct address *remembered; /* addresses of members from earlier */
    const struct node_id *remembered_ids;
    uint32_t n_remembered;
};

/* What the shell measures of its own machine; gossiped as FACTS. */
struct node_local {
    uint64_t memory_total_bytes, memory_available_bytes, memory_limit_bytes, budget_bytes;
    uint32_t cores, threads;
    double stream_bytes_per_s, macs_per_s; /* 0: not calibrated yet */
    bool on_mains, wired;
    uint32_t arithmetic_version;
    uint8_t backend;
    uint64_t kernel_digest;
    uint64_t room_bytes; /* disk that it gives to second copies */
};

/* A model that this node holds bytes of. */
struct node_model {
    struct model_shape shape;
    uint64_t n_bytes, present_bytes;
    uint32_t n_runs; /* which blocks, where not all are here; as many as fit */
    struct spare_run runs[SPARE_RUNS_MAX];
};

/* What discovery says, or an address that a person gave (then instance is "peer:HOST:PORT"). */
struct node_found {
    char instance[NODE_INSTANCE_MAX];
    char name[NODE_NAME_MAX];
    bool gone;
    bool given; /* by a person or a file: dialled even though no tag says that it is one of ours */
    uint8_t cluster_tag[NODE_TAG_MAX], invite_tag[NODE_TAG_MAX];
    uint32_t n_cluster_tag, n_invite_tag;
    struct address addresses[NODE_ADDRESSES_MAX]; /* with the control port */
    uint32_t n_addresses;
};

enum node_event_type {
    NODE_EVENT_TICK,
    NODE_EVENT_SESSION_READY,  /* session, inbound, address, peer_static, psk_tag */
    NODE_EVENT_MESSAGE,        /* session, channel, bytes, len */
    NODE_EVENT_SESSION_DOWN,   /* session, down; also when a dial fails */
    NODE_EVENT_DATAGRAM,       /* session, address it came from, channel, bytes, len */
    NODE_EVENT_FOUND,          /* found */
    NODE_EVENT_LOCAL,          /* local */
    NODE_EVENT_MODEL,          /* model: added or changed */
    NODE_EVENT_MODEL_GONE,     /* model_id */
    NODE_EVENT_PREPARED,       /* epoch */
    NODE_EVENT_PREPARE_FAILED, /* epoch, error, text; also of one that runs and cannot go on */
    NODE_EVENT_RETIRED,        /* epoch: drained and released */
    NODE_EVENT_BANDWIDTH,      /* peer, address, bytes_per_s (0: could not be measured) */
    NODE_EVENT_LINK,           /* peer, up: state of the data link */
    NODE_EVENT_WANT_LINK,      /* peer */
    NODE_EVENT_USED,           /* model_id: a request was served */
    NODE_EVENT_BUSY,           /* step, layers_done: progress of the data plane */
    NODE_EVENT_SLEPT,          /* the data plane was told before: until an epoch's COMMIT comes
                                  (again) it executes nothing of it (2.5) */
    NODE_EVENT_DISK,           /* full: whether PERSIST_CONTROL can be written */
    /* what a person asks for; the answer is an effect with the same call number */
    NODE_EVENT_INVITE, /* call, ttl_us, worker */
    NODE_EVENT_JOIN,   /* call, token, leave */
    NODE_EVENT_LEAVE,  /* call: the cluster, for good */
    NODE_EVENT_REVOKE, /* call, peer */
    NODE_EVENT_WANT,   /* call, model_id, context (0: most that fits), precision, keep_alive_s */
    NODE_EVENT_UNWANT, /* call, model_id */
    NODE_EVENT_STOP,   /* goodbye; plans move first; STOPPED follows */
};

enum node_down { NODE_DOWN_CLOSED, NODE_DOWN_REFUSED, NODE_DOWN_TIMED_OUT, NODE_DOWN_DENIED };

struct node_event {
    enum node_event_type type;
    uint64_t session;
    bool inbound, up, worker, leave, full;
    enum node_down down;
    struct address address;
    uint8_t peer_static[32];
    uint64_t psk_tag;
    uint8_t channel;
    const uint8_t *bytes;
    uint32_t len;
    const struct node_found *found;
    const struct node_local *local;
    const struct node_model *model;
    struct hash256 model_id;
    struct epoch epoch;
    enum err error;
    const char *text; /* a sentence; for JOIN the token */
    struct node_id peer;
    double bytes_per_s;
    uint64_t wall_ms; /* LOCAL: Unix time; 0: not told */
    uint64_t step;
    uint32_t layers_done;
    uint64_t call;
    uint64_t ttl_us;
    uint32_t context, keep_alive_s; /* 0: the most that fits; for ever */
    uint8_t precision;
};

enum node_effect_type {
    NODE_EFFECT_PERSIST_TRUST,   /* bytes */
    NODE_EFFECT_PERSIST_CONTROL, /* bytes */
    NODE_EFFECT_REMEMBER,  /* addresses of members changed: store node_remembered() when convenient
                            */
    NODE_EFFECT_DIAL,      /* session (new), address, psk, psk_tag */
    NODE_EFFECT_CLOSE,     /* session */
    NODE_EFFECT_PEER,      /* session is now the authenticated one of peer (for keys of links) */
    NODE_EFFECT_ANNOUNCE,  /* tags changed: announce node_tags() */
    NODE_EFFECT_MEASURE,   /* measure the bandwidth to peer at address (data port) */
    NODE_EFFECT_UNLINK,    /* peer is no member any more: close every data connection with it */
    NODE_EFFECT_DIAL_LINK, /* open a data link to peer at address (data port) */
    NODE_EFFECT_PREPARE,   /* plan, stage */
    NODE_EFFECT_COMMIT,    /* epoch */
    NODE_EFFECT_ABORT,     /* epoch */
    NODE_EFFECT_DRAIN,     /* epoch */
    NODE_EFFECT_RETIRE,    /* epoch */
    NODE_EFFECT_ROUTE,     /* plan: active for its model */
    NODE_EFFECT_NO_ROUTE,  /* model, error, text: why (NO_FIT with an empty text: no longer so) */
    NODE_EFFECT_ANSWER,    /* call, error, text (for INVITE: the token) */
    NODE_EFFECT_NOTE,      /* text: a line for the event stream; word: its kind */
    NODE_EFFECT_STOPPED,
};

struct node_effect {
    enum node_effect_type type;
    uint8_t *bytes; /* owned by the update */
    size_t n_bytes;
    uint64_t session;
    struct address address;
    uint8_t psk[32];
    uint64_t psk_tag;
    struct node_id peer;
    struct plan *plan; /* owned by the update */
    uint32_t stage;
    struct epoch epoch;
    struct hash256 model;
    uint64_t call;
    uint64_t expires_in_us; /* of an invitation */
    enum err error;
    bool refused;     /* NO_ROUTE: a member cannot do its part, so waiting does not help */
    const char *word; /* static */
    char text[ERR_TEXT_MAX];
};

struct node_update {
    struct outbox
        outbox; /* messages carry `session`; datagrams carry `path` too: node_path_address */
    struct node_effect *effects;
    uint32_t n_effects, cap_effects;
};
#define NODE_UPDATE_INIT ((struct node_update){OUTBOX_INIT, NULL, 0, 0})
void node_update_clear(struct node_update *u);
void node_update_deinit(struct node_update *u);

struct node;

enum err node_new(const struct node_options *options, uint64_t now_us, struct node **ret,
                  struct err_text *text);
void node_free(struct node *n);

/* Takes one event at the monotonic time now_us and appends to `u` what is to be done. Errors other
 * than ERR_NO_MEMORY mean that the event was refused (bytes of a peer, a command that makes no
 * sense); the node goes on. */
enum err node_step(struct node *n, const struct node_event *event, uint64_t now_us,
                   struct node_update *u);
uint64_t node_next_due(const struct node *n);

/* Keys that an inbound handshake may use, at most `max`. */
uint32_t node_psks(const struct node *n, struct session_psk *ret, uint32_t max);
/* What to announce: the cluster tag for this instance name, and the invite tag while a token is
 * open. */
void node_tags(const struct node *n, const char *instance, uint8_t cluster_tag[NODE_TAG_MAX],
               uint32_t *n_cluster_tag, uint8_t invite_tag[NODE_TAG_MAX], uint32_t *n_invite_tag);
/* Where a datagram of the outbox goes. False when the path is gone. */
bool node_path_address(const struct node *n, const struct node_id *peer, uint32_t path,
                       struct address *ret);

/* Views for status, planning and tests. */
struct node_path_view {
    struct address address;
    bool up;
    double rtt_us, rtt_p99_us, bytes_per_s; /* 0: not known */
};
struct node_view {
    struct node_id id;
    bool self, member, has_id;
    char name[NODE_NAME_MAX];
    char version[32];
    const char *state; /* one of the words of `covey nodes` */
    uint64_t boot_id;
    struct node_local local; /* zeros when not known */
    bool worker;             /* a member that may not admit others */
    uint16_t control_port, data_port;
    uint32_t n_paths;
    struct node_path_view paths[NODE_ADDRESSES_MAX];
};
uint32_t node_views(const struct node *n, struct node_view *ret, uint32_t max);
/* Is there more than a stranger's word for what discovery calls so: a tag that matches, a person
 * who gave it, a member that is known? */
bool node_trusts_found(const struct node *n, const char *instance);
struct node_id node_self(const struct node *n);
bool node_planner(const struct node *n, struct node_id *ret, uint64_t *ret_term);
const struct control *node_control(const struct node *n);
const struct trust *node_trust(const struct node *n);
const struct swim *node_swim(const struct node *n);
/* The snapshot a planner would decide from now. */
void node_topology(const struct node *n, struct topology *ret);
/* The shape of a model, when known. */
const struct model_shape *node_shape(const struct node *n, const struct hash256 *model);
/* Asks the members that hold a model for its shape, when that is not known here: from the next tick
 * on, until it has come. */
void node_want_shape(struct node *n, const struct hash256 *model);
/* Models that any live member holds: fills id, name, bytes; `holder` is one that has all of it. */
struct node_held {
    struct hash256 model;
    char name[MODEL_NAME_MAX];
    uint64_t n_bytes, present_bytes;
    struct node_id holder;
};
uint32_t node_held(const struct node *n, struct node_held *ret, uint32_t max);
/* Members that hold bytes of the model, the fullest first. */
uint32_t node_holders(const struct node *n, const struct hash256 *model, struct node_id *ret,
                      uint32_t max);
/* Who holds what of the wanted models, for spare_divide. About 280 KB. */
void node_spare_view(const struct node *n, struct spare_view *ret);
/* The best address of a peer for its data port. */
bool node_data_address(const struct node *n, const struct node_id *peer, struct address *ret);
/* The authenticated session of a peer, 0 when none. */
uint64_t node_session_of(const struct node *n, const struct node_id *peer);
/* Addresses to remember: at most max. */
uint32_t node_remembered(const struct node *n, struct node_id *ret_ids, struct address *ret,
                         uint32_t max);

#endif
