/* KV cache and attention, driven over KV heads, rows and blocks (arithmetic.h 11).
 *
 * Many rows: a task owns some rows of one segment and one KV head and goes through the blocks; the
 * block's K and V are used by all its query vectors. Few rows: a task owns a run of blocks of one
 * row and one KV head and leaves one partial sum per block, which are combined in order afterwards,
 * so that a single long sequence occupies all threads. */
#include "runtime/kernels/context.h"
#include "runtime/kernels/kv_open.h"

#include <assert.h>
#include <string.h>

enum {
    SPLIT_ROWS = 4,     /* up to this many rows in one call the blocks are shared out */
    ROWS_PER_TASK = 16, /* of one segment otherwise */
    HALF_LARGEST = 0x7bff,
};

static_assert((size_t)2 * KV_BLOCK * HEAD_DIM_MAX * sizeof(float) <= WHOLE_BUFFER,
              "an opened block of one KV head fits the panels");

/* Adding and subtracting it rounds |v| < 2^22 to the nearest whole number, ties to even. */
#define ROUNDER 0x1.8p23f

static size_t element_bytes(const struct kv_layout *l)
{
    return l->precision == KERNELS_F32 ? 4 : 2;
}

size_t kv_block_bytes(const struct kv_layout *l)
{
    if (l->type == KV_Q8_0)
        return l->n_kv_heads * kv_q8_bytes(l->head_dim);
    return (size_t)l->n_kv_heads * l->head_dim * KV_BLOCK * 2 * element_bytes(l);
}

static uint8_t *block_k(const struct kv_layout *l, void *block, uint32_t kv_head)
{
    return (uint8_t *)block + (size_t)kv_head * l->head_dim * KV_BLOCK * 2 * element_bytes(l);
}

static uint8_t *block_v(const struct kv_layout *l, void *block, uint32_t kv_head)
{
    return block_k(l, block, kv_head) + (size_t)l->head_dim * KV_BLOCK * element_bytes(l);
}

/* A run of up to 32 values: d = amax / 127 as F16, and the nearest whole number of d's, ties to
 * even. Returns d's bits. Values that are no numbers become some number. */
static uint16_t round_run(const float *x, uint32_t n, int8_t *q, size_t stride)
{
    float most = 0, inverse = 0;
    for (uint32_t i = 0; i < n; i++) {
        float a = x[i] < 0 ? -x[i] : x[i];
        most = a > most ? a : most;
    }
    uint16_t d = half_round(most / 127.0f);
    d = d > HALF_LARGEST ? HALF_LARGEST : d;
    if (d > 0)
        inverse = 1.0f / half_open(d);
    for (uint32_t i = 0; i < n; i++) {
        float v = x[i] * inverse;
        v = v >= -127.0f ? v : -127.0f;
        v = v <= 127.0f ? v : 127.0f;
        q[i * stride] = (int8_t)((v + ROUNDER) - ROUNDER);
    }
    return d;
}

static void write_row_q8(const struct kv_layout *l, uint8_t *block, uint32_t p, const float *key,
                         const float *value)
{
    uint32_t dim = l->head_dim, runs = kv_runs(dim);
    for (uint32_t h = 0; h < l->n_kv_heads; h++, key += dim, value += dim) {
        uint8_t *head = block + h * kv_q8_bytes(dim);
        int8_t *q = (int8_t *)head;
        uint8_t *scales = head + (size_t)2 * KV_BLOCK * dim;
        for (uint32_t d = 0; d < dim; d += BLOCK) {
            uint32_t n = MIN_OF(dim - d, (uint32_t)BLOCK);
            uint16_t of_k = round_run(
                key + d, n, q + ((size_t)(p / KV_GROUP) * dim + d) * KV_GROUP + p % KV_GROUP,
                KV_GROUP);
            uint16_t of_v = round_run(value + d, n, q + ((size_t)KV_BLOCK + p) * dim + d, 1);
            size_t at = 2 * ((size_t)p * runs + d / BLOCK);
            memcpy(scales + at, &of_k, sizeof of_k);
            memcpy(scales + (size_t)2 * KV_BLOCK * runs + at, &of_v, sizeof of_v);
        }
    }
}

