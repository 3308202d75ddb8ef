/* Products: preparing activations and driving the tables' functions over outputs, slices and
 * threads.
 *
 * Few rows (up to FEW_ROWS, or ops.few_rows): weights straight from the file, 8 outputs at a time
 * whose rows lie far apart, so that each is one long sequential stream. More rows: panels of 8 or
 * 16 outputs are packed into the thread's buffer and used for all rows. Tasks own whole outputs,
 * never parts of a chain. */
#include "runtime/kernels/context.h"

#include <assert.h>
#include <string.h>

/* Kernels may read on a little behind the last tile. */
enum { PACKED_SLACK = 256 };

/* ---- activations */

static bool is_dense(enum tensor_type type)
{
    return type == TENSOR_F32 || type == TENSOR_F16 || type == TENSOR_BF16;
}

unsigned activations_form(enum tensor_type type, enum kernels_precision precision)
{
    return is_dense(type) || precision == KERNELS_F32 ? ACTIVATIONS_DENSE : ACTIVATIONS_QUANTISED;
}

static size_t round_64(size_t n)
{
    return (n + 63) & ~(size_t)63;
}

size_t activations_bytes(uint32_t n_rows, uint32_t n_in)
{
    size_t quantised = (size_t)n_rows * ((n_in + BLOCK - 1) / BLOCK) * TILE_ROW_BYTES;
    size_t dense = ((size_t)n_rows + DENSE_ROWS_MAX - 1) * n_in * 4;
    return round_64(quantised) + round_64(dense) + PACKED_SLACK;
}

static uint32_t rows_of_tile(uint32_t n_rows, uint32_t tile, uint32_t height)
{
    uint32_t left = n_rows - tile * height;
    return left < height ? left : height;
}

struct prepare_task {
    struct kernels *k;
    const struct activations *a;
    uint32_t n_tasks;
};

static void prepare_rows(void *arg, uint32_t task, uint32_t thread)
{
    const struct prepare_task *t = arg;
    const struct activations *a = t->a;
    (void)thread;
    uint32_t end = task_first(a->n_rows, t->n_tasks, task + 1);
    for (uint32_t m = task_first(a->n_rows, t->n_tasks, task); m < end; m++) {
        const float *x = a->x + m * a->ldx;
        if (a->quantised) {
            uint32_t blocks = a->n_in / BLOCK, height = t->k->ops.tile_rows, i = m / height;
            uint8_t *tile = a->quantised + (size_t)i * height * blocks * TILE_ROW_BYTES;
            t->k->ops.quantise(x, blocks, rows_of_tile(a->n_rows, i, height), m % height, tile);
        }
        if (a->packed) {
            uint32_t rows = t->k->ops.dense_rows;
            float *tile = a->packed + (size_t)(m / rows) * rows * a->n_in + m % rows;
            for (uint32_t k = 0; k < a->n_in; k++)
                tile[(size_t)k * rows] = x[k];
        }
    }
}

void activations_prepare(struct kernels *k, struct activations *a, void *memory, const float *x,
                         size_t ldx, uint32_t n_rows, uint32_t n_in, unsigned forms)
{
    assert(n_rows > 0 && n_in > 0 && n_in <= MATRIX_IN_MAX);
    *a = (struct activations){n_rows, n_in, forms, ldx, x, NULL, NULL};
    uint8_t *p = memory;
    if (forms & ACTIVATIONS_QUANTISED) {
        assert(n_in % BLOCK == 0);
        a->quantised = p;
    }
    p += round_64((size_t)n_rows * ((n_in + BLOCK - 1) / BLOCK) * TILE_ROW_BYTES);
    if (forms & ACTIVATIONS_DENSE && n_rows > FEW_ROWS) {
        a->packed = (float *)(void *)p;
        uint32_t rows = k->ops.dense_rows;
        if (n_rows % rows != 0)
            memset(a->packed + (size_t)(n_rows / rows) * rows * n_in, 0, (size_t)rows * n_in * 4);
    }
    if (!a->quantised && !a->packed)
        return;
    struct prepare_task t = {k, a, kernels_tasks(k, n_rows, (uint64_t)n_in * 16)};
    pool_run(k->pool, prepare_rows, &t, t.n_tasks);
}

