/* The worker thread: long jobs that are neither loading nor inference, one at a time and in order:
 * hashing a file into the store, pulling a model, calibration, answering bandwidth measurements and
 * serving model bytes get threads of their own because they wait for peers. Answers are mail to the
 * loop, or go straight into the call that asked. */
#ifndef COVEY_AGENT_WORKER_H
#define COVEY_AGENT_WORKER_H

#include "agent/call.h"
#include "agent/config.h"
#include "agent/mail.h"
#include "agent/store.h"
#include "base/log.h"
#include "transport/hello.h"
#include "transport/mailbox.h"

struct peer_fds;
struct worker;

struct worker_options {
    struct store *store;
    struct mailbox *loop;
    const struct config *config; /* outlives the worker */
    struct peer_fds *fds;        /* every data connection is in while it is used; outlives this */
    const struct log *log;
    uint32_t n_threads; /* of calibration */
    uint64_t kernel_digest;
};

enum err worker_new(const struct worker_options *options, struct worker **ret,
                    struct err_text *text);
enum err worker_start(struct worker *w);
void worker_stop(struct worker *w);
void worker_free(struct worker *w);

/* CALL_ADD_FILE or CALL_PULL; the reference is taken. Items {"done","total"} and the reply go
 * through the call. */
enum err worker_add(struct worker *w, struct call *take_call);
/* LOOP_CALIBRATED follows. Figures are kept on disk; measured again when the machine or the kernels
 * changed. */
enum err worker_calibrate(struct worker *w);
/* Threads of their own, bounded in number; `fd` is taken. */
void worker_serve_bulk(struct worker *w, int fd, const struct hello_result *result);
void worker_answer_bandwidth(struct worker *w, int fd, const struct hello_result *result);
/* LOOP_BANDWIDTH follows. */
void worker_measure_bandwidth(struct worker *w, int fd, const struct hello_result *result,
                              const struct address *address);

#endif
