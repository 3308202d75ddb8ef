#include "tests/sim/hash_stage.h"

#include <stdlib.h>
#include <string.h>

struct row {
    uint64_t a, b;
};
_Static_assert(sizeof(struct row) == HASH_STAGE_ROW_BYTES, "a row is 16 bytes");

struct hash_stage {
    struct hash_stage_options options;
    uint32_t n_blocks;
    uint64_t *kv; /* [n_layers, n_blocks, STAGE_BLOCK] */
};

/* splitmix64's finish over a running sum. */
static uint64_t mix(uint64_t h, uint64_t v)
{
    h = (h ^ v) + 0x9e3779b97f4a7c15u;
    h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9u;
    h = (h ^ (h >> 27)) * 0x94d049bb133111ebu;
    return h ^ (h >> 31);
}

struct hash_stage *hash_stage_new(const struct hash_stage_options *options)
{
    struct hash_stage *stage = calloc(1, sizeof *stage);
    if (!stage)
        abort();
    stage->options = *options;
    stage->n_blocks = options->n_blocks ? options->n_blocks : options->context / STAGE_BLOCK + 1;
    stage->kv =
        calloc((size_t)options->n_layers * stage->n_blocks * STAGE_BLOCK, sizeof *stage->kv);
    if (!stage->kv)
        abort();
    return stage;
}

void hash_stage_free(struct hash_stage *stage)
{
    if (!stage)
        return;
    free(stage->kv);
    free(stage);
}

static uint64_t *kv_at(struct hash_stage *stage, const struct stage_segment *s, uint32_t layer,
                       uint32_t position)
{
    uint32_t i = position / STAGE_BLOCK, block = s->blocks ? s->blocks[i] : i;
    return stage->kv + ((size_t)layer * stage->n_blocks + block) * STAGE_BLOCK +
           position % STAGE_BLOCK;
}

/* Every position counts, and where it is. */
static uint64_t attend(struct hash_stage *stage, const struct stage_segment *s, uint32_t layer,
                       uint32_t position)
{
    uint64_t sum = 1;
    for (uint32_t p = 0; p <= position; p += STAGE_BLOCK) {
        const uint64_t *kv = kv_at(stage, s, layer, p);
        for (uint32_t i = 0; i < STAGE_BLOCK && p + i <= position; i++)
            sum = (sum ^ kv[i]) * 0x9e3779b97f4a7c15u;
        sum ^= sum >> 29;
    }
    return sum;
}

static struct row compute_row(struct hash_stage *stage, const struct stage_segment *s,
                              uint32_t position, struct row row)
{
    for (uint32_t i = 0; i < stage->options.n_layers; i++) {
        uint64_t layer = stage->options.first_layer + i;
        *kv_at(stage, s, i, position) = mix(mix(layer, row.a), row.b);
        uint64_t sum = attend(stage, s, i, position);
        row = (struct row){mix(sum, row.a), mix(sum, row.b + layer)};
    }
    return row;
}

static struct row embed(const struct hash_stage *stage, int32_t id, uint32_t position)
{
    uint64_t h = mix(stage->options.model, (uint64_t)(uint32_t)id);
    return (struct row){h, mix(h, position)};
}

static bool segment_ok(const struct hash_stage *stage, const struct stage_segment *s)
{
    if (s->n_rows == 0 || s->position >= stage->options.context ||
        s->n_rows > stage->options.context - s->position)
        return false;
    for (uint32_t i = 0; i <= (s->position + s->n_rows - 1) / STAGE_BLOCK; i++) {
        if ((s->blocks ? s->blocks[i] : i) >= stage->n_blocks)
            return false;
    }
    return true;
}