/* ---- one product */

struct product {
    struct kernels *k;
    const struct matrix *w;
    const struct activations *a;
    float *y;
    size_t ldy;
    uint32_t slice;                       /* elements; n_in when there are none */
    bool dense;                           /* dense chain: F32, F16, BF16, or opened to F32 */
    bool opened;                          /* quantised weights in precision f32 */
    bool whole;                           /* by another library's kernel, whole chains at a time */
    uint32_t outs;                        /* of a panel */
    uint32_t height;                      /* rows of a tile */
    uint32_t block_elements, block_bytes; /* of the weights' type */

    uint32_t groups;      /* few rows: far groups of `width` outputs, `groups` rows apart */
    uint32_t near_groups; /* and groups of 8 neighbours after them */
    uint32_t width;       /* PANEL_OUTS or WIDE_OUTS */
    uint32_t panels_per_task;
    uint32_t n_tasks;
};

static enum dense_type dense_type(const struct product *p)
{
    enum tensor_type type = p->w->type;
    return p->opened || type == TENSOR_F32 ? DENSE_F32
           : type == TENSOR_F16            ? DENSE_F16
                                           : DENSE_BF16;
}

static const uint8_t *weights_at(const struct product *p, uint32_t out, uint32_t first)
{
    return (const uint8_t *)p->w->data + out * p->w->row_bytes +
           (size_t)(first / p->block_elements) * p->block_bytes;
}

static void add_buffer(float *to, const float *from, size_t n)
{
    for (size_t i = 0; i < n; i++)
        to[i] = to[i] + from[i];
}

/* The aligned binary tree over slices as a stack of buffers of `n` floats (arithmetic.h 1). */
struct slice_tree {
    float *stack;
    size_t n;
    uint32_t top;
};

static float *tree_next(struct slice_tree *t)
{
    assert(t->top < SLICE_LEVELS);
    return t->stack + t->top * t->n;
}

static void tree_pushed(struct slice_tree *t, uint32_t slice)
{
    for (; slice & 1; slice >>= 1, t->top--)
        add_buffer(t->stack + (t->top - 1) * t->n, t->stack + t->top * t->n, t->n);
    t->top++;
}

static void tree_end(struct slice_tree *t)
{
    for (; t->top > 1; t->top--)
        add_buffer(t->stack + (t->top - 2) * t->n, t->stack + (t->top - 1) * t->n, t->n);
}

/* ---- few rows */

/* Outputs `distance` rows apart over columns [first, first + n), WIDE_OUTS of them. */
static void wide_slice(const struct product *p, uint32_t out, uint32_t distance, uint32_t first,
                       uint32_t n, float *ret)
{
    const struct kernel_ops *ops = &p->k->ops;
    const struct activations *a = p->a;
    const uint8_t *w = weights_at(p, out, first);
    size_t stride = distance * p->w->row_bytes;
    float(*sums)[WIDE_OUTS] = (float(*)[WIDE_OUTS])(void *)ret;
    if (p->dense)
        ops->wide_dense_few[dense_type(p)](w, stride, n, a->x + first, a->ldx, a->n_rows, sums);
    else
        ops->wide_few[p->w->type](
            w, stride, n / BLOCK,
            a->quantised + (size_t)(first / BLOCK) * a->n_rows * TILE_ROW_BYTES, a->n_rows, sums);
}

