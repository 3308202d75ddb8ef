#include "agent/loader.h"

#include "agent/peer_fds.h"
#include "base/clock.h"
#include "base/util.h"
#include "transport/link_tcp.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    JOBS_MAX = 64,
    CONNECT_MS = 6000,
    FETCH_IDLE_MS = 10000,
    SYNC_EVERY_BLOCKS = 64,
    NEWS_EVERY_BLOCKS = 16,
};

enum loader_mail { MAIL_PREPARE = 1, MAIL_OPEN, MAIL_SPARE, MAIL_SPARE_STOP, MAIL_BULK, MAIL_STOP };

enum { SPARE_NEWS_US = 1000 * 1000 };

struct job {
    enum loader_mail kind;
    struct plan plan;
    uint32_t stage;
    struct hash256 model;
    struct node_id holders[LOADER_HOLDERS_MAX];
    uint32_t n_holders;
    struct spare_order order; /* MAIL_SPARE; without runs: called off before it began */
};

struct bulk_mail {
    struct node_id peer;
    int fd;
    struct hello_result result;
};

struct loader {
    struct loader_options options;
    struct log log;
    struct mailbox *mailbox;
    struct mailbox_sender *to_self, *to_loop;
    pthread_t thread;
    bool started, stopping;
    struct job *jobs[JOBS_MAX];
    uint32_t n_jobs;
    bool has_bulk;
    struct bulk_mail bulk;
    int link_fd;        /* of the link that is open; at most one is */
    bool spare_stop;    /* the piece of a second copy that is under way must end */
    uint64_t spare_got; /* its bytes */

    pthread_mutex_t progress_mutex;
    struct hash256 progress_model;
    uint64_t progress_done, progress_total;
};

void loaded_free(void *p)
{
    struct loaded *l = p;
    if (!l)
        return;
    stage_free(l->stage);
    model_unref(l->model);
    free(l);
}

/* ---- the loop's side ---- */

static enum err post_job(struct loader *l, const struct job *job, const struct node_id *holders,
                         uint32_t n_holders)
{
    struct job *j = malloc(sizeof *j);
    if (!j)
        return ERR_NO_MEMORY;
    *j = *job;
    j->n_holders = MIN_OF(n_holders, (uint32_t)LOADER_HOLDERS_MAX);
    if (j->n_holders)
        memcpy(j->holders, holders, j->n_holders * sizeof holders[0]);
    enum err e = mailbox_send_owned(l->to_self, job->kind, NULL, 0, j, free);
    if (e != ERR_OK)
        free(j);
    return e;
}

enum err loader_prepare(struct loader *l, const struct plan *plan, uint32_t stage,
                        const struct node_id *holders, uint32_t n_holders)
{
    struct job j = {.kind = MAIL_PREPARE, .plan = *plan, .stage = stage, .model = plan->model};
    return post_job(l, &j, holders, n_holders);
}

enum err loader_open(struct loader *l, const struct hash256 *model, const struct node_id *holders,
                     uint32_t n_holders)
{
    struct job j = {.kind = MAIL_OPEN, .model = *model};
    return post_job(l, &j, holders, n_holders);
}

enum err loader_spare(struct loader *l, const struct spare_order *order,
                      const struct node_id *holders, uint32_t n_holders)
{
    struct job j = {.kind = MAIL_SPARE, .model = order->model, .order = *order};
    return post_job(l, &j, holders, n_holders);
}

void loader_spare_stop(struct loader *l)
{
    (void)mailbox_send(l->to_self, MAIL_SPARE_STOP, NULL, 0);
}

static void close_fd(struct loader *l, int fd)
{
    peer_fds_remove(l->options.fds, fd);
    (void)close(fd);
}

enum err loader_bulk(struct loader *l, const struct node_id *peer, int fd,
                     const struct hello_result *result)
{
    struct bulk_mail m = {.peer = *peer, .fd = fd};
    if (result)
        m.result = *result;
    if (fd >= 0 && peer_fds_add(l->options.fds, peer, fd) != ERR_OK) {
        (void)close(fd);
        m.fd = -1;
    }
    enum err e = mailbox_send(l->to_self, MAIL_BULK, &m, sizeof m);
    if (e != ERR_OK && m.fd >= 0)
        close_fd(l, m.fd);
    return e;
}

