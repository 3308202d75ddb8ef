#include "runtime/sampler.h"

#include "base/util.h"
#include "runtime/vmath.h"

#include <float.h>
#include <math.h>
#include <string.h>

struct sampler {
    uint32_t n_vocab;
    float *logits;    /* [n_vocab] after bias and penalties */
    float *p;         /* [n_vocab] exp of them */
    uint32_t *heap;   /* [n_vocab] ids, the likeliest on top */
    uint32_t *counts; /* [n_vocab] in the history; all 0 between calls */
};

void philox4x32_10(const uint32_t counter[4], const uint32_t key[2], uint32_t ret[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * c0, b = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(b >> 32) ^ c1 ^ k0, n2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)b;
        c3 = (uint32_t)a;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    ret[0] = c0;
    ret[1] = c1;
    ret[2] = c2;
    ret[3] = c3;
}

double sampler_uniform(uint64_t seed, uint64_t position)
{
    const uint32_t counter[4] = {(uint32_t)position, (uint32_t)(position >> 32), 0, 0};
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t r[4];
    philox4x32_10(counter, key, r);
    return (double)(((uint64_t)r[0] << 32 | r[1]) >> 11) * 0x1p-53;
}

enum err sampler_new(uint32_t n_vocab, struct sampler **ret)
{
    if (n_vocab < 1 || n_vocab > INT32_MAX / 4)
        return ERR_INVALID;
    struct sampler *s = calloc(1, sizeof *s);
    if (!s)
        return ERR_NO_MEMORY;
    s->n_vocab = n_vocab;
    s->logits = malloc(n_vocab * sizeof *s->logits);
    s->p = malloc(n_vocab * sizeof *s->p);
    s->heap = malloc(n_vocab * sizeof *s->heap);
    s->counts = calloc(n_vocab, sizeof *s->counts);
    if (!s->logits || !s->p || !s->heap || !s->counts) {
        sampler_free(s);
        return ERR_NO_MEMORY;
    }
    *ret = s;
    return ERR_OK;
}

void sampler_free(struct sampler *sampler)
{
    if (!sampler)
        return;
    free(sampler->logits);
    free(sampler->p);
    free(sampler->heap);
    free(sampler->counts);
    free(sampler);
}

enum err sampler_check(const struct sampler_params *params, uint32_t n_vocab, struct err_text *text)
{
    /* Written so that NaN fails. */
    if (!(params->temperature >= 0.0f) || !isfinite(params->temperature))
        return err_set(text, ERR_INVALID, "temperature must be a number from 0 on");
    if (!(params->top_p > 0.0f) || !(params->top_p <= 1.0f))
        return err_set(text, ERR_INVALID, "top_p must be above 0 and at most 1");
    if (!(params->min_p >= 0.0f) || !(params->min_p <= 1.0f))
        return err_set(text, ERR_INVALID, "min_p must be from 0 to 1");
    if (!(params->typical_p > 0.0f) || !(params->typical_p <= 1.0f))
        return err_set(text, ERR_INVALID, "typical_p must be above 0 and at most 1");
    if (!(params->repetition_penalty > 0.0f) || !isfinite(params->repetition_penalty))
        return err_set(text, ERR_INVALID, "repetition_penalty must be above 0");
    if (!isfinite(params->frequency_penalty) || !isfinite(params->presence_penalty))
        return err_set(text, ERR_INVALID, "penalties must be finite numbers");
    if (params->n_top > SAMPLER_TOP_MAX)
        return err_set(text, ERR_INVALID, "at most %d log-probabilities can be asked for",
                       SAMPLER_TOP_MAX);
    if (params->n_biases > SAMPLER_BIASES_MAX)
        return err_set(text, ERR_INVALID, "at most %d logit biases can be given",
                       SAMPLER_BIASES_MAX);
    for (uint32_t i = 0; i < params->n_biases; i++) {
        if (params->biases[i].id < 0 || (uint32_t)params->biases[i].id >= n_vocab)
            return err_set(text, ERR_INVALID, "logit bias for the token %d, which does not exist",
                           params->biases[i].id);
        if (isnan(params->biases[i].bias))
            return err_set(text, ERR_INVALID, "the logit bias of token %d is not a number",
                           params->biases[i].id);
    }
    return ERR_OK;
}

