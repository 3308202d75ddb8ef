/* The table of functions that a variant fills, and the layouts they share. Internal to the kernels.
 *
 * Quantised tile: R rows of activations (R <= ops.tile_rows) side by side. For each block of 32:
 *   int8 q[R][32]; float d[R], s[R]; int16 pairs c8[R], c16[R], c32[2][R].
 * A pair holds -c times the sum of q over columns with k mod 4 < 2, and over the others (c32: of
 * the first and of the last 16 columns): what a kernel with w in 0..2c-1 adds to be centred.
 *
 * Panel: 8 outputs. For each block of 32:
 *   int8 w[8 j][8 outputs][4]: columns 4j..4j+3; float dw[8], mw[8]; and for the kinds with two
 *   integer scales int16 sc[2][8][2], each scale twice; PANEL_S2M also int16 mn[2][8][2].
 *   A variant may have panels of 16 outputs (ops.panel_outs), with its own order in them.
 *
 * Dense tile: ops.dense_rows rows side by side, float x[n_in][dense_rows], missing rows 0.
 * Dense panel: float w[n_in][ops.dense_outs]. */
#ifndef COVEY_RUNTIME_KERNELS_TABLE_H
#define COVEY_RUNTIME_KERNELS_TABLE_H

#include "runtime/kernels/kernels.h"
#include "runtime/kernels/open.h"

enum {
    TILE_ROWS = 8, /* ops.tile_rows may be more, */
    TILE_ROWS_MAX = 16,
    PANEL_OUTS = 8,
    WIDE_OUTS = 16,   /* of the wide kernels for few rows */
    FEW_ROWS = 4,     /* up to this many rows the weights are used straight from the file, */
    FEW_ROWS_MAX = 8, /* or up to ops.few_rows (quantised), ops.dense_few_rows */
    DENSE_ROWS = 6,   /* of our own dense kernels: the least tile and panel */
    DENSE_OUTS = 16,
    DENSE_ROWS_MAX = 24, /* what another library's kernel may want instead */
    DENSE_OUTS_MAX = 32,
    ATTEND_ROWS = 6,

    TILE_ROW_BYTES = 56,   /* of one row in one block */
    PANEL_BYTES = 320,     /* of one block */
    PANEL_S6_BYTES = 384,  /* with two scales */
    PANEL_S2M_BYTES = 448, /* and two minima */
};

static inline uint32_t panel_block_bytes(enum panel_kind kind)
{
    return kind == PANEL_S6 ? PANEL_S6_BYTES : kind == PANEL_S2M ? PANEL_S2M_BYTES : PANEL_BYTES;
}

static inline int panel_has_minimum(enum panel_kind kind)
{
    return kind == PANEL_U4M || kind == PANEL_U5M;
}

/* What one query vector has gathered: m, l, o[head_dim]. */
struct attend_sum {
    float m, l;
    float *o;
};

/* One KV head's part of one KV block against up to ATTEND_ROWS query vectors. Row r sees positions
 * low[r] <= p < high[r] of the block, at least one. `fresh` sums are set, others combined with. */
struct attend_block {
    const void *k, *v;
    uint32_t head_dim, n_q;
    float scale;
    const float *q[ATTEND_ROWS];
    uint32_t low[ATTEND_ROWS], high[ATTEND_ROWS];
    bool fresh[ATTEND_ROWS];
    struct attend_sum *sum[ATTEND_ROWS];
};

/* 8 outputs of n_rows (1..ops.few_rows) rows; output i's weights at w + i * stride. */
typedef void few_fn(const uint8_t *w, size_t stride, uint32_t n_blocks, const uint8_t *tile,
                    uint32_t n_rows, float (*out)[PANEL_OUTS]);
/* The same for WIDE_OUTS outputs. */
typedef void wide_few_fn(const uint8_t *w, size_t stride, uint32_t n_blocks, const uint8_t *tile,
                         uint32_t n_rows, float (*out)[WIDE_OUTS]);
typedef void pack_fn(const uint8_t *w, size_t stride, uint32_t n_blocks, uint8_t *panel);
/* A panel's outputs of the tile's n_rows (1..ops.tile_rows) rows. `resume`: the chains go on from
 * y. */
typedef void tile_fn(const uint8_t *panel, uint32_t n_blocks, const uint8_t *tile, uint32_t n_rows,
                     float *y, size_t ldy, bool resume);
typedef void dense_few_fn(const uint8_t *w, size_t stride, uint32_t n_in, const float *x,
                          size_t ldx, uint32_t n_rows, float (*out)[PANEL_OUTS], bool resume);
typedef void wide_dense_few_fn(const uint8_t *w, size_t stride, uint32_t n_in, const float *x,
                               size_t ldx, uint32_t n_rows, float (*out)[WIDE_OUTS]);
/* PANEL_OUTS outputs into a panel of pitch ldp. */
typedef void dense_pack_fn(const uint8_t *w, size_t stride, uint32_t n_in, float *panel,
                           size_t ldp);
/* PANEL_OUTS quantised outputs opened to F32 into a panel of pitch ldp; and few rows on such a
 * panel of pitch PANEL_OUTS, aligned to 64. */
typedef void open_panel_fn(const uint8_t *w, size_t stride, uint32_t n_blocks, float *panel,
                           size_t ldp);
