/* Many rows of activations times quantised weights, AMX: one tile instruction gives the integer
 * sums of 16 rows by 16 outputs over a block of 32 columns, exactly; the chains over blocks stay as
 * they are in every variant. Everything else comes from the AVX-512 table. The second operand is a
 * panel's weights as they lie, the first the quantised tile itself, [rows][32]. */
#define PANEL_SIGNED 1
#include "runtime/kernels/avx512_panel.h"

/* What the instruction that configures tiles reads. */
struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

/* Tiles 0 and 1: sums; 2: activations; 3: weights. With two scales, 4 and 5 hold the second half of
 * the columns. */
static void configure(uint32_t n_rows, bool halves)
{
    struct tile_config c = {.palette = 1};
    for (int t = 0; t < 6; t++) {
        bool is_rows = t == 2 || t == 4, is_weights = t == 3 || t == 5;
        c.rows[t] = (uint8_t)(is_weights ? (halves ? 4 : 8) : n_rows);
        c.row_bytes[t] = (uint16_t)(is_rows ? (halves ? 16 : 32) : 64);
    }
    /* gcc's intrinsic names the first 8 bytes alone as read: the others would not be stored */
    __asm__ volatile("" : : "r"(&c) : "memory");
    _tile_loadconfig(&c);
}

/* Integer sums of one block: [half][row][output]. */
typedef int32_t sums[2][TILE_ROWS_MAX][OUTS] __attribute__((aligned(64)));

AVX2_INLINE void multiply(const bool halves, const uint8_t *q, const uint8_t *panel, sums *to)
{
    _tile_zero(0);
    _tile_loadd(2, q, 32);
    _tile_loadd(3, panel, 64);
    _tile_dpbssd(0, 2, 3);
    _tile_stored(0, (*to)[0], 64);
    if (halves) {
        _tile_zero(1);
        _tile_loadd(4, q + 16, 32);
        _tile_loadd(5, panel + 256, 64);
        _tile_dpbssd(1, 4, 5);
        _tile_stored(1, (*to)[1], 64);
    }
}

AVX2_INLINE __m512 sum_at(const int32_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_load_si512(p));
}

/* R rows of a tile whose layout has `layout` rows. */
struct rows_at {
    const uint8_t *q;   /* of the first of the R rows */
    const float *d, *s; /* the same */
    const uint8_t *pairs;
    uint32_t layout;
};

AVX2_INLINE struct rows_at rows_at(const uint8_t *tile, uint32_t layout, uint32_t row)
{
    const uint8_t *f = tile + 32 * layout + 4 * row;
    const float *d = (const float *)(const void *)f;
    return (struct rows_at){tile + 32 * row, d, d + layout, f + 8 * layout, layout};
}

/* The chains' steps for one block. */
AVX2_INLINE void step(const enum panel_kind kind, const uint32_t R, const uint8_t *panel,
                      struct rows_at a, sums *from, __m512 *acc)
{
    const bool halves = kind == PANEL_S6 || kind == PANEL_S2M;
    const __m512 dw = floats_at(panel + AT_DW), mw = floats_at(panel + AT_MW);
#pragma GCC unroll 16
    for (uint32_t r = 0; r < R; r++) {
        __m512 sum = sum_at((*from)[0][r]);
        if (halves) {
            sum = _mm512_mul_ps(sum, floats_at(panel + AT_SCALES));
            sum = _mm512_fmadd_ps(sum_at((*from)[1][r]), floats_at(panel + AT_SCALES + 64), sum);
        }
        acc[r] = _mm512_fmadd_ps(_mm512_mul_ps(dw, sum), _mm512_set1_ps(a.d[r]), acc[r]);
        if (panel_has_minimum(kind))
            acc[r] = _mm512_fmadd_ps(mw, _mm512_set1_ps(a.s[r]), acc[r]);
        if (kind == PANEL_S2M) {
            __m512 m = minimum_sum(panel, a.pairs + 4 * r, a.layout);
            acc[r] = _mm512_fmadd_ps(_mm512_mul_ps(mw, m), _mm512_set1_ps(a.d[r]), acc[r]);
        }
    }
}

/* R rows of a tile, beginning with row `row`. While the chains take one block's sums, the tile unit
 * forms the next one's. */
AVX2_INLINE void tile_rows(const enum panel_kind kind, const uint32_t R, const uint8_t *panel,
                           uint32_t n_blocks, const uint8_t *tile, uint32_t layout, uint32_t row,
                           float *y, size_t ldy, bool resume)
{
    const bool halves = kind == PANEL_S6 || kind == PANEL_S2M;
    const size_t panel_step = 2 * panel_block_bytes(kind);
    const size_t tile_step = (size_t)layout * TILE_ROW_BYTES;
    __m512 acc[TILE_ROWS_MAX];
    sums buffer[2];
#pragma GCC unroll 16
    for (uint32_t r = 0; r < R; r++)
        acc[r] = resume ? _mm512_loadu_ps(y + r * ldy) : _mm512_setzero_ps();
    configure(R, halves);
    multiply(halves, tile + 32 * row, panel, &buffer[0]);
    for (uint32_t b = 0; b < n_blocks; b++, panel += panel_step, tile += tile_step) {
        if (b + 1 < n_blocks)
            multiply(halves, tile + tile_step + 32 * row, panel + panel_step, &buffer[(b + 1) % 2]);
        step(kind, R, panel, rows_at(tile, layout, row), &buffer[b % 2], acc);
    }
    _tile_release();
#pragma GCC unroll 16
    for (uint32_t r = 0; r < R; r++)
        _mm512_storeu_ps(y + r * ldy, _mm512_add_ps(acc[r], _mm512_setzero_ps()));
}

/* The rows of a tile that is not full: in parts of 8, 4, 2 and 1. */
#define PART(K, R)                                                                                 \
    if (n_rows & (R)) {                                                                            \
        tile_rows(PANEL_##K, R, panel, n_blocks, tile, n_rows, row, y + row * ldy, ldy, resume);   \
        row += (R);                                                                                \
    }
#define TILE(K)                                                                                    \
    static void tile_##K(const uint8_t *panel, uint32_t n_blocks, const uint8_t *tile,             \
                         uint32_t n_rows, float *y, size_t ldy, bool resume)                       \
    {                                                                                              \
        uint32_t row = 0;                                                                          \
        if (n_rows == TILE_ROWS_MAX) {                                                             \
            tile_rows(PANEL_##K, TILE_ROWS_MAX, panel, n_blocks, tile, TILE_ROWS_MAX, 0, y, ldy,   \
                      resume);                                                                     \
            return;                                                                                \
        }                                                                                          \
        PART(K, 8)                                                                                 \
        PART(K, 4)                                                                                 \
        PART(K, 2)                                                                                 \
        PART(K, 1)                                                                                 \
    }
TILE(U4C)
TILE(U4M)
TILE(U5C)
TILE(U5M)
TILE(I8)
TILE(S6)
TILE(S2M)

void kernel_ops_amx(struct kernel_ops *ops)
{
    ops->tile_rows = TILE_ROWS_MAX;
    set_packs(ops);
    ops->tile[PANEL_U4C] = tile_U4C;
    ops->tile[PANEL_U4M] = tile_U4M;
    ops->tile[PANEL_U5C] = tile_U5C;
    ops->tile[PANEL_U5M] = tile_U5M;
    ops->tile[PANEL_I8] = tile_I8;
    ops->tile[PANEL_S6] = tile_S6;
    ops->tile[PANEL_S2M] = tile_S2M;
}