static float tame(float logit)
{
    return isnan(logit) ? -INFINITY : logit > FLT_MAX ? FLT_MAX : logit;
}

/* The id of the largest logit, the lowest of equals. */
static uint32_t largest(const float *logits, uint32_t n)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; i++)
        if (logits[i] > logits[best])
            best = i;
    return best;
}

static bool likelier(const float *logits, uint32_t a, uint32_t b)
{
    return logits[a] > logits[b] || (logits[a] >= logits[b] && a < b);
}

/* Difference that never is infinity minus infinity; 0 for the largest itself. */
static float below(float logit, float most)
{
    return logit < most ? logit - most : 0.0f;
}

static void note_top(const float *logits, uint32_t id, uint32_t n_top, struct sampler_choice *c)
{
    if (n_top == 0 || (c->n_top == n_top && !likelier(logits, id, (uint32_t)c->top[n_top - 1].id)))
        return;
    uint32_t at = c->n_top < n_top ? c->n_top++ : n_top - 1;
    while (at > 0 && likelier(logits, id, (uint32_t)c->top[at - 1].id)) {
        c->top[at] = c->top[at - 1];
        at--;
    }
    c->top[at].id = (int32_t)id;
}

/* log(sum exp(logits - most)), and the likeliest. */
static double measure(const float *logits, uint32_t n, float most, uint32_t n_top,
                      struct sampler_choice *c)
{
    double sum = 0.0;
    for (uint32_t i = 0; i < n; i++) {
        sum += (double)vm_expf(below(logits[i], most));
        note_top(logits, i, n_top, c);
    }
    return vm_log(sum);
}

static void add_biases(struct sampler *s, const struct sampler_params *params)
{
    for (uint32_t i = 0; i < params->n_biases; i++) {
        float *logit = &s->logits[params->biases[i].id];
        *logit = tame(*logit + params->biases[i].bias);
    }
}

static void punish(struct sampler *s, const struct sampler_params *params, const int32_t *history,
                   uint32_t n_history)
{
    for (uint32_t i = 0; i < n_history; i++)
        if (history[i] >= 0 && (uint32_t)history[i] < s->n_vocab)
            s->counts[history[i]]++;
    for (uint32_t i = 0; i < n_history; i++) {
        if (history[i] < 0 || (uint32_t)history[i] >= s->n_vocab || s->counts[history[i]] == 0)
            continue;
        float *logit = &s->logits[history[i]];
        float n = (float)s->counts[history[i]];
        s->counts[history[i]] = 0; /* once for each token */
        *logit = *logit > 0.0f ? *logit / params->repetition_penalty
                               : *logit * params->repetition_penalty;
        *logit = tame(*logit - params->frequency_penalty * n - params->presence_penalty);
    }
}

static void sift(struct sampler *s, uint32_t at, uint32_t n)
{
    uint32_t id = s->heap[at];
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= n)
            break;
        if (child + 1 < n && likelier(s->logits, s->heap[child + 1], s->heap[child]))
            child++;
        if (!likelier(s->logits, s->heap[child], id))
            break;
        s->heap[at] = s->heap[child];
        at = child;
    }
    s->heap[at] = id;
}

static double total(const struct sampler *s)
{
    double sum = 0.0;
    for (uint32_t i = 0; i < s->n_vocab; i++)
        sum += (double)s->p[i];
    return sum;
}

/* The least likely token that top-k and top-p let stay. What is popped from the heap gathers at its
 * end, the likeliest last. */