void loader_progress(struct loader *l, struct hash256 *ret_model, uint64_t *ret_done,
                     uint64_t *ret_total)
{
    (void)pthread_mutex_lock(&l->progress_mutex);
    *ret_model = l->progress_model;
    *ret_done = l->progress_done;
    *ret_total = l->progress_total;
    (void)pthread_mutex_unlock(&l->progress_mutex);
}

static void set_progress(struct loader *l, const struct hash256 *model, uint64_t done,
                         uint64_t total)
{
    (void)pthread_mutex_lock(&l->progress_mutex);
    l->progress_model = *model;
    l->progress_done = done;
    l->progress_total = total;
    (void)pthread_mutex_unlock(&l->progress_mutex);
}

/* ---- serving ---- */

static enum err read_manifest_file(struct store *store, const struct hash256 *id, uint32_t file,
                                   uint64_t offset, size_t n, void *to)
{
    struct buf b = BUF_INIT(MANIFEST_BYTES_MAX);
    enum err e = store_manifest_bytes(store, id, &b);
    uint8_t size[8];
    const uint8_t *from = b.data;
    uint64_t len = b.len;
    if (e == ERR_OK && file == BULK_FILE_MANIFEST_SIZE) {
        struct writer w = writer_of(size, sizeof size);
        write_u64(&w, b.len);
        from = size;
        len = sizeof size;
    }
    if (e == ERR_OK && (offset > len || n > len - offset))
        e = ERR_NOT_FOUND;
    if (e == ERR_OK)
        memcpy(to, from + offset, n);
    buf_deinit(&b);
    return e;
}

static enum err source_read(void *context, const struct hash256 *manifest, uint32_t file,
                            uint64_t offset, size_t n, void *to)
{
    if (file == BULK_FILE_MANIFEST || file == BULK_FILE_MANIFEST_SIZE)
        return read_manifest_file(context, manifest, file, offset, n, to);
    if (file != 0)
        return ERR_NOT_FOUND;
    enum err e = store_read(context, manifest, offset, to, n);
    return e == ERR_INVALID ? ERR_NOT_FOUND : e;
}

static enum err source_have(void *context, const struct hash256 *manifest, uint32_t file,
                            uint32_t first, uint32_t n_blocks, uint8_t *ret)
{
    if (file != 0)
        return ERR_NOT_FOUND;
    _cleanup_(freep) uint8_t *map = malloc(MANIFEST_LEAVES_MAX / 8);
    size_t n = 0;
    if (!map)
        return ERR_NO_MEMORY;
    TRY(store_map(context, manifest, map, MANIFEST_LEAVES_MAX / 8, &n));
    for (uint32_t i = 0; i < n_blocks; i++) {
        uint64_t block = (uint64_t)first + i;
        if (block / 8 < n && (map[block / 8] >> (block % 8) & 1))
            ret[i / 8] = (uint8_t)(ret[i / 8] | 1u << (i % 8));
    }
    return ERR_OK;
}

struct bulk_source loader_source(struct store *store)
{
    return (struct bulk_source){.context = store, .read = source_read, .have = source_have};
}

/* ---- fetching ---- */

static void drop_bulk(struct loader *l)
{
    if (l->has_bulk && l->bulk.fd >= 0)
        close_fd(l, l->bulk.fd);
    l->has_bulk = false;
}

static void call_off_spares(struct loader *l)
{
    l->spare_stop = true;
    for (uint32_t i = 0; i < l->n_jobs; i++) {
        if (l->jobs[i]->kind == MAIL_SPARE)
            l->jobs[i]->order.n_runs = 0;
    }
}

