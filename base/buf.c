#include "base/buf.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void buf_deinit(struct buf *b)
{
    if (!b)
        return;
    free(b->data);
    *b = BUF_INIT(b->max);
}

enum err buf_reserve(struct buf *b, size_t n, uint8_t **ret)
{
    if (n > b->max || b->len > b->max - n)
        return ERR_LIMIT;
    size_t need = b->len + n + 1; /* one more for buf_cstr */
    if (need > b->cap) {
        size_t cap = b->cap ? b->cap : 64;
        while (cap < need)
            cap += cap / 2 + 64;
        uint8_t *data = realloc(b->data, cap);
        if (!data)
            return ERR_NO_MEMORY;
        b->data = data;
        b->cap = cap;
    }
    *ret = b->data + b->len;
    return ERR_OK;
}

enum err buf_append(struct buf *b, const void *bytes, size_t n)
{
    uint8_t *to;
    TRY(buf_reserve(b, n, &to));
    if (n)
        memcpy(to, bytes, n);
    b->len += n;
    return ERR_OK;
}

enum err buf_printf(struct buf *b, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = vsnprintf(NULL, 0, format, args);
    va_end(args);
    if (n < 0)
        return ERR_INVALID;
    uint8_t *to;
    TRY(buf_reserve(b, (size_t)n, &to));
    va_start(args, format);
    (void)vsnprintf((char *)to, (size_t)n + 1, format, args);
    va_end(args);
    b->len += (size_t)n;
    return ERR_OK;
}

void buf_consume(struct buf *b, size_t n)
{
    if (n >= b->len) {
        b->len = 0;
        return;
    }
    memmove(b->data, b->data + n, b->len - n);
    b->len -= n;
}

char *buf_cstr(struct buf *b)
{
    uint8_t *end;
    if (buf_reserve(b, 0, &end) != ERR_OK)
        return NULL;
    *end = 0;
    return (char *)b->data;
}

const uint8_t *read_view(struct reader *r, size_t n)
{
    if (r->bad || n > r->left) {
        r->bad = true;
        return NULL;
    }
    const uint8_t *p = r->p;
    r->p += n;
    r->left -= n;
    return p;
}

void read_bytes(struct reader *r, void *to, size_t n)
{
    const uint8_t *p = read_view(r, n);
    if (p)
        memcpy(to, p, n);
    else
        memset(to, 0, n);
}

static uint64_t read_le(struct reader *r, size_t n)
{
    const uint8_t *p = read_view(r, n);
    uint64_t v = 0;
    if (p) {
        for (size_t i = 0; i < n; i++)
            v |= (uint64_t)p[i] << (8 * i);
    }
    return v;
}

uint8_t read_u8(struct reader *r)
{
    return (uint8_t)read_le(r, 1);
}

uint16_t read_u16(struct reader *r)
{
    return (uint16_t)read_le(r, 2);
}

uint32_t read_u32(struct reader *r)
{
    return (uint32_t)read_le(r, 4);
}

uint64_t read_u64(struct reader *r)
{
    return read_le(r, 8);
}

float read_f32(struct reader *r)
{
    uint32_t bits = read_u32(r);
    float v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

void write_bytes(struct writer *w, const void *bytes, size_t n)
{
    if (w->bad || n > w->cap - w->len) {
        w->bad = true;
        return;
    }
    if (n)
        memcpy(w->p + w->len, bytes, n);
    w->len += n;
}

static void write_le(struct writer *w, uint64_t v, size_t n)
{
    uint8_t bytes[8];
    for (size_t i = 0; i < n; i++)
        bytes[i] = (uint8_t)(v >> (8 * i));
    write_bytes(w, bytes, n);
}

void write_u8(struct writer *w, uint8_t v)
{
    write_le(w, v, 1);
}

void write_u16(struct writer *w, uint16_t v)
{
    write_le(w, v, 2);
}

void write_u32(struct writer *w, uint32_t v)
{
    write_le(w, v, 4);
}

void write_u64(struct writer *w, uint64_t v)
{
    write_le(w, v, 8);
}

void write_f32(struct writer *w, float v)
{
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    write_u32(w, bits);
}
