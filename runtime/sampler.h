/* Choosing the next token from logits.
 *
 * Everything is a function of (logits, parameters, history, position): no state is kept, so any
 * node can take over at any token (PROTOCOL 4). Randomness is Philox4x32-10 (Salmon, Moraes, Dror,
 * Shaw: Parallel Random Numbers: As Easy as 1, 2, 3; SC 2011) keyed by the seed and counted by the
 * position. Exponentials and logarithms are ours (vmath.h), sums are binary64 in order of token
 * ids: the same choice on every CPU.
 *
 * Order:
 *   1. NaN counts as -infinity, +infinity as the largest finite number.
 *   2. Log-probabilities, when wanted, are those of the model: of these logits, before all below.
 *   3. Logit bias is added. A token of the history: its logit is divided by `repetition_penalty`
 *      when above 0, else multiplied; then `frequency_penalty` times its count and
 *      `presence_penalty` are subtracted.
 *   4. Temperature 0: the largest logit, the lowest id of equals. The end.
 *   5. Logits are divided by the temperature; p = exp(logit - largest).
 *   6. top-k: the k likeliest stay (of equals, lower ids first).
 *   7. top-p: of those, the fewest likeliest whose sum reaches top_p of their sum.
 *   8. min-p: of those, the ones with p >= min_p (the likeliest has p = 1).
 *   9. Typical (Meister, Pimentel, Wiher, Cotterell: Locally Typical Sampling; TACL 2023): of
 * those, the fewest whose sum reaches typical_p of their sum, beginning with those whose surprise
 * -log p is nearest to their entropy (of equals, lower ids first).
 *  10. One of them is drawn, in proportion to p, walking by increasing id. */
#ifndef COVEY_RUNTIME_SAMPLER_H
#define COVEY_RUNTIME_SAMPLER_H

#include "base/err.h"

#include <stdbool.h>
#include <stdint.h>

struct sampler;

enum { SAMPLER_TOP_MAX = 20, SAMPLER_BIASES_MAX = 1024 };

struct sampler_bias {
    int32_t id;
    float bias; /* -infinity bans a token */
};

struct sampler_params {
    float temperature; /* 0: greedy */
    float top_p;       /* (0, 1]; 1: off */
    float min_p;       /* [0, 1]; 0: off */
    float typical_p;   /* (0, 1]; 1: off */
    uint32_t top_k;    /* 0: off */
    uint64_t seed;
    float repetition_penalty; /* above 0; 1: off */
    float frequency_penalty, presence_penalty;
    const struct sampler_bias *biases; /* borrowed; ids outside the vocabulary are refused */
    uint32_t n_biases;
    bool want_logprob; /* of the chosen token and of the n_top likeliest */
    uint32_t n_top;    /* at most SAMPLER_TOP_MAX */
};

#define SAMPLER_PARAMS_INIT                                                                        \
    ((struct sampler_params){                                                                      \
        .temperature = 1.0f, .top_p = 1.0f, .typical_p = 1.0f, .repetition_penalty = 1.0f})

struct sampler_logprob {
    int32_t id;
    float logprob; /* natural */
};

struct sampler_choice {
    int32_t id;
    float logprob; /* 0 unless wanted */
    uint32_t n_top;
    struct sampler_logprob top[SAMPLER_TOP_MAX]; /* decreasing, of equals lower ids first */
};

/* Working memory for a vocabulary; nothing is allocated later. */
enum err sampler_new(uint32_t n_vocab, struct sampler **ret);
void sampler_free(struct sampler *sampler);

/* ERR_INVALID with a sentence when a parameter is out of range (NaN too). */
enum err sampler_check(const struct sampler_params *params, uint32_t n_vocab,
                       struct err_text *text);

/* Chooses the token for `position` (of the token to come, counted from the start of the sequence).
 * logits [n_vocab] are left as they are. history: the ids that penalties look at, may be NULL; ids
 * outside the vocabulary are ignored. The parameters must have passed sampler_check. */
void sampler_choose(struct sampler *sampler, const struct sampler_params *params,
                    const float *logits, uint64_t position, const int32_t *history,
                    uint32_t n_history, struct sampler_choice *ret);

/* One block of the generator. */
void philox4x32_10(const uint32_t counter[4], const uint32_t key[2], uint32_t ret[4]);
/* Uniform in [0, 1), 53 bits, of (seed, position). */
double sampler_uniform(uint64_t seed, uint64_t position);

#endif