static void take_mail(struct loader *l)
{
    struct mail m;
    while (mailbox_receive(l->mailbox, &m) == ERR_OK) {
        if (m.type == MAIL_STOP) {
            l->stopping = true;
        } else if (m.type == MAIL_BULK) {
            drop_bulk(l);
            memcpy(&l->bulk, m.bytes, sizeof l->bulk);
            l->has_bulk = true;
        } else if (m.type == MAIL_SPARE_STOP) {
            call_off_spares(l);
        } else if (l->n_jobs < JOBS_MAX) {
            l->jobs[l->n_jobs++] = TAKE(m.owned);
        }
        mail_clear(&m);
    }
}

static void wait_for_mail(struct loader *l, int timeout_ms)
{
    struct pollfd p = {.fd = mailbox_fd(l->mailbox), .events = POLLIN};
    if (poll(&p, 1, timeout_ms) > 0)
        take_mail(l);
}

/* A second copy gives way to whatever else there is to do. */
static bool must_end(const struct loader *l, const struct job *job)
{
    return l->stopping || (job->kind == MAIL_SPARE && (l->n_jobs > 0 || l->spare_stop));
}

static enum err connect_bulk(struct loader *l, const struct job *job, const struct node_id *peer,
                             struct link **ret)
{
    drop_bulk(l);
    TRY(mailbox_send(l->to_loop, LOOP_NEED_BULK, peer, sizeof *peer));
    uint64_t until_us = clock_monotonic_us() + (uint64_t)CONNECT_MS * 1000;
    while (!must_end(l, job)) {
        if (l->has_bulk && node_id_eq(&l->bulk.peer, peer))
            break;
        uint64_t now_us = clock_monotonic_us();
        if (now_us >= until_us)
            return ERR_TIMEOUT;
        wait_for_mail(l, (int)((until_us - now_us) / 1000) + 1);
    }
    if (must_end(l, job))
        return ERR_CANCELLED;
    l->has_bulk = false;
    if (l->bulk.fd < 0)
        return ERR_CLOSED;
    struct link_tcp_options o = {
        .fd = l->bulk.fd, .keys = l->bulk.result.keys, .frame_bytes_max = BULK_FRAME_BYTES_MAX};
    enum err e = link_tcp_new(&o, ret);
    if (e != ERR_OK)
        close_fd(l, l->bulk.fd);
    else
        l->link_fd = l->bulk.fd;
    return e;
}

static void end_link(struct loader *l, struct link *link)
{
    if (link)
        peer_fds_remove(l->options.fds, l->link_fd);
    link_free(link);
}

/* A run of bytes of one small file (the manifest), in pieces. */
struct run {
    uint32_t file;
    uint64_t at, len;
    uint8_t *to;
    uint64_t got;
};

static bool run_next(void *context, struct bulk_range *ret)
{
    struct run *r = context;
    if (r->at >= r->len)
        return false;
    uint64_t n = MIN_OF(r->len - r->at, (uint64_t)BULK_BLOCK_BYTES);
    *ret = (struct bulk_range){.file = r->file, .n_bytes = (uint32_t)n, .offset = r->at};
    r->at += n;
    return true;
}

static enum err run_put(void *context, const struct bulk_range *range, const void *bytes,
                        const struct hash256 *hash)
{
    struct run *r = context;
    (void)hash;
    memcpy(r->to + range->offset, bytes, range->n_bytes);
    r->got += range->n_bytes;
    return ERR_OK;
}

static enum err run_missing(void *context, const struct bulk_range *range, enum err why)
{
    (void)context;
    (void)range;
    return why;
}

static enum err fetch_run(struct link *link, const struct hash256 *model, uint32_t file,
                          uint8_t *to, uint64_t len)
{
    struct run r = {.file = file, .len = len, .to = to};
    struct bulk_sink sink = {&r, *model, run_next, run_put, run_missing};
    TRY(bulk_fetch(link, &sink, FETCH_IDLE_MS, -1));
    return r.got == len ? ERR_OK : ERR_CLOSED;
}

