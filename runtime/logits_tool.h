/* The work of `covey debug logits MODEL FILE`: runs token ids through a model, in one process, and
 * says what the logits are: one SHA-256 over the raw F32 logits of all positions (little-endian, in
 * order), and the largest at each position. Two machines that print the same digest compute the
 * same bits.
 *
 * Linked with libsodium for the digest; the rest of runtime/ is not. */
#ifndef COVEY_RUNTIME_LOGITS_TOOL_H
#define COVEY_RUNTIME_LOGITS_TOOL_H

#include "base/buf.h"
#include "base/err.h"
#include "runtime/stage.h"

#include <stdint.h>

enum {
    LOGITS_TOKENS_MAX = 1 << 20,
    LOGITS_CUTS_MAX = 15,
    LOGITS_TOP_MAX = 100,
    LOGITS_FILE_MAX = 16 << 20, /* bytes of a file of token ids */
};

struct logits_options {
    enum stage_precision precision;
    uint32_t variant;               /* enum kernels_variant; 0: best */
    uint32_t n_threads;             /* 0: all CPUs */
    uint32_t chunk;                 /* rows of one step, 1 to STAGE_ROWS_MAX; 0: the most */
    uint32_t cuts[LOGITS_CUTS_MAX]; /* first layers of the second and further stages, increasing */
    uint32_t n_cuts;
    uint32_t top; /* print so many of the largest logits for each position */
};

/* Integers separated by anything that is not part of a number (spaces, commas, brackets); '#'
 * begins a comment. The ids are the caller's to free. ERR_CORRUPT, ERR_LIMIT, ERR_NO_MEMORY. */
enum err logits_parse_ids(const char *text, size_t n, int32_t **ret_ids, uint32_t *ret_n,
                          struct err_text *err);

/* Runs the ids from position 0. Lines of text go to `out`: for each position "POSITION ID:LOGIT
 * ..." when `top` is above 0, and at last "sha256 HEX positions N". The digest too, where
 * ret_sha256 is not NULL. */
enum err logits_run(const char *model_path, const int32_t *ids, uint32_t n,
                    const struct logits_options *options, struct buf *out, uint8_t ret_sha256[32],
                    struct err_text *err);

/* Both, with the ids read from a file. */
enum err logits_run_file(const char *model_path, const char *ids_path,
                         const struct logits_options *options, struct buf *out,
                         struct err_text *err);

#endif
