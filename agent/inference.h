/* The inference thread: owns the data-plane core (agent/pipeline.h), the loaded stages, the data
 * links and the compute pool. A token does not wait for the loop thread: tokens go straight into
 * the client's call.
 *
 * All functions are called from the loop thread and post mail; what comes back is mail to the loop
 * (agent/mail.h). */
#ifndef COVEY_AGENT_INFERENCE_H
#define COVEY_AGENT_INFERENCE_H

#include "agent/call.h"
#include "agent/mail.h"
#include "base/log.h"
#include "runtime/model.h"
#include "runtime/stage.h"
#include "transport/hello.h"
#include "transport/mailbox.h"

struct inference;
struct peer_fds;
struct pool;

struct inference_options {
    struct node_id self;
    struct pool *pool;    /* used by this thread alone from inference_start on */
    struct mailbox *loop; /* where answers go; outlives the inference thread */
    struct peer_fds *fds; /* every data connection is in while it is used; outlives this */
    const struct log *log;
};

enum err inference_new(const struct inference_options *options, struct inference **ret,
                       struct err_text *text);
enum err inference_start(struct inference *inf);
/* Ends every request with an error, closes links, joins the thread. */
void inference_stop(struct inference *inf);
void inference_free(struct inference *inf);

/* A loaded stage for an epoch; the stage and the model reference are taken. */
enum err inference_install(struct inference *inf, const struct plan *plan, struct stage *take_stage,
                           struct model *take_model);
enum err inference_commit(struct inference *inf, const struct epoch *epoch);
enum err inference_drain(struct inference *inf, const struct epoch *epoch);
enum err inference_retire(struct inference *inf, const struct epoch *epoch);
enum err inference_route(struct inference *inf, const struct plan *plan);
enum err inference_no_route(struct inference *inf, const struct hash256 *model, enum err reason,
                            const char *text);
/* A CALL_CHAT; the reference is taken. Its items and end come through the call. */
enum err inference_submit(struct inference *inf, struct call *take_call);
enum err inference_cancel(struct inference *inf, const struct request_id *request);
/* An authenticated data connection; `fd` is taken. It replaces a link to the same peer. */
enum err inference_link(struct inference *inf, int fd, const struct hello_result *result);
/* The peer is no member any more. */
enum err inference_unlink(struct inference *inf, const struct node_id *peer);
/* We slept (2.5), by clock_slept_us: links go, and no epoch is executed until it is committed
 * again. LOOP_SLEPT comes from the thread when it sees that before this call. */
enum err inference_slept(struct inference *inf, uint64_t slept_us);

/* A copy of what the core says of itself, refreshed by the thread; any thread may ask. */
struct inference_view {
    struct pipeline_progress progress;
    uint32_t n_requests;
    struct pipeline_request_info requests[PIPELINE_REQUESTS_MAX];
};
void inference_look(struct inference *inf, struct inference_view *ret);

#endif