/* The same for 8 outputs. */
static void few_slice(const struct product *p, struct scratch s, uint32_t out, uint32_t distance,
                      uint32_t first, uint32_t n, float (*ret)[PANEL_OUTS])
{
    const struct kernel_ops *ops = &p->k->ops;
    const struct activations *a = p->a;
    const uint8_t *w = weights_at(p, out, first);
    size_t stride = distance * p->w->row_bytes;
    if (!p->dense) {
        ops->few[p->w->type](w, stride, n / BLOCK,
                             a->quantised + (size_t)(first / BLOCK) * a->n_rows * TILE_ROW_BYTES,
                             a->n_rows, ret);
        return;
    }
    if (!p->opened) {
        for (uint32_t r = 0; r < a->n_rows; r += FEW_ROWS)
            ops->dense_few[dense_type(p)](w, stride, n, a->x + r * a->ldx + first, a->ldx,
                                          MIN_OF(a->n_rows - r, (uint32_t)FEW_ROWS), ret + r,
                                          false);
        return;
    }
    float *rows = (float *)(void *)s.rows;
    for (uint32_t k = 0; k < n; k += CHUNK_MAX) {
        uint32_t len = MIN_OF(n - k, (uint32_t)CHUNK_MAX);
        if (ops->open_panel[p->w->type]) {
            float *panel = (float *)(void *)s.panels;
            ops->open_panel[p->w->type](weights_at(p, out, first + k), stride, len / BLOCK, panel,
                                        PANEL_OUTS);
            ops->opened_few(panel, len, a->x + first + k, a->ldx, a->n_rows, ret, k > 0);
            continue;
        }
        for (uint32_t i = 0; i < PANEL_OUTS; i++)
            ops->open(p->w->type, weights_at(p, out + i * distance, 0), first + k, len,
                      rows + i * CHUNK_MAX);
        ops->dense_few[DENSE_F32](s.rows, CHUNK_MAX * 4, len, a->x + first + k, a->ldx, a->n_rows,
                                  ret, k > 0);
    }
}

/* The first `keep` of `width` outputs. */
static void few_group(const struct product *p, struct scratch s, uint32_t out, uint32_t distance,
                      uint32_t width, uint32_t keep)
{
    float sums[SLICE_LEVELS * FEW_ROWS_MAX * WIDE_OUTS]; /* [level][row][width] */
    struct slice_tree tree = {sums, (size_t)p->a->n_rows * width, 0};
    uint32_t n_in = p->w->n_in;
    memset(sums, 0, tree.n * sizeof(float));
    for (uint32_t i = 0; i * p->slice < n_in; i++) {
        uint32_t first = i * p->slice, n = MIN_OF(p->slice, n_in - first);
        float *next = tree_next(&tree);
        if (width == WIDE_OUTS)
            wide_slice(p, out, distance, first, n, next);
        else
            few_slice(p, s, out, distance, first, n, (float(*)[PANEL_OUTS])(void *)next);
        tree_pushed(&tree, i);
    }
    tree_end(&tree);
    for (uint32_t r = 0; r < p->a->n_rows; r++)
        for (uint32_t i = 0; i < keep; i++)
            p->y[r * p->ldy + out + (size_t)i * distance] = sums[r * width + i];
}

static void few_task(void *arg, uint32_t task, uint32_t thread)
{
    const struct product *p = arg;
    struct scratch s = kernels_scratch(p->k, thread);
    uint32_t far_outs = p->groups * p->width, all = p->groups + p->near_groups;
    uint32_t end = task_tapered(all, p->n_tasks, task + 1);
    for (uint32_t g = task_tapered(all, p->n_tasks, task); g < end; g++) {
        if (g < p->groups)
            few_group(p, s, g, p->groups, p->width, p->width);
        else
            few_group(p, s, far_outs + (g - p->groups) * PANEL_OUTS, 1, PANEL_OUTS, PANEL_OUTS);
    }
    if (task + 1 == p->n_tasks) /* the last n_out % 8: the same row in all lanes */
        for (uint32_t out = far_outs + p->near_groups * PANEL_OUTS; out < p->w->n_out; out++)
            few_group(p, s, out, 0, PANEL_OUTS, 1);
}

static void run_few(struct product *p)
{
    bool wide = p->dense ? !p->opened && p->k->ops.wide_dense_few[dense_type(p)]
                         : p->k->ops.wide_few[p->w->type] != NULL;
    p->width = wide ? WIDE_OUTS : PANEL_OUTS;
    p->groups = p->w->n_out / p->width;
    /* streams a multiple of 4 KiB apart would share one set of the first-level cache */
    if (p->groups > 1 && p->groups * p->w->row_bytes % 4096 == 0)
        p->groups--;
    p->near_groups = (p->w->n_out - p->groups * p->width) / PANEL_OUTS;
    p->n_tasks = kernels_tapered_tasks(p->k, p->groups + p->near_groups,
                                       (uint64_t)p->w->n_in * p->width * p->a->n_rows);
    pool_run(p->k->pool, few_task, p, p->n_tasks);
}

