/* A stage that hashes instead of computing, and the one-node answer to compare with.
 *
 * A row is a hash of (layer, the row that comes in, the KV of all earlier positions, read through
 * the segment's block table), so that a mistake in position, slot, block, order, epoch or KV reuse
 * changes every token that follows.
 * The interface is that of runtime/stage.h where it can be; a tail yields one hash for each segment
 * with logits, from which a token is "sampled" as a function of (hash, seed, position, history). */
#ifndef COVEY_TESTS_SIM_HASH_STAGE_H
#define COVEY_TESTS_SIM_HASH_STAGE_H

#include "runtime/stage.h"
#include "transport/frame.h"

enum {
    HASH_STAGE_ROW_BYTES = 16, /* of an activation row: four floats that are no numbers */
    HASH_STAGE_VOCABULARY = 512,
};

struct hash_stage;

struct hash_stage_options {
    uint64_t model; /* other models give other answers */
    uint32_t first_layer, n_layers, n_layers_model;
    uint32_t context, n_blocks; /* 0: of one sequence */
};

struct hash_stage *hash_stage_new(const struct hash_stage_options *options);
void hash_stage_free(struct hash_stage *stage);

/* in: [n_rows, HASH_STAGE_ROW_BYTES], NULL for a head; out: the same, NULL for a tail; logits:
 * [segments with logits] from a tail. ERR_INVALID: a bad segment. */
enum err hash_stage_forward(struct hash_stage *stage, const struct stage_segment *segments,
                            uint32_t n_segments, const float *in, float *out, uint64_t *logits);

enum err hash_stage_copy_block(struct hash_stage *stage, uint32_t from, uint32_t to);

/* Fills the positions of the segments with rubbish, as a computation that failed may. */
void hash_stage_spoil(struct hash_stage *stage, const struct stage_segment *segments,
                      uint32_t n_segments);

int32_t hash_stage_sample(uint64_t logits, const struct frame_sampler *sampler, uint32_t position,
                          const int32_t *history, uint32_t n_history);

/* The undisturbed answer: `tokens` holds the prompt and has room for `context`. Returns how many
 * tokens there are then; *ret_finish says why it ended. */
uint32_t hash_stage_answer(uint64_t model, uint32_t n_layers_model, uint32_t context,
                           const struct frame_sampler *sampler, int32_t *tokens, uint32_t n_prompt,
                           enum frame_finish *ret_finish);

#endif