static enum err fetch_manifest(struct loader *l, struct link *link, const struct hash256 *model,
                               struct err_text *text)
{
    uint8_t size[8];
    TRY(fetch_run(link, model, BULK_FILE_MANIFEST_SIZE, size, sizeof size));
    struct reader r = reader_of(size, sizeof size);
    uint64_t len = read_u64(&r);
    if (len == 0 || len > MANIFEST_BYTES_MAX)
        return ERR_CORRUPT;
    _cleanup_(freep) uint8_t *bytes = malloc(len);
    if (!bytes)
        return ERR_NO_MEMORY;
    TRY(fetch_run(link, model, BULK_FILE_MANIFEST, bytes, len));
    return store_add_manifest(l->options.store, model, bytes, len, text);
}

/* Blocks that some ranges overlap and that are not here. */
struct wanted {
    struct loader *l;
    struct hash256 model;
    uint64_t file_bytes;
    uint8_t *todo; /* one bit per block, cleared when asked for */
    uint32_t n_blocks, at;
    uint64_t done_bytes, total_bytes;
    uint32_t since_sync;
    bool spare;
    uint64_t begun_us, news_us; /* of a second copy */
    struct err_text *text;
};

static bool wanted_next(void *context, struct bulk_range *ret)
{
    struct wanted *w = context;
    while (w->at < w->n_blocks && !(w->todo[w->at / 8] >> (w->at % 8) & 1))
        w->at++;
    if (w->at >= w->n_blocks || w->l->stopping)
        return false;
    uint64_t offset = (uint64_t)w->at * BULK_BLOCK_BYTES;
    *ret = (struct bulk_range){
        .offset = offset,
        .n_bytes = (uint32_t)MIN_OF((uint64_t)BULK_BLOCK_BYTES, w->file_bytes - offset)};
    w->at++;
    return true;
}

/* Second copies are fetched no faster than LOADER_SPARE_BYTES_PER_S, and told of once a second. Any
 * mail ends the wait, and with it the piece. */
static enum err spare_pause(struct wanted *w, uint32_t n_bytes)
{
    struct loader *l = w->l;
    uint64_t now_us = clock_monotonic_us();
    l->spare_got += n_bytes;
    if (now_us >= w->news_us + SPARE_NEWS_US) {
        w->news_us = now_us;
        (void)mailbox_send(l->to_loop, LOOP_MODEL_NEWS, &w->model, sizeof w->model);
    }
    uint64_t due_us = w->begun_us + w->done_bytes * 1000000 / LOADER_SPARE_BYTES_PER_S;
    if (now_us >= due_us)
        return ERR_OK;
    struct pollfd p = {.fd = mailbox_fd(l->mailbox), .events = POLLIN};
    return poll(&p, 1, (int)((due_us - now_us) / 1000)) > 0 ? ERR_CANCELLED : ERR_OK;
}

static enum err wanted_put(void *context, const struct bulk_range *range, const void *bytes,
                           const struct hash256 *hash)
{
    struct wanted *w = context;
    uint32_t block = (uint32_t)(range->offset / BULK_BLOCK_BYTES);
    (void)hash; /* the store checks against the manifest, which is what the model's id stands for */
    TRY(store_write_block(w->l->options.store, &w->model, block, bytes, range->n_bytes, w->text));
    w->todo[block / 8] = (uint8_t)(w->todo[block / 8] & ~(1u << (block % 8)));
    w->done_bytes += range->n_bytes;
    if (!w->spare)
        set_progress(w->l, &w->model, w->done_bytes, w->total_bytes);
    if (++w->since_sync % SYNC_EVERY_BLOCKS == 0)
        TRY(store_sync(w->l->options.store, &w->model, w->text));
    if (w->spare)
        return spare_pause(w, range->n_bytes);
    if (w->since_sync % NEWS_EVERY_BLOCKS == 0)
        (void)mailbox_send(w->l->to_loop, LOOP_MODEL_NEWS, &w->model, sizeof w->model);
    return ERR_OK;
}

static enum err wanted_missing(void *context, const struct bulk_range *range, enum err why)
{
    (void)context;
    (void)range;
    return why == ERR_NOT_FOUND ? ERR_OK : why; /* another member may have it */
}