static void write_row(struct kernels *k, const struct kv_layout *l, void *block, uint32_t p,
                      const float *key, const float *value)
{
    uint32_t dim = l->head_dim;
    for (uint32_t h = 0; h < l->n_kv_heads; h++, key += dim, value += dim) {
        size_t k_at = (size_t)(p / KV_GROUP) * dim * KV_GROUP + p % KV_GROUP;
        if (l->precision == KERNELS_F32) {
            float *kk = (float *)(void *)block_k(l, block, h) + k_at;
            for (uint32_t d = 0; d < dim; d++)
                kk[(size_t)d * KV_GROUP] = key[d];
            memcpy(block_v(l, block, h) + (size_t)p * dim * 4, value, (size_t)dim * 4);
            continue;
        }
        uint16_t half[HEAD_DIM_MAX];
        uint16_t *kk = (uint16_t *)(void *)block_k(l, block, h) + k_at;
        k->ops.halves(key, dim, half);
        for (uint32_t d = 0; d < dim; d++)
            kk[(size_t)d * KV_GROUP] = half[d];
        k->ops.halves(value, dim, (uint16_t *)(void *)block_v(l, block, h) + (size_t)p * dim);
    }
}

void kv_write(struct kernels *k, const struct kv_layout *l, const struct kv_segment *segments,
              uint32_t n_segments, const float *keys, size_t ldk, const float *values, size_t ldv)
{
    assert(l->head_dim % 8 == 0 && l->head_dim <= HEAD_DIM_MAX);
    for (uint32_t s = 0; s < n_segments; s++)
        for (uint32_t i = 0; i < segments[s].n_rows; i++, keys += ldk, values += ldv) {
            uint32_t p = segments[s].position + i;
            void *block = segments[s].blocks[p / KV_BLOCK];
            if (l->type == KV_Q8_0)
                write_row_q8(l, block, p % KV_BLOCK, keys, values);
            else
                write_row(k, l, block, p % KV_BLOCK, keys, values);
        }
}

/* ---- attention */

struct attention_run {
    struct kernels *k;
    const struct attention *a;
    uint32_t group;     /* query heads per KV head */
    uint32_t n_blocks;  /* split: of the longest sequence */
    uint32_t sum_pitch; /* floats of one sum in the workspace */
    float *sums;
    uint32_t n_tasks;
};

static size_t sum_floats(uint32_t head_dim)
{
    return (size_t)head_dim + 16; /* m, l, room to keep o aligned to 64 bytes */
}

size_t attention_workspace_bytes(const struct kv_layout *l, uint32_t n_heads, uint32_t n_rows,
                                 uint32_t n_positions)
{
    size_t one = sum_floats(l->head_dim) * 4;
    size_t all = (size_t)n_rows * n_heads;
    size_t split =
        (size_t)MIN_OF(n_rows, (uint32_t)SPLIT_ROWS) * n_heads * (n_positions / KV_BLOCK + 1);
    return MAX_OF(all, split) * one;
}

/* Sum number i of the workspace: m and l in its first two floats. */
static struct attend_sum load_sum(const struct attention_run *r, size_t i)
{
    float *p = r->sums + i * r->sum_pitch;
    return (struct attend_sum){p[0], p[1], p + 16};
}

static void store_sum(const struct attention_run *r, size_t i, const struct attend_sum *s)
{
    float *p = r->sums + i * r->sum_pitch;
    p[0] = s->m;
    p[1] = s->l;
}

/* First position that a row at `position` sees. */
static uint32_t first_visible(const struct attention *a, uint32_t position)
{
    return a->window && position >= a->window ? position - a->window + 1 : 0;
}

static void attend(const struct attention_run *r, const struct attend_block *b)
{
    if (r->a->layout->precision == KERNELS_F32 || r->a->layout->type == KV_Q8_0)
        r->k->ops.attend_f32(b);
    else
        r->k->ops.attend_f16(b);
}

/* A group of query vectors being gathered for one block. */
struct gather {
    struct attend_block b;
    struct attend_sum sums[ATTEND_ROWS];
    size_t at[ATTEND_ROWS];
};

static void flush(const struct attention_run *r, struct gather *g)
{
    if (g->b.n_q == 0)
        return;
    attend(r, &g->b);
    for (uint32_t i = 0; i < g->b.n_q; i++)
        store_sum(r, g->at[i], &g->sums[i]);
    g->b.n_q = 0;
}

