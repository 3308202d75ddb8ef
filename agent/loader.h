/* The loader thread: makes a node able to execute its part of a plan. It fetches what is missing of
 * a model from the members that have it (manifest, header, then the 1 MiB blocks that the layers
 * overlap), opens it and reserves a stage.
 *
 * Functions are called from the loop thread and post mail; answers are mail to the loop:
 * LOOP_PREPARED with an owned struct loaded, LOOP_MODEL_NEWS when the store holds more than before,
 * LOOP_NEED_BULK when it wants a connection, LOOP_SPARE_DONE when a piece of a second copy is
 * fetched. Second copies give way: any mail ends the piece that is under way. */
#ifndef COVEY_AGENT_LOADER_H
#define COVEY_AGENT_LOADER_H

#include "agent/mail.h"
#include "agent/models.h"
#include "agent/spare.h"
#include "agent/store.h"
#include "base/log.h"
#include "planner/plan.h"
#include "runtime/stage.h"
#include "transport/bulk.h"
#include "transport/hello.h"
#include "transport/mailbox.h"

struct loader;
struct peer_fds;
struct pool;

enum {
    LOADER_HOLDERS_MAX = 16,
    LOADER_SPARE_BYTES_PER_S = 32 << 20, /* of second copies: a third of a gigabit network */
};

struct loader_options {
    struct store *store;
    struct models *models;
    struct pool *pool;
    struct mailbox *loop;
    struct peer_fds *fds; /* every data connection is in while it is used; outlives this */
    const struct log *log;
};

/* Owned by LOOP_PREPARED. */
struct loaded {
    struct stage *stage;
    struct model *model; /* a reference */
};
void loaded_free(void *loaded);

enum err loader_new(const struct loader_options *options, struct loader **ret,
                    struct err_text *text);
enum err loader_start(struct loader *l);
/* Cuts every data connection of this node: nothing else may need one any more. */
void loader_stop(struct loader *l);
void loader_free(struct loader *l);

/* `holders`: members to fetch from, the fullest first. */
enum err loader_prepare(struct loader *l, const struct plan *plan, uint32_t stage,
                        const struct node_id *holders, uint32_t n_holders);
/* Opens the model for tokenising here, fetching manifest and header when needed. */
enum err loader_open(struct loader *l, const struct hash256 *model, const struct node_id *holders,
                     uint32_t n_holders);
/* Fetches blocks for a second copy, slowly and after everything else. LOOP_SPARE_DONE follows. */
enum err loader_spare(struct loader *l, const struct spare_order *order,
                      const struct node_id *holders, uint32_t n_holders);
/* Ends it early. */
void loader_spare_stop(struct loader *l);
/* The answer to LOOP_NEED_BULK; `fd` is taken (-1: it could not be had). */
enum err loader_bulk(struct loader *l, const struct node_id *peer, int fd,
                     const struct hello_result *result);
/* What the loader is doing, for progress: bytes fetched and to fetch of the present job. */
void loader_progress(struct loader *l, struct hash256 *ret_model, uint64_t *ret_done,
                     uint64_t *ret_total);

/* Bulk files beyond the model's own: the manifest and its length (8 bytes, little-endian). */
enum { BULK_FILE_MANIFEST = 1023, BULK_FILE_MANIFEST_SIZE = 1022 };
/* Where a bulk server reads: the store. */
struct bulk_source loader_source(struct store *store);

#endif