static uint32_t mark_missing(struct wanted *w, const struct byte_range *ranges, uint32_t n_ranges)
{
    uint32_t n = 0;
    w->total_bytes = 0;
    for (uint32_t i = 0; i < n_ranges; i++) {
        if (ranges[i].n_bytes == 0)
            continue;
        uint64_t last = (ranges[i].offset + ranges[i].n_bytes - 1) / BULK_BLOCK_BYTES;
        for (uint64_t b = ranges[i].offset / BULK_BLOCK_BYTES; b <= last && b < w->n_blocks; b++) {
            uint64_t at = b * BULK_BLOCK_BYTES,
                     len = MIN_OF((uint64_t)BULK_BLOCK_BYTES, w->file_bytes - at);
            bool marked = w->todo[b / 8] >> (b % 8) & 1;
            if (marked || store_has(w->l->options.store, &w->model, at, len))
                continue;
            w->todo[b / 8] = (uint8_t)(w->todo[b / 8] | 1u << (b % 8));
            w->total_bytes += len;
            n++;
        }
    }
    return n;
}

static uint32_t n_marked(const struct wanted *w)
{
    uint32_t n = 0;
    for (uint32_t b = 0; b < w->n_blocks; b++)
        n += w->todo[b / 8] >> (b % 8) & 1;
    return n;
}

/* Every holder is asked in turn for what is still missing. */
static enum err fetch_from_holders(struct loader *l, const struct job *job, struct wanted *w)
{
    enum err last = ERR_NOT_FOUND;
    int stop_fd = w->spare ? mailbox_fd(l->mailbox) : -1;
    for (uint32_t i = 0; i < job->n_holders && n_marked(w) > 0 && last != ERR_CANCELLED; i++) {
        struct link *link = NULL;
        enum err e = connect_bulk(l, job, &job->holders[i], &link);
        if (e == ERR_OK) {
            struct bulk_sink sink = {w, w->model, wanted_next, wanted_put, wanted_missing};
            w->at = 0;
            e = bulk_fetch(link, &sink, FETCH_IDLE_MS, stop_fd);
            end_link(l, link);
        }
        if (e == ERR_CANCELLED) {
            last = e;
        } else if (e != ERR_OK) {
            char peer[SHORT_ID_MAX];
            short_of_32(job->holders[i].bytes, peer);
            log_warning(&l->log, "fetching model bytes from %s stopped (%s)", peer, err_name(e));
            last = e;
        }
    }
    TRY(store_sync(l->options.store, &w->model, w->text));
    (void)mailbox_send(l->to_loop, LOOP_MODEL_NEWS, &w->model, sizeof w->model);
    if (n_marked(w) == 0)
        return ERR_OK;
    if (last == ERR_CANCELLED)
        return last;
    return err_set(w->text, last == ERR_OK ? ERR_NOT_FOUND : last,
                   "%u MiB of the model are on no member that can be reached just now",
                   n_marked(w));
}

static enum err fetch_ranges(struct loader *l, const struct job *job,
                             const struct store_entry *entry, const struct byte_range *ranges,
                             uint32_t n_ranges, struct err_text *text)
{
    struct wanted w = {.l = l,
                       .model = job->model,
                       .file_bytes = entry->n_bytes,
                       .n_blocks =
                           (uint32_t)((entry->n_bytes + BULK_BLOCK_BYTES - 1) / BULK_BLOCK_BYTES),
                       .spare = job->kind == MAIL_SPARE,
                       .begun_us = clock_monotonic_us(),
                       .text = text};
    w.news_us = w.begun_us;
    w.todo = calloc(1, w.n_blocks / 8 + 1);
    if (!w.todo)
        return ERR_NO_MEMORY;
    enum err e = ERR_OK;
    if (mark_missing(&w, ranges, n_ranges) > 0) {
        if (!w.spare)
            set_progress(l, &w.model, 0, w.total_bytes);
        e = fetch_from_holders(l, job, &w);
    }
    free(w.todo);
    return e;
}