/* ---- many rows */

/* Columns that one panel buffer and one rows buffer hold at a time. */
static uint32_t chunk_elements(const struct product *p, bool partial)
{
    if (p->whole)
        return p->slice;
    if (p->dense || partial)
        return CHUNK_MAX;
    uint32_t block = panel_block_bytes(panel_kind(p->w->type)) * p->outs / PANEL_OUTS;
    uint32_t n = PANEL_BUFFER / block * BLOCK;
    return n / 256 * 256;
}

static size_t panel_bytes(const struct product *p, uint32_t n)
{
    if (p->dense)
        return (size_t)n * p->outs * 4;
    return (size_t)(n / BLOCK) * panel_block_bytes(panel_kind(p->w->type)) * p->outs / PANEL_OUTS;
}

/* Where `want` rows from output `out` on lie, columns [first, first + n), n <= CHUNK_MAX when
 * they have to be opened or are not all there: those beyond the matrix count as 0. */
static const uint8_t *rows_at(const struct product *p, struct scratch s, uint32_t out,
                              uint32_t want, uint32_t first, uint32_t n, size_t *ret_stride)
{
    uint32_t have = out < p->w->n_out ? MIN_OF(want, p->w->n_out - out) : 0;
    size_t stride = p->opened ? (size_t)n * 4 : n / p->block_elements * p->block_bytes;
    if (!p->opened && have == want) {
        *ret_stride = p->w->row_bytes;
        return weights_at(p, out, first);
    }
    memset(s.rows + have * stride, 0, (want - have) * stride);
    for (uint32_t i = 0; i < have; i++) {
        uint8_t *to = s.rows + i * stride;
        if (p->opened)
            p->k->ops.open(p->w->type, weights_at(p, out + i, 0), first, n, (float *)(void *)to);
        else
            memcpy(to, weights_at(p, out + i, first), stride);
    }
    *ret_stride = stride;
    return s.rows;
}

/* Packs outputs [out, out + outs) over columns [first, first + n). */
static void pack_panel(const struct product *p, struct scratch s, uint32_t out, uint32_t first,
                       uint32_t n, uint8_t *panel)
{
    size_t stride;
    if (!p->dense) {
        const uint8_t *w = rows_at(p, s, out, p->outs, first, n, &stride);
        p->k->ops.pack[p->w->type](w, stride, n / BLOCK, panel);
        return;
    }
    for (uint32_t o = 0; o < p->outs; o += PANEL_OUTS)
        for (uint32_t k = 0; k < n; k += CHUNK_MAX) {
            uint32_t len = MIN_OF(n - k, (uint32_t)CHUNK_MAX);
            float *at = (float *)(void *)panel + (size_t)k * p->outs + o;
            if (p->opened && p->k->ops.open_panel[p->w->type] &&
                out + o + PANEL_OUTS <= p->w->n_out) {
                p->k->ops.open_panel[p->w->type](weights_at(p, out + o, first + k), p->w->row_bytes,
                                                 len / BLOCK, at, p->outs);
                continue;
            }
            const uint8_t *w = rows_at(p, s, out + o, PANEL_OUTS, first + k, len, &stride);
            p->k->ops.dense_pack[dense_type(p)](w, stride, len, at, p->outs);
        }
}

