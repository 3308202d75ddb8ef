#include "runtime/logits_tool.h"

#include "base/id.h"
#include "base/util.h"
#include "runtime/model.h"
#include "runtime/pool.h"

#include <ctype.h>
#include <errno.h>
#include <sodium.h>
#include <stdio.h>
#include <string.h>

/* Fills ids, which has room for every number that n bytes can hold. */
static enum err parse_ids(const char *text, size_t n, int32_t *ids, uint32_t *ret_n,
                          struct err_text *err)
{
    uint32_t count = 0;
    for (size_t i = 0; i < n;) {
        if (text[i] == '#') {
            while (i < n && text[i] != '\n')
                i++;
        } else if (isdigit((unsigned char)text[i])) {
            int64_t v = 0;
            for (; i < n && isdigit((unsigned char)text[i]); i++)
                if ((v = v * 10 + (text[i] - '0')) > INT32_MAX)
                    return err_set(err, ERR_CORRUPT, "token id number %u is too large", count + 1);
            if (count == LOGITS_TOKENS_MAX)
                return err_set(err, ERR_LIMIT, "more than %d token ids", LOGITS_TOKENS_MAX);
            ids[count++] = (int32_t)v;
        } else if (text[i] != '\0' && strchr(" \t\r\n,;[]", text[i])) {
            i++;
        } else {
            return err_set(err, ERR_CORRUPT,
                           "the token ids hold the character '%c' at byte %zu: only whole numbers "
                           "and separators are allowed",
                           isprint((unsigned char)text[i]) ? text[i] : '?', i + 1);
        }
    }
    *ret_n = count;
    return count > 0 ? ERR_OK : err_set(err, ERR_CORRUPT, "there are no token ids");
}

enum err logits_parse_ids(const char *text, size_t n, int32_t **ret_ids, uint32_t *ret_n,
                          struct err_text *err)
{
    int32_t *ids = malloc(((n + 1) / 2 + 1) * sizeof *ids);
    if (!ids)
        return err_set(err, ERR_NO_MEMORY, "no memory for the token ids");
    enum err e = parse_ids(text, n, ids, ret_n, err);
    if (e != ERR_OK)
        free(ids);
    else
        *ret_ids = ids;
    return e;
}

/* A model cut into stages, and the buffers between them. */
struct run {
    struct model *model;
    struct pool *pool;
    struct stage *stages[LOGITS_CUTS_MAX + 1];
    uint32_t n_stages, chunk;
    float *rows[2], *logits;
};

static void run_deinit(struct run *r)
{
    for (uint32_t i = 0; i < r->n_stages; i++)
        stage_free(r->stages[i]);
    pool_free(r->pool);
    model_unref(r->model);
    free(r->rows[0]);
    free(r->rows[1]);
    free(r->logits);
}

static enum err run_init(struct run *r, const char *path, uint32_t n,
                         const struct logits_options *o, struct err_text *err)
{
    TRY(model_open(path, &r->model, err));
    const struct model_info *info = model_info(r->model);
    if (o->n_cuts > LOGITS_CUTS_MAX || o->top > LOGITS_TOP_MAX || o->chunk > STAGE_ROWS_MAX)
        return err_set(err, ERR_INVALID,
                       "too many cuts, too many of the largest logits, or too "
                       "large a chunk");
    enum err e = pool_new(o->n_threads, &r->pool);
    if (e != ERR_OK)
        return err_set(err, e, "cannot start %u threads", o->n_threads);
    for (uint32_t first = 0; r->n_stages <= o->n_cuts; r->n_stages++) {
        uint32_t end = r->n_stages < o->n_cuts ? o->cuts[r->n_stages] : info->n_layers;
        if (end <= first)
            return err_set(err, ERR_INVALID, "the cuts must increase from 1 to %u",
                           info->n_layers - 1);
        struct stage_options so = {.first_layer = first,
                                   .n_layers = end - first,
                                   .context = n,
                                   .precision = o->precision,
                                   .variant = o->variant};
        TRY(stage_new(r->model, r->pool, &so, &r->stages[r->n_stages], err));
        first = end;
    }
    r->chunk = MIN_OF(o->chunk ? o->chunk : (uint32_t)STAGE_ROWS_MAX, n);
    for (int i = 0; i < 2; i++)
        r->rows[i] = malloc((size_t)r->chunk * info->n_embd * sizeof(float));
    r->logits = malloc((size_t)r->chunk * info->n_vocab * sizeof(float));
    if (!r->rows[0] || !r->rows[1] || !r->logits)
        return err_set(err, ERR_NO_MEMORY, "no memory for the logits of %u positions", r->chunk);
    return ERR_OK;
}

