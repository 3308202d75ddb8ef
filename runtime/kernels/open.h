/* Opening 32 columns of a quantised row: the reference form of every type, from which all packing
 * and dequantising derives. Layouts: GGML's, as its Python package `gguf` documents them. */
#ifndef COVEY_RUNTIME_KERNELS_OPEN_H
#define COVEY_RUNTIME_KERNELS_OPEN_H

#include "runtime/kernels/kernels.h"

/* How the integer sum of a block is formed (arithmetic.h 3 and 4). */
enum panel_kind {
    PANEL_U4C, /* w in 0..15, centre 8 */
    PANEL_U4M, /* w in 0..15, a minimum */
    PANEL_U5C, /* w in 0..31, centre 16 */
    PANEL_U5M, /* w in 0..31, a minimum */
    PANEL_I8,  /* w in -128..127 */
    PANEL_S6,  /* w in 0..63, centre 32, two integer scales */
    PANEL_S2M, /* w in 0..3, two integer scales and minima */
    PANEL_KINDS
};

struct opened {
    int8_t w[32];  /* as stored, before the centre is taken off */
    float dw, mw;  /* mw: the minimum with its sign (PANEL_S2M: -dmin) */
    int16_t sc[2]; /* integer scales of the two halves */
    int16_t mn[2]; /* integer minima of the two halves (PANEL_S2M) */
};

enum panel_kind panel_kind(enum tensor_type type);
int panel_centre(enum panel_kind kind);

/* Columns 32 b to 32 b + 31 of a row. */
void block_open(enum tensor_type type, const uint8_t *row, uint32_t b, struct opened *ret);

/* n elements of a row from element `first` on to F32, any type; for quantised types both are
 * multiples of 32. */
void row_open(enum tensor_type type, const uint8_t *row, uint32_t first, uint32_t n, float *y);

#endif