static uint32_t last_kept(struct sampler *s, const struct sampler_params *params)
{
    uint32_t n = s->n_vocab, k = params->top_k;
    for (uint32_t i = 0; i < n; i++)
        s->heap[i] = i;
    for (uint32_t i = n / 2; i > 0; i--)
        sift(s, i - 1, n);
    bool by_k = k > 0 && k < n;
    double whole = by_k ? 0.0 : total(s), sum = 0.0;
    uint32_t left = n;
    while (left > 0) {
        uint32_t id = s->heap[0];
        s->heap[0] = s->heap[--left];
        s->heap[left] = id;
        if (left > 0)
            sift(s, 0, left);
        sum += (double)s->p[id];
        if (by_k ? n - left == k : sum >= (double)params->top_p * whole)
            break;
    }
    if (!by_k || params->top_p >= 1.0f)
        return s->heap[left];
    double wanted = (double)params->top_p * sum;
    sum = 0.0;
    for (uint32_t i = n; i > left; i--) {
        sum += (double)s->p[s->heap[i - 1]];
        if (sum >= wanted)
            return s->heap[i - 1];
    }
    return s->heap[left];
}

/* p of the tokens that are not typical becomes 0. The logits are used up: they become how far each
 * surprise is from the entropy, with the sign turned so that the nearest counts as the likeliest.
 */
static void keep_typical(struct sampler *s, float typical_p)
{
    double whole = total(s), entropy = 0.0, sum = 0.0;
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->n_vocab; i++) {
        if (!(s->p[i] > 0.0f))
            continue;
        double share = (double)s->p[i] / whole, surprise = -vm_log(share);
        entropy += share * surprise;
        s->logits[i] = (float)surprise;
        s->heap[n++] = i;
    }
    for (uint32_t i = 0; i < n; i++)
        s->logits[s->heap[i]] = -(float)fabs((double)s->logits[s->heap[i]] - entropy);
    for (uint32_t i = n / 2; i > 0; i--)
        sift(s, i - 1, n);
    while (n > 0 && sum < (double)typical_p * whole) {
        sum += (double)s->p[s->heap[0]];
        s->heap[0] = s->heap[--n];
        if (n > 0)
            sift(s, 0, n);
    }
    for (uint32_t i = 0; i < n; i++)
        s->p[s->heap[i]] = 0.0f;
}

static uint32_t draw(struct sampler *s, const struct sampler_params *params, uint32_t best,
                     double uniform)
{
    uint32_t n = s->n_vocab;
    float most = s->logits[best];
    for (uint32_t i = 0; i < n; i++)
        s->p[i] = vm_expf(below(s->logits[i], most) / params->temperature);
    if (params->top_p < 1.0f || (params->top_k > 0 && params->top_k < n)) {
        uint32_t last = last_kept(s, params);
        for (uint32_t i = 0; i < n; i++)
            if (i != last && !likelier(s->logits, i, last))
                s->p[i] = 0.0f;
    }
    for (uint32_t i = 0; params->min_p > 0.0f && i < n; i++)
        if (!(s->p[i] >= params->min_p))
            s->p[i] = 0.0f;
    if (params->typical_p < 1.0f)
        keep_typical(s, params->typical_p);
    double wanted = uniform * total(s), sum = 0.0;
    for (uint32_t i = 0; i < n; i++) {
        sum += (double)s->p[i];
        if (s->p[i] > 0.0f && sum > wanted)
            return i;
    }
    return best; /* rounding left nothing: cannot be reached with uniform < 1 but for underflow */
}

void sampler_choose(struct sampler *sampler, const struct sampler_params *params,
                    const float *logits, uint64_t position, const int32_t *history,
                    uint32_t n_history, struct sampler_choice *ret)
{
    struct sampler *s = sampler;
    uint32_t n = s->n_vocab;
    *ret = (struct sampler_choice){0};
    for (uint32_t i = 0; i < n; i++)
        s->logits[i] = tame(logits[i]);
    float most = s->logits[largest(s->logits, n)];
    double lse = 0.0;
    if (params->want_logprob) {
        lse = measure(s->logits, n, most, params->n_top, ret);
        for (uint32_t i = 0; i < ret->n_top; i++)
            ret->top[i].logprob = (float)((double)below(s->logits[ret->top[i].id], most) - lse);
    }
    add_biases(s, params);
    if (history)
        punish(s, params, history, n_history);
    uint32_t best = largest(s->logits, n);
    uint32_t id = best;
    if (params->temperature > 0.0f)
        id = draw(s, params, best, sampler_uniform(params->seed, position));
    ret->id = (int32_t)id;
    if (params->want_logprob)
        ret->logprob = (float)((double)below(tame(logits[id]), most) - lse);
}