static enum err run_step(struct run *r, const int32_t *ids, uint32_t position, uint32_t n_rows)
{
    struct stage_segment s = {
        .position = position, .n_rows = n_rows, .token_ids = ids, .logits = STAGE_LOGITS_ALL};
    for (uint32_t i = 0; i < r->n_stages; i++) {
        bool last = i + 1 == r->n_stages;
        TRY(stage_forward(r->stages[i], &s, 1, i > 0 ? r->rows[i % 2] : NULL,
                          last ? NULL : r->rows[(i + 1) % 2], last ? r->logits : NULL));
    }
    return ERR_OK;
}

/* One line: the `top` largest, of equals lower ids first. */
static enum err print_top(struct buf *out, uint32_t position, const float *logits, uint32_t n_vocab,
                          uint32_t top)
{
    uint32_t best[LOGITS_TOP_MAX], n = 0;
    for (uint32_t i = 0; i < n_vocab; i++) {
        if (n == top && !(logits[i] > logits[best[n - 1]]))
            continue;
        uint32_t at = n < top ? n++ : n - 1;
        for (; at > 0 && logits[i] > logits[best[at - 1]]; at--)
            best[at] = best[at - 1];
        best[at] = i;
    }
    TRY(buf_printf(out, "%u", position));
    for (uint32_t i = 0; i < n; i++)
        TRY(buf_printf(out, " %u:%.9g", best[i], (double)logits[best[i]]));
    return buf_printf(out, "\n");
}

static enum err run_all(struct run *r, const int32_t *ids, uint32_t n, uint32_t top,
                        struct buf *out, uint8_t sha256[32], struct err_text *err)
{
    uint32_t n_vocab = model_info(r->model)->n_vocab;
    crypto_hash_sha256_state hash;
    (void)crypto_hash_sha256_init(&hash);
    for (uint32_t at = 0; at < n; at += r->chunk) {
        uint32_t rows = MIN_OF(r->chunk, n - at);
        enum err e = run_step(r, ids + at, at, rows);
        if (e != ERR_OK)
            return err_set(err, e,
                           "the step at position %u failed (%s): is every token id below "
                           "%u?",
                           at, err_name(e), n_vocab);
        (void)crypto_hash_sha256_update(&hash, (const uint8_t *)r->logits,
                                        (size_t)rows * n_vocab * sizeof(float));
        for (uint32_t i = 0; top > 0 && i < rows; i++)
            TRY(print_top(out, at + i, r->logits + (size_t)i * n_vocab, n_vocab, top));
    }
    (void)crypto_hash_sha256_final(&hash, sha256);
    char hex[HEX_ID_MAX];
    hex_of_32(sha256, hex);
    return buf_printf(out, "sha256 %s positions %u\n", hex, n);
}

enum err logits_run(const char *model_path, const int32_t *ids, uint32_t n,
                    const struct logits_options *options, struct buf *out, uint8_t ret_sha256[32],
                    struct err_text *err)
{
    uint8_t sha256[32];
    struct run r = {0};
    enum err e = n >= 1 ? run_init(&r, model_path, n, options, err)
                        : err_set(err, ERR_INVALID, "there are no token ids");
    if (e == ERR_OK)
        e = run_all(&r, ids, n, options->top, out, sha256, err);
    run_deinit(&r);
    if (e == ERR_OK && ret_sha256)
        memcpy(ret_sha256, sha256, sizeof sha256);
    return e;
}

static enum err read_text(const char *path, struct buf *b, struct err_text *err)
{
    FILE *f = fopen(path, "rb");
    if (!f)
        return err_set(err, ERR_IO, "%s: cannot open the file: %s", path, strerror(errno));
    char block[4096];
    enum err e = ERR_OK;
    for (size_t n; e == ERR_OK && (n = fread(block, 1, sizeof block, f)) > 0;)
        e = buf_append(b, block, n);
    if (ferror(f))
        e = ERR_IO;
    (void)fclose(f);
    return e == ERR_OK ? e : err_set(err, e, "%s: cannot read the file (%s)", path, err_name(e));
}

enum err logits_run_file(const char *model_path, const char *ids_path,
                         const struct logits_options *options, struct buf *out,
                         struct err_text *err)
{
    struct buf b = BUF_INIT(LOGITS_FILE_MAX);
    int32_t *ids = NULL;
    uint32_t n = 0;
    enum err e = read_text(ids_path, &b, err);
    if (e == ERR_OK)
        e = logits_parse_ids((const char *)b.data, b.len, &ids, &n, err);
    buf_deinit(&b);
    if (e == ERR_OK)
        e = logits_run(model_path, ids, n, options, out, NULL, err);
    free(ids);
    return e;
}