static enum err ensure_manifest(struct loader *l, const struct job *job, struct store_entry *entry,
                                struct err_text *text)
{
    enum err e = store_get(l->options.store, &job->model, entry);
    for (uint32_t i = 0; e != ERR_OK && i < job->n_holders && !must_end(l, job); i++) {
        struct link *link = NULL;
        e = connect_bulk(l, job, &job->holders[i], &link);
        if (e == ERR_OK)
            e = fetch_manifest(l, link, &job->model, text);
        end_link(l, link);
        if (e == ERR_OK)
            e = store_get(l->options.store, &job->model, entry);
    }
    if (e != ERR_OK && (!text->text[0] || e == ERR_NOT_FOUND))
        return err_set(text, e, "no member that can be reached has this model (%s)", err_name(e));
    return e;
}

/* Manifest, header, tokenizer. */
static enum err open_model(struct loader *l, const struct job *job, struct store_entry *entry,
                           struct served_model **ret, struct err_text *text)
{
    TRY(ensure_manifest(l, job, entry, text));
    TRY(store_renew_source(l->options.store, &job->model, text));
    struct byte_range header = {0, entry->header_bytes};
    TRY(fetch_ranges(l, job, entry, &header, 1, text));
    char path[STORE_PATH_MAX];
    TRY(store_path(l->options.store, &job->model, path));
    enum err e = models_open(l->options.models, &job->model, entry->name, path, ret, text);
    (void)mailbox_send(l->to_loop, LOOP_MODEL_NEWS, &job->model, sizeof job->model);
    return e;
}

static enum err load(struct loader *l, const struct job *job, struct loaded *loaded,
                     struct err_text *text)
{
    struct store_entry entry;
    struct served_model *served = NULL;
    const struct plan_stage *part = &job->plan.stages[job->stage];
    TRY(open_model(l, job, &entry, &served, text));
    struct byte_range *ranges = malloc(MODEL_RANGES_MAX * sizeof *ranges);
    uint32_t n_ranges = 0;
    enum err e = ranges ? ERR_OK : ERR_NO_MEMORY;
    if (e == ERR_OK)
        e = model_ranges(served->model, part->first_layer, part->n_layers, ranges, MODEL_RANGES_MAX,
                         &n_ranges);
    if (e == ERR_OK)
        e = fetch_ranges(l, job, &entry, ranges, n_ranges, text);
    free(ranges);
    struct stage_options o = {.first_layer = part->first_layer,
                              .n_layers = part->n_layers,
                              .context = job->plan.context,
                              .n_blocks = plan_kv_blocks(&job->plan),
                              .precision = (enum stage_precision)job->plan.precision};
    if (e == ERR_OK)
        e = stage_new(served->model, l->options.pool, &o, &loaded->stage, text);
    if (e == ERR_OK)
        loaded->model = model_ref(served->model);
    models_put(served);
    return e;
}

static void do_prepare(struct loader *l, const struct job *job)
{
    struct mail_prepared m = {.epoch = job->plan.epoch, .model = job->model};
    struct err_text text = {""};
    struct loaded *loaded = calloc(1, sizeof *loaded);
    m.error = loaded ? load(l, job, loaded, &text) : ERR_NO_MEMORY;
    if (m.error != ERR_OK) {
        (void)snprintf(m.text, sizeof m.text, "%s", text.text[0] ? text.text : err_name(m.error));
        loaded_free(TAKE(loaded));
        (void)mailbox_send(l->to_loop, LOOP_PREPARED, &m, sizeof m);
        return;
    }
    if (mailbox_send_owned(l->to_loop, LOOP_PREPARED, &m, sizeof m, loaded, loaded_free) != ERR_OK)
        loaded_free(loaded);
}

static void do_open(struct loader *l, const struct job *job)
{
    struct store_entry entry;
    struct served_model *served = NULL;
    struct err_text text = {""};
    if (open_model(l, job, &entry, &served, &text) != ERR_OK)
        log_warning(&l->log, "%s", text.text);
    models_put(served);
}