static void run_dense_tile(const struct product *p, const float *panel, uint32_t tile,
                           uint32_t first, uint32_t n, float *y, size_t ldy, bool resume)
{
    const struct kernel_ops *ops = &p->k->ops;
    const float *x = p->a->packed + ((size_t)tile * p->a->n_in + first) * p->height;
    uint32_t rows = rows_of_tile(p->a->n_rows, tile, p->height);
    if (!p->whole) {
        for (uint32_t r = 0; r < rows; r += DENSE_ROWS)
            for (uint32_t o = 0; o < p->outs; o += DENSE_OUTS)
                ops->dense_tile(panel + o, p->outs, n, x + r, p->height,
                                MIN_OF((uint32_t)DENSE_ROWS, rows - r), y + r * ldy + o, ldy,
                                resume);
        return;
    }
    float edge[DENSE_ROWS_MAX * DENSE_OUTS_MAX];
    if (rows == p->height) {
        ops->whole.run(&ops->whole, panel, n, x, y, ldy);
        return;
    }
    ops->whole.run(&ops->whole, panel, n, x, edge, p->outs);
    for (uint32_t r = 0; r < rows; r++)
        memcpy(y + r * ldy, edge + r * p->outs, p->outs * sizeof(float));
}

/* Rows of tile `tile` times a panel of columns [first, first + n). */
static void run_tile(const struct product *p, const uint8_t *panel, uint32_t tile, uint32_t first,
                     uint32_t n, float *y, size_t ldy, bool resume)
{
    const struct activations *a = p->a;
    if (p->dense) {
        run_dense_tile(p, (const float *)(const void *)panel, tile, first, n, y, ldy, resume);
        return;
    }
    uint32_t rows = rows_of_tile(a->n_rows, tile, p->height);
    const uint8_t *x = a->quantised + ((size_t)tile * p->height * (a->n_in / BLOCK) +
                                       (size_t)(first / BLOCK) * rows) *
                                          TILE_ROW_BYTES;
    p->k->ops.tile[panel_kind(p->w->type)](panel, n / BLOCK, x, rows, y, ldy, resume);
}

/* Whole panels without slices: results go straight to y. */
static void panels_plain(const struct product *p, struct scratch s, uint32_t panel,
                         uint32_t n_panels)
{
    uint32_t height = p->height;
    uint32_t n_tiles = (p->a->n_rows + height - 1) / height, n_in = p->w->n_in;
    uint32_t chunk = chunk_elements(p, false);
    for (uint32_t first = 0; first < n_in; first += chunk) {
        uint32_t n = MIN_OF(chunk, n_in - first);
        size_t bytes = panel_bytes(p, n);
        for (uint32_t i = 0; i < n_panels; i++)
            pack_panel(p, s, (panel + i) * p->outs, first, n, s.panels + i * bytes);
        for (uint32_t t = 0; t < n_tiles; t++)
            for (uint32_t i = 0; i < n_panels; i++)
                run_tile(p, s.panels + i * bytes, t, first, n,
                         p->y + (size_t)t * height * p->ldy + (size_t)(panel + i) * p->outs, p->ldy,
                         first > 0);
    }
}

/* Rows [row, row + n_rows) of one panel with slices, or of the last, partial one. */
static void panel_pass(const struct product *p, struct scratch s, uint32_t panel, uint32_t row,
                       uint32_t n_rows)
{
    uint32_t height = p->height, n_in = p->w->n_in, out = panel * p->outs;
    uint32_t have = MIN_OF(p->outs, p->w->n_out - out);
    uint32_t chunk = chunk_elements(p, have < p->outs);
    struct slice_tree tree = {s.stack, (size_t)n_rows * p->outs, 0};
    for (uint32_t i = 0; i * p->slice < n_in; i++) {
        uint32_t end = MIN_OF((i + 1) * p->slice, n_in);
        float *y = tree_next(&tree);
        for (uint32_t first = i * p->slice; first < end; first += chunk) {
            uint32_t n = MIN_OF(chunk, end - first);
            pack_panel(p, s, out, first, n, s.panels);
            for (uint32_t r = 0; r < n_rows; r += height)
                run_tile(p, s.panels, (row + r) / height, first, n, y + r * p->outs, p->outs,
                         first > i * p->slice);
        }
        tree_pushed(&tree, i);
    }
    tree_end(&tree);
    for (uint32_t r = 0; r < n_rows; r++)
        memcpy(p->y + (row + r) * p->ldy + out, s.stack + r * p->outs, have * sizeof(float));
}