enum err hash_stage_forward(struct hash_stage *stage, const struct stage_segment *segments,
                            uint32_t n_segments, const float *in, float *out, uint64_t *logits)
{
    for (uint32_t i = 0; i < n_segments; i++) {
        if (!segment_ok(stage, &segments[i]))
            return ERR_INVALID;
    }
    size_t at = 0;
    for (uint32_t i = 0; i < n_segments; i++) {
        const struct stage_segment *s = &segments[i];
        struct row row = {0, 0};
        for (uint32_t k = 0; k < s->n_rows; k++, at++) {
            if (in)
                memcpy(&row, in + at * (sizeof row / sizeof *in), sizeof row);
            else
                row = embed(stage, s->token_ids[k], s->position + k);
            row = compute_row(stage, s, s->position + k, row);
            if (out)
                memcpy(out + at * (sizeof row / sizeof *out), &row, sizeof row);
        }
        if (logits && s->logits != STAGE_LOGITS_NONE)
            *logits++ = mix(row.a, row.b);
    }
    return ERR_OK;
}

enum err hash_stage_copy_block(struct hash_stage *stage, uint32_t from, uint32_t to)
{
    if (from >= stage->n_blocks || to >= stage->n_blocks)
        return ERR_INVALID;
    for (size_t layer = 0; layer < stage->options.n_layers; layer++) {
        uint64_t *kv = stage->kv + layer * stage->n_blocks * STAGE_BLOCK;
        memmove(kv + (size_t)to * STAGE_BLOCK, kv + (size_t)from * STAGE_BLOCK,
                STAGE_BLOCK * sizeof *kv);
    }
    return ERR_OK;
}

void hash_stage_spoil(struct hash_stage *stage, const struct stage_segment *segments,
                      uint32_t n_segments)
{
    for (uint32_t i = 0; i < n_segments; i++) {
        const struct stage_segment *s = &segments[i];
        if (!segment_ok(stage, s))
            continue;
        for (uint32_t k = 0; k < s->n_rows; k++)
            (void)compute_row(stage, s, s->position + k, (struct row){666, k});
    }
}

int32_t hash_stage_sample(uint64_t logits, const struct frame_sampler *sampler, uint32_t position,
                          const int32_t *history, uint32_t n_history)
{
    uint64_t h = mix(mix(logits, sampler->seed), position);
    for (uint32_t i = 0; i < n_history; i++)
        h = mix(h, (uint64_t)(uint32_t)history[i]);
    return (int32_t)(h % HASH_STAGE_VOCABULARY);
}

static bool is_end(const struct frame_sampler *sampler, int32_t id)
{
    if (sampler->flags & FRAME_SAMPLER_IGNORE_END)
        return false;
    for (uint32_t i = 0; i < sampler->n_end_ids; i++) {
        if (sampler->end_ids[i] == id)
            return true;
    }
    return false;
}

uint32_t hash_stage_answer(uint64_t model, uint32_t n_layers_model, uint32_t context,
                           const struct frame_sampler *sampler, int32_t *tokens, uint32_t n_prompt,
                           enum frame_finish *ret_finish)
{
    struct hash_stage *stage = hash_stage_new(&(struct hash_stage_options){
        .model = model, .n_layers = n_layers_model, .context = context});
    uint32_t n = n_prompt, done = 0;
    *ret_finish = FRAME_LENGTH;
    while (n < context && (sampler->max_tokens == 0 || n - n_prompt < sampler->max_tokens)) {
        struct stage_segment s = {.position = done,
                                  .n_rows = n - done,
                                  .token_ids = tokens + done,
                                  .logits = STAGE_LOGITS_LAST};
        uint64_t logits = 0;
        if (hash_stage_forward(stage, &s, 1, NULL, NULL, &logits) != ERR_OK)
            abort();
        done = n;
        tokens[n] = hash_stage_sample(logits, sampler, n, tokens, n);
        n++;
        if (is_end(sampler, tokens[n - 1])) {
            *ret_finish = FRAME_END_TOKEN;
            break;
        }
    }
    hash_stage_free(stage);
    return n;
}