/* Adds the heads of one row that share the KV head; `sum` is the number of its first head's sum. */
static void gather_row(const struct attention_run *r, struct gather *g, uint32_t kv_head,
                       uint32_t row, uint32_t position, uint32_t block, size_t sum, bool fresh)
{
    const struct attention *a = r->a;
    uint32_t dim = a->layout->head_dim, from = block * KV_BLOCK, low = first_visible(a, position);
    uint32_t end = MIN_OF(position + 1, from + KV_BLOCK);
    low = MAX_OF(low, from);
    for (uint32_t i = 0; i < r->group; i++) {
        uint32_t n = g->b.n_q++, head = kv_head * r->group + i;
        g->b.q[n] = a->q + row * a->ldq + (size_t)head * dim;
        g->b.low[n] = low - from;
        g->b.high[n] = end - from;
        g->b.fresh[n] = fresh;
        g->at[n] = sum + i;
        g->sums[n] = load_sum(r, g->at[n]);
        g->b.sum[n] = &g->sums[n];
        if (g->b.n_q == ATTEND_ROWS)
            flush(r, g);
    }
}

/* Of a block whose positions low <= p < high are wanted; `thread` has the opened ones. */
static struct gather gather_of(const struct attention_run *r, uint32_t thread, void *block,
                               uint32_t kv_head, uint32_t low, uint32_t high)
{
    const struct attention *a = r->a;
    const struct kv_layout *l = a->layout;
    struct gather g = {.b = {.head_dim = l->head_dim, .scale = a->scale}};
    if (l->type != KV_Q8_0) {
        g.b.k = block_k(l, block, kv_head);
        g.b.v = block_v(l, block, kv_head);
        return g;
    }
    float *k = (float *)(void *)kernels_scratch(r->k, thread).panels;
    float *v = k + (size_t)KV_BLOCK * l->head_dim;
    r->k->ops.kv_open((const uint8_t *)block + kv_head * kv_q8_bytes(l->head_dim), l->head_dim, low,
                      high, k, v);
    g.b.k = k;
    g.b.v = v;
    return g;
}

static void finish(const struct attention_run *r, uint32_t row, uint32_t head,
                   const struct attend_sum *s)
{
    uint32_t dim = r->a->layout->head_dim;
    float *y = r->a->out + row * r->a->ldo + (size_t)head * dim;
    for (uint32_t d = 0; d < dim; d++)
        y[d] = s->o[d] / s->l;
}

/* Rows [first, first + n) of a segment (row numbers of the call begin at `row`), one KV head. */
static void attend_rows(const struct attention_run *r, const struct kv_segment *s, uint32_t row,
                        uint32_t first, uint32_t n, uint32_t kv_head, uint32_t thread)
{
    const struct attention *a = r->a;
    uint32_t position = s->position + first, last = position + n - 1;
    for (uint32_t b = first_visible(a, position) / KV_BLOCK; b <= last / KV_BLOCK; b++) {
        uint32_t from = b * KV_BLOCK, low = first_visible(a, position);
        struct gather g = gather_of(r, thread, s->blocks[b], kv_head, low > from ? low - from : 0,
                                    MIN_OF(last + 1 - from, (uint32_t)KV_BLOCK));
        for (uint32_t i = 0; i < n; i++) {
            uint32_t p = position + i, begins = first_visible(a, p) / KV_BLOCK;
            if (b < begins || b > p / KV_BLOCK)
                continue;
            size_t sum = (size_t)(row + first + i) * a->n_heads + (size_t)kv_head * r->group;
            gather_row(r, &g, kv_head, row + first + i, p, b, sum, b == begins);
        }
        flush(r, &g);
    }
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t h = 0; h < r->group; h++) {
            uint32_t head = kv_head * r->group + h;
            struct attend_sum sum = load_sum(r, (size_t)(row + first + i) * a->n_heads + head);
            finish(r, row + first + i, head, &sum);
        }
}