/* Rows of one pass: as many as the tree's levels leave room for, whole tiles of either height. */
static uint32_t pass_rows(const struct product *p)
{
    uint32_t slices = (p->w->n_in + p->slice - 1) / p->slice, levels = 1;
    for (; slices > 1; slices >>= 1)
        levels++;
    uint32_t rows = STACK_BUFFER / ((levels + 1) * p->outs * 4);
    return rows / SLICE_ROWS_UNIT * SLICE_ROWS_UNIT;
}

static void panel_task(void *arg, uint32_t task, uint32_t thread)
{
    const struct product *p = arg;
    struct scratch s = kernels_scratch(p->k, thread);
    uint32_t n_panels = (p->w->n_out + p->outs - 1) / p->outs;
    uint32_t first = task * p->panels_per_task;
    uint32_t end = MIN_OF(first + p->panels_per_task, n_panels), whole = end;
    bool sliced = p->slice < p->w->n_in;
    if (sliced)
        whole = first;
    else if (end * p->outs > p->w->n_out)
        whole = end - 1;
    if (whole > first)
        panels_plain(p, s, first, whole - first);
    uint32_t step = pass_rows(p);
    for (uint32_t i = whole; i < end; i++)
        for (uint32_t row = 0; row < p->a->n_rows; row += step)
            panel_pass(p, s, i, row, MIN_OF(step, p->a->n_rows - row));
}

static void run_panels(struct product *p)
{
    uint32_t n_panels = (p->w->n_out + p->outs - 1) / p->outs;
    size_t bytes = panel_bytes(p, MIN_OF(chunk_elements(p, false), p->w->n_in));
    uint32_t fit = (uint32_t)(PANEL_BUFFER / bytes), threads = pool_threads(p->k->pool);
    uint32_t share = threads == 1 ? n_panels : (n_panels + 4 * threads - 1) / (4 * threads);
    p->panels_per_task = MAX_OF(1u, MIN_OF(fit, share));
    p->n_tasks = (n_panels + p->panels_per_task - 1) / p->panels_per_task;
    pool_run(p->k->pool, panel_task, p, p->n_tasks);
}

void matmul(struct kernels *k, const struct matrix *w, const struct activations *a,
            const struct matmul_options *options, float *y, size_t ldy)
{
    struct product p = {.k = k, .w = w, .a = a, .y = y, .ldy = ldy};
    const struct tensor_traits *t = tensor_traits(w->type);
    assert(t && a->n_in == w->n_in && w->n_in % t->block_elements == 0 && w->n_out > 0);
    p.block_elements = t->block_elements;
    p.block_bytes = t->block_bytes;
    p.slice = options->slice && options->slice < w->n_in ? options->slice : w->n_in;
    assert(p.slice == w->n_in || (p.slice % BLOCK == 0 && p.slice % t->block_elements == 0));
    assert((w->n_in + p.slice - 1) / p.slice <= SLICES_MAX);
    p.dense = activations_form(w->type, options->precision) == ACTIVATIONS_DENSE;
    assert(a->forms & (p.dense ? ACTIVATIONS_DENSE : ACTIVATIONS_QUANTISED));
    p.opened = p.dense && !is_dense(w->type);
    p.outs = p.dense ? k->ops.dense_outs : k->ops.panel_outs;
    p.height = p.dense ? k->ops.dense_rows : k->ops.tile_rows;
    p.whole = p.dense && k->ops.whole.run && (size_t)p.slice * p.outs * 4 <= WHOLE_BUFFER;
    uint32_t few_rows = p.opened ? FEW_ROWS : p.dense ? k->ops.dense_few_rows : k->ops.few_rows;
    bool few = a->n_rows <= few_rows && (p.dense || k->ops.few[w->type]);
    if (few)
        run_few(&p);
    else
        run_panels(&p);
}

void matrix_row(struct kernels *k, const struct matrix *w, uint32_t row, float *y)
{
    assert(row < w->n_out);
    k->ops.open(w->type, (const uint8_t *)w->data + row * w->row_bytes, 0, w->n_in, y);
}