typedef void opened_few_fn(const float *panel, uint32_t n_in, const float *x, size_t ldx,
                           uint32_t n_rows, float (*out)[PANEL_OUTS], bool resume);
/* DENSE_OUTS outputs of n_rows (1..DENSE_ROWS) rows; the panel's pitch is ldp, the tile's ldx. */
typedef void dense_tile_fn(const float *panel, size_t ldp, uint32_t n_in, const float *tile,
                           size_t ldx, uint32_t n_rows, float *y, size_t ldy, bool resume);

/* A kernel that takes a whole tile and panel, for whole chains only: a variant's, or one of another
 * library, which is used after dense_whole_exact has found it to be such a chain. */
struct dense_whole {
    /* y[r][o] for all `rows` by `outs`; pitch ldy. NULL: there is none. */
    void (*run)(const struct dense_whole *w, const float *panel, uint32_t n_in, const float *tile,
                float *y, size_t ldy);
    uint32_t rows, outs;
    bool weights_first; /* the weights are the library's first operand */
    void (*kernel)(void);
    void *context;
};

/* False when there is no such library or kernel. blis.c, or blis_none.c */
bool dense_whole_find(struct dense_whole *ret);
/* Compares it with chains of fmaf over many lengths and random values, bit by bit, in
 * DENSE_CHECK_BYTES of memory aligned to 64. */
bool dense_whole_exact(const struct dense_whole *w, void *memory);
enum { DENSE_CHECK_BYTES = 192 * 1024 };

enum dense_type { DENSE_F32, DENSE_F16, DENSE_BF16, DENSE_TYPES };

struct kernel_ops {
    few_fn *few[TENSOR_TYPES];           /* NULL: pack and tile instead */
    wide_few_fn *wide_few[TENSOR_TYPES]; /* beside few; NULL: 8 outputs at a time only */
    uint32_t few_rows;                   /* FEW_ROWS, or up to FEW_ROWS_MAX */
    uint32_t dense_few_rows; /* the same with wide_dense_few, which it needs above FEW_ROWS */
    pack_fn *pack[TENSOR_TYPES];
    tile_fn *tile[PANEL_KINDS];
    uint32_t tile_rows;  /* TILE_ROWS, or TILE_ROWS_MAX */
    uint32_t panel_outs; /* of quantised panels: PANEL_OUTS, or 16 with twice the bytes */
    dense_few_fn *dense_few[DENSE_TYPES];
    wide_dense_few_fn *wide_dense_few[DENSE_TYPES]; /* NULL: as above */
    dense_pack_fn *dense_pack[DENSE_TYPES];
    dense_tile_fn *dense_tile;
    open_panel_fn *open_panel[TENSOR_TYPES]; /* NULL: open rows one by one */
    opened_few_fn *opened_few;               /* NULL together with these */
    uint32_t dense_rows, dense_outs;         /* of tiles and panels */
    struct dense_whole whole;

    /* Row r of a tile of n_rows rows. */
    void (*quantise)(const float *x, uint32_t n_blocks, uint32_t n_rows, uint32_t r, uint8_t *tile);
    void (*open)(enum tensor_type type, const uint8_t *row, uint32_t first, uint32_t n, float *y);
    float (*sum_squares)(const float *x, uint32_t n);
    void (*norm)(const float *x, uint32_t n, float scale, const float *weight, float *y);
    void (*silu_mul)(const float *gate, const float *up, uint32_t n, float *y);
    void (*gelu_mul)(const float *gate, const float *up, uint32_t n, float *y);
    float (*exp_sum)(const float *x, size_t n, float max, float *y);
    void (*add)(float *y, const float *x, size_t n);
    void (*rope)(enum rope_pairing pairing, const float *table, uint32_t n_dims, float *head);
    void (*halves)(const float *x, uint32_t n, uint16_t *y); /* F32 to F16 */

    /* kv_open.h */
    void (*kv_open)(const uint8_t *head, uint32_t head_dim, uint32_t low, uint32_t high, float *k,
                    float *v);
    void (*attend_f16)(const struct attend_block *b);
    void (*attend_f32)(const struct attend_block *b);
    /* to += from, in this order (arithmetic.h 11) */
    void (*attend_combine)(struct attend_sum *to, const struct attend_sum *from, uint32_t head_dim);
};

/* The C reference fills every field; each variant then replaces those it does better. */
void kernel_ops_c(struct kernel_ops *ops);
void kernel_ops_avx2(struct kernel_ops *ops);
void kernel_ops_avx_vnni(struct kernel_ops *ops); /* over the AVX2 table */
void kernel_ops_avx512(struct kernel_ops *ops);
void kernel_ops_amx(struct kernel_ops *ops); /* over the AVX-512 table */ /* over the AVX2 table */
void kernel_ops_neon(struct kernel_ops *ops);
void kernel_ops_neon_dotprod(struct kernel_ops *ops);
void kernel_ops_neon_i8mm(struct kernel_ops *ops);

/* Fills the table for a variant; `*variant` BEST becomes the one chosen. False when this CPU or
 * build lacks it. One file per CPU family: cpu_x86.c, cpu_arm64.c, cpu_other.c. */
bool kernel_ops_find(enum kernels_variant *variant, struct kernel_ops *ret);

#endif