/* Task number -> KV head and run of rows. */
static void rows_task(void *arg, uint32_t task, uint32_t thread)
{
    const struct attention_run *r = arg;
    const struct attention *a = r->a;
    uint32_t kv_head = task % a->layout->n_kv_heads, piece = task / a->layout->n_kv_heads, row = 0;
    for (uint32_t s = 0; s < a->n_segments; s++) {
        const struct kv_segment *seg = &a->segments[s];
        uint32_t pieces = (seg->n_rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK;
        if (piece < pieces) {
            /* the last rows see most: they go first, so that threads end together */
            uint32_t first = (pieces - 1 - piece) * ROWS_PER_TASK;
            attend_rows(r, seg, row, first, MIN_OF((uint32_t)ROWS_PER_TASK, seg->n_rows - first),
                        kv_head, thread);
            return;
        }
        piece -= pieces;
        row += seg->n_rows;
    }
}

static void run_by_rows(struct attention_run *r)
{
    uint32_t pieces = 0;
    for (uint32_t s = 0; s < r->a->n_segments; s++)
        pieces += (r->a->segments[s].n_rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK;
    pool_run(r->k->pool, rows_task, r, pieces * r->a->layout->n_kv_heads);
}

/* Which segment and position row `row` of the call has. */
static const struct kv_segment *segment_of(const struct attention *a, uint32_t row,
                                           uint32_t *ret_position)
{
    const struct kv_segment *s = a->segments;
    for (; row >= s->n_rows; s++)
        row -= s->n_rows;
    *ret_position = s->position + row;
    return s;
}

static size_t split_sum(const struct attention_run *r, uint32_t row, uint32_t head, uint32_t block)
{
    return ((size_t)row * r->n_blocks + block) * r->a->n_heads + head;
}

static void split_task(void *arg, uint32_t task, uint32_t thread)
{
    const struct attention_run *r = arg;
    const struct attention *a = r->a;
    uint32_t n_kv = a->layout->n_kv_heads, kv_head = task % n_kv;
    uint32_t per_row = r->n_tasks, row = task / n_kv / per_row, part = task / n_kv % per_row;
    uint32_t position;
    const struct kv_segment *s = segment_of(a, row, &position);
    uint32_t begins = first_visible(a, position) / KV_BLOCK;
    uint32_t n = position / KV_BLOCK - begins + 1, end = begins + task_first(n, per_row, part + 1);
    for (uint32_t b = begins + task_first(n, per_row, part); b < end; b++) {
        uint32_t from = b * KV_BLOCK, low = first_visible(a, position);
        struct gather g = gather_of(r, thread, s->blocks[b], kv_head, low > from ? low - from : 0,
                                    MIN_OF(position + 1 - from, (uint32_t)KV_BLOCK));
        gather_row(r, &g, kv_head, row, position, b, split_sum(r, row, kv_head * r->group, b),
                   true);
        flush(r, &g);
    }
}

static void run_split(struct attention_run *r, uint32_t n_rows)
{
    const struct attention *a = r->a;
    uint32_t threads = pool_threads(r->k->pool), n_kv = a->layout->n_kv_heads;
    for (uint32_t row = 0; row < n_rows; row++) {
        uint32_t position;
        (void)segment_of(a, row, &position);
        r->n_blocks = MAX_OF(r->n_blocks, position / KV_BLOCK + 1);
    }
    uint32_t parts = threads == 1 ? 1 : (4 * threads + n_kv * n_rows - 1) / (n_kv * n_rows);
    r->n_tasks = MAX_OF(1u, MIN_OF(parts, r->n_blocks));
    pool_run(r->k->pool, split_task, r, r->n_tasks * n_kv * n_rows);
    for (uint32_t row = 0; row < n_rows; row++)
        for (uint32_t head = 0; head < a->n_heads; head++) {
            uint32_t position;
            (void)segment_of(a, row, &position);
            uint32_t b = first_visible(a, position) / KV_BLOCK;
            struct attend_sum sum = load_sum(r, split_sum(r, row, head, b));
            while (++b <= position / KV_BLOCK) {
                struct attend_sum next = load_sum(r, split_sum(r, row, head, b));
                r->k->ops.attend_combine(&sum, &next, a->layout->head_dim);
            }
            finish(r, row, head, &sum);
        }
}

void attention(struct kernels *k, const struct attention *a)
{
    const struct kv_layout *l = a->layout;
    assert(l->head_dim % 8 == 0 && l->head_dim <= HEAD_DIM_MAX && l->n_kv_heads > 0 &&
           a->n_heads % l->n_kv_heads == 0);
    struct attention_run r = {.k = k, .a = a, .group = a->n_heads / l->n_kv_heads};
    r.sum_pitch = (uint32_t)sum_floats(l->head_dim);
    r.sums = a->workspace;
    uint32_t n_rows = 0;
    for (uint32_t s = 0; s < a->n_segments; s++)
        n_rows += a->segments[s].n_rows;
    assert(n_rows > 0);
    if (n_rows <= SPLIT_ROWS)
        run_split(&r, n_rows);
    else
        run_by_rows(&r);
}
