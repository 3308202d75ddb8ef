/* Bounded byte buffers: a growing one with a named maximum, a bounded reader and a bounded writer.
 *
 * The reader and writer are sticky: after the first overrun every further call fails or yields
 * zeros and `bad` stays set, so that a decoder can check once at the end. All integers are
 * little-endian. */
#ifndef COVEY_BASE_BUF_H
#define COVEY_BASE_BUF_H

#include "base/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct buf {
    uint8_t *data;
    size_t len, cap, max;
};

#define BUF_INIT(max_bytes) ((struct buf){NULL, 0, 0, (max_bytes)})

void buf_deinit(struct buf *b);
/* ERR_LIMIT above `max`, ERR_NO_MEMORY. On failure nothing changes. */
enum err buf_append(struct buf *b, const void *bytes, size_t n);
enum err buf_printf(struct buf *b, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Makes room for n more bytes and returns where they go in *ret; the caller then adds to `len` what
 * it wrote. */
enum err buf_reserve(struct buf *b, size_t n, uint8_t **ret);
/* Drops the first n bytes (n <= len). */
void buf_consume(struct buf *b, size_t n);
/* Ends the content with a NUL that is not counted in `len`; "" when empty and allocation fails is
 * NULL. */
char *buf_cstr(struct buf *b);

struct reader {
    const uint8_t *p;
    size_t left;
    bool bad;
};

static inline struct reader reader_of(const void *bytes, size_t n)
{
    return (struct reader){(const uint8_t *)bytes, n, false};
}
/* A view of the next n bytes, or NULL (and `bad`). */
const uint8_t *read_view(struct reader *r, size_t n);
void read_bytes(struct reader *r, void *to, size_t n);
uint8_t read_u8(struct reader *r);
uint16_t read_u16(struct reader *r);
uint32_t read_u32(struct reader *r);
uint64_t read_u64(struct reader *r);
float read_f32(struct reader *r);

struct writer {
    uint8_t *p;
    size_t len, cap;
    bool bad;
};

static inline struct writer writer_of(void *bytes, size_t cap)
{
    return (struct writer){(uint8_t *)bytes, 0, cap, false};
}
void write_bytes(struct writer *w, const void *bytes, size_t n);
void write_u8(struct writer *w, uint8_t v);
void write_u16(struct writer *w, uint16_t v);
void write_u32(struct writer *w, uint32_t v);
void write_u64(struct writer *w, uint64_t v);
void write_f32(struct writer *w, float v);

#endif