static enum err fetch_spare(struct loader *l, const struct job *job, struct err_text *text)
{
    struct store_entry entry;
    struct served_model *served = NULL;
    struct byte_range ranges[SPARE_ORDER_RUNS_MAX];
    if (job->order.n_runs == 0)
        return ERR_CANCELLED;
    TRY(open_model(l, job, &entry, &served, text));
    models_put(served);
    for (uint32_t i = 0; i < job->order.n_runs; i++)
        ranges[i] = (struct byte_range){(uint64_t)job->order.runs[i].first * BULK_BLOCK_BYTES,
                                        (uint64_t)job->order.runs[i].n * BULK_BLOCK_BYTES};
    return fetch_ranges(l, job, &entry, ranges, job->order.n_runs, text);
}

static void do_spare(struct loader *l, const struct job *job)
{
    struct err_text text = {""};
    struct mail_spare m = {.model = job->model};
    l->spare_stop = false;
    l->spare_got = 0;
    m.error = fetch_spare(l, job, &text);
    m.got_bytes = l->spare_got;
    if (m.error != ERR_OK && m.error != ERR_CANCELLED)
        log_warning(&l->log, "a second copy stopped: %s",
                    text.text[0] ? text.text : err_name(m.error));
    (void)mailbox_send(l->to_loop, LOOP_SPARE_DONE, &m, sizeof m);
}

/* Second copies last. */
static struct job *next_job(struct loader *l)
{
    uint32_t at = 0;
    while (at + 1 < l->n_jobs && l->jobs[at]->kind == MAIL_SPARE)
        at++;
    struct job *job = l->jobs[at];
    memmove(l->jobs + at, l->jobs + at + 1, (--l->n_jobs - at) * sizeof(struct job *));
    return job;
}

static void *run(void *context)
{
    struct loader *l = context;
    while (!l->stopping) {
        if (l->n_jobs == 0) {
            wait_for_mail(l, -1);
            continue;
        }
        struct job *job = next_job(l);
        if (job->kind == MAIL_PREPARE)
            do_prepare(l, job);
        else if (job->kind == MAIL_SPARE)
            do_spare(l, job);
        else
            do_open(l, job);
        free(job);
        take_mail(l);
    }
    return NULL;
}

enum err loader_new(const struct loader_options *options, struct loader **ret,
                    struct err_text *text)
{
    struct loader *l = calloc(1, sizeof *l);
    if (!l)
        return ERR_NO_MEMORY;
    l->options = *options;
    if (options->log)
        l->log = *options->log;
    l->log.room = "loader";
    (void)pthread_mutex_init(&l->progress_mutex, NULL);
    enum err e = mailbox_new("loader", &l->mailbox);
    if (e == ERR_OK)
        e = mailbox_sender_new(l->mailbox, &l->to_self);
    if (e == ERR_OK)
        e = mailbox_sender_new(options->loop, &l->to_loop);
    if (e != ERR_OK) {
        loader_free(l);
        return err_set(text, e, "the loader cannot be made (%s)", err_name(e));
    }
    *ret = l;
    return ERR_OK;
}

enum err loader_start(struct loader *l)
{
    if (pthread_create(&l->thread, NULL, run, l) != 0)
        return ERR_IO;
    l->started = true;
    return ERR_OK;
}

void loader_stop(struct loader *l)
{
    if (!l->started)
        return;
    while (mailbox_send(l->to_self, MAIL_STOP, NULL, 0) == ERR_BUSY)
        (void)usleep(1000);
    peer_fds_cut_all(l->options.fds); /* what is being fetched ends here */
    (void)pthread_join(l->thread, NULL);
    l->started = false;
}

void loader_free(struct loader *l)
{
    if (!l)
        return;
    for (uint32_t i = 0; i < l->n_jobs; i++)
        free(l->jobs[i]);
    drop_bulk(l);
    mailbox_sender_free(l->to_self);
    mailbox_sender_free(l->to_loop);
    mailbox_free(l->mailbox);
    (void)pthread_mutex_destroy(&l->progress_mutex);
    free(l);
}
