#include "transport/frame.h"

#include "base/buf.h"

#include <assert.h>
#include <math.h>
#include <string.h>

/* Views of token ids and rows are handed out as they lie in the frame. */
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "Covey runs on little-endian machines");
static_assert(FRAME_STEP_HEADER_MAX <= UINT16_MAX - FRAME_ALIGN, "header_len is 16 bits");

enum {
    LINK_SEQ_AT = 16, /* offset of link_seq; ack follows it */
    OPEN_FIXED_BYTES = 128,
    SEGMENT_FLAGS_KNOWN = 15,
};

static const struct {
    enum err err;
    uint16_t code;
} error_codes[] = {
    {ERR_NO_MEMORY, FRAME_E_NO_MEMORY},
    {ERR_INVALID, FRAME_E_INVALID},
    {ERR_LIMIT, FRAME_E_LIMIT},
    {ERR_CORRUPT, FRAME_E_CORRUPT},
    {ERR_NOT_FOUND, FRAME_E_NOT_FOUND},
    {ERR_UNSUPPORTED, FRAME_E_UNSUPPORTED},
    {ERR_IO, FRAME_E_IO},
    {ERR_TIMEOUT, FRAME_E_TIMEOUT},
    {ERR_BUSY, FRAME_E_BUSY},
    {ERR_STALE, FRAME_E_STALE},
    {ERR_CANCELLED, FRAME_E_CANCELLED},
};

uint16_t frame_error_of(enum err e)
{
    for (size_t i = 0; i < sizeof error_codes / sizeof error_codes[0]; i++) {
        if (error_codes[i].err == e)
            return error_codes[i].code;
    }
    return e == ERR_OK ? 0 : FRAME_E_OTHER;
}

enum err frame_error_to(uint16_t code)
{
    for (size_t i = 0; i < sizeof error_codes / sizeof error_codes[0]; i++) {
        if (error_codes[i].code == code)
            return error_codes[i].err;
    }
    return code == 0 ? ERR_OK : ERR_IO;
}

static size_t align_up(size_t n)
{
    return (n + FRAME_ALIGN - 1) / FRAME_ALIGN * FRAME_ALIGN;
}

static size_t step_rows(const struct frame *f)
{
    size_t n = 0;
    for (unsigned i = 0; i < f->header.n_segments && i < FRAME_SEGMENTS_MAX; i++)
        n += f->step.segments[i].n;
    return n;
}

static size_t body_bytes(const struct frame *f)
{
    switch (f->header.type) {
    case FRAME_STEP:
        return (size_t)f->step.n_controls * FRAME_CONTROL_BYTES +
               (size_t)f->header.n_segments * FRAME_SEGMENT_BYTES + step_rows(f) * 4;
    case FRAME_OPEN:
        return OPEN_FIXED_BYTES + (size_t)f->open.sampler.n_end_ids * 4 +
               (size_t)f->open.sampler.n_biases * 8 +
               ((size_t)f->open.n_prompt + f->open.n_emitted) * 4;
    case FRAME_TOKEN:
        return 36 + (size_t)f->token.n_logprobs * 8;
    case FRAME_CANCEL:
        return 20;
    case FRAME_CREDIT:
        return 12;
    case FRAME_HAVE:
        return f->have.slot ? 44 : 40;
    case FRAME_STALE:
        return 8;
    case FRAME_ERROR:
        return 22;
    case FRAME_BYE:
        return 2;
    case FRAME_CACHED:
        return 24;
    default:
        return 0;
    }
}

size_t frame_encoded_bytes(const struct frame *f)
{
    size_t n = FRAME_HEADER_BYTES + body_bytes(f);
    return f->header.type == FRAME_STEP ? align_up(n) : n;
}

void frame_stamp(uint8_t *bytes, uint64_t link_seq, uint64_t ack)
{
    struct writer w = writer_of(bytes + LINK_SEQ_AT, 16);
    write_u64(&w, link_seq);
    write_u64(&w, ack);
}

static void encode_header(struct writer *w, const struct frame_header *h, uint16_t n_controls)
{
    write_u32(w, h->len);
    write_u8(w, h->type);
    write_u8(w, h->flags);
    write_u16(w, h->header_len);
    write_u64(w, h->epoch);
    write_u64(w, h->link_seq);
    write_u64(w, h->ack);
    write_u64(w, h->step);
    write_u32(w, h->fragment_offset);
    write_u16(w, h->boundary);
    write_u16(w, h->slice_first);
    write_u16(w, h->slice_n);
    write_u8(w, h->collective);
    write_u8(w, h->dtype);
    write_u32(w, h->row_bytes);
    write_u32(w, h->n_rows);
    write_u16(w, h->n_segments);
    write_u16(w, n_controls);
}

static void encode_step(struct writer *w, const struct frame *f)
{
    for (unsigned i = 0; i < f->step.n_controls; i++) {
        const struct frame_control *c = &f->step.controls[i];
        write_u32(w, c->kind);
        write_u32(w, c->attempt);
        write_u32(w, c->slot);
        write_u32(w, c->n);
        write_bytes(w, c->request.bytes, sizeof c->request.bytes);
    }
    for (unsigned i = 0; i < f->header.n_segments; i++) {
        const struct frame_segment *s = &f->step.segments[i];
        write_bytes(w, s->request.bytes, sizeof s->request.bytes);
        write_u32(w, s->attempt);
        write_u32(w, s->position);
        write_u32(w, s->n);
        write_u32(w, s->kv_len);
        write_bytes(w, s->prefix_hash.bytes, sizeof s->prefix_hash.bytes);
        write_u32(w, s->flags);
        write_bytes(w, s->token_ids, (size_t)s->n * 4);
    }
    static const uint8_t zeros[FRAME_ALIGN];
    write_bytes(w, zeros, align_up(w->len) - w->len);
}

static void encode_open(struct writer *w, const struct frame_open *o)
{
    const struct frame_sampler *s = &o->sampler;
    write_bytes(w, o->request.bytes, sizeof o->request.bytes);
    write_bytes(w, o->entry.bytes, sizeof o->entry.bytes);
    write_u32(w, o->attempt);
    write_u32(w, o->n_prompt);
    write_u32(w, o->n_emitted);
    write_u32(w, o->context_max);
    write_u32(w, o->deadline_ms);
    write_u32(w, s->top_k);
    write_u32(w, s->max_tokens);
    write_u32(w, s->flags);
    write_u64(w, s->seed);
    write_f32(w, s->temperature);
    write_f32(w, s->top_p);
    write_f32(w, s->min_p);
    write_f32(w, s->repetition_penalty);
    write_f32(w, s->frequency_penalty);
    write_f32(w, s->presence_penalty);
    write_u16(w, s->n_logprobs);
    write_u8(w, s->want_logprob);
    write_u8(w, 0);
    write_u32(w, s->n_end_ids);
    write_f32(w, s->typical_p);
    write_u32(w, s->n_biases);
    for (unsigned i = 0; i < s->n_end_ids; i++)
        write_u32(w, (uint32_t)s->end_ids[i]);
    write_bytes(w, o->token_ids, ((size_t)o->n_prompt + o->n_emitted) * 4);
    for (unsigned i = 0; i < s->n_biases; i++) {
        write_u32(w, (uint32_t)s->bias_ids[i]);
        write_f32(w, s->biases[i]);
    }
}

static void encode_token(struct writer *w, const struct frame_token *t)
{
    write_bytes(w, t->request.bytes, sizeof t->request.bytes);
    write_u32(w, t->attempt);
    write_u32(w, t->position);
    write_u32(w, (uint32_t)t->id);
    write_f32(w, t->logprob);
    write_u16(w, t->finish);
    write_u16(w, t->n_logprobs);
    for (unsigned i = 0; i < t->n_logprobs; i++) {
        write_u32(w, (uint32_t)t->top_ids[i]);
        write_f32(w, t->top_logprobs[i]);
    }
}

static void encode_body(struct writer *w, const struct frame *f)
{
    switch (f->header.type) {
    case FRAME_STEP:
        encode_step(w, f);
        break;
    case FRAME_OPEN:
        encode_open(w, &f->open);
        break;
    case FRAME_TOKEN:
        encode_token(w, &f->token);
        break;
    case FRAME_CANCEL:
        write_bytes(w, f->cancel.request.bytes, sizeof f->cancel.request.bytes);
        write_u32(w, f->cancel.attempt);
        break;
    case FRAME_CREDIT:
        write_u64(w, f->credit.n_bytes);
        write_u32(w, f->credit.n_steps);
        break;
    case FRAME_HAVE:
        write_bytes(w, f->have.request.bytes, sizeof f->have.request.bytes);
        write_u32(w, f->have.attempt);
        write_u32(w, f->have.n);
        write_bytes(w, f->have.hash.bytes, sizeof f->have.hash.bytes);
        if (f->have.slot)
            write_u32(w, f->have.slot);
        break;
    case FRAME_STALE:
        write_u64(w, f->stale.current_epoch);
        break;
    case FRAME_ERROR:
        write_bytes(w, f->error.request.bytes, sizeof f->error.request.bytes);
        write_u32(w, f->error.attempt);
        write_u16(w, f->error.code);
        break;
    case FRAME_BYE:
        write_u16(w, f->bye.code);
        break;
    case FRAME_CACHED:
        write_bytes(w, f->cached.request.bytes, sizeof f->cached.request.bytes);
        write_u32(w, f->cached.attempt);
        write_u32(w, f->cached.n);
        break;
    default:
        break;
    }
}

static bool control_ok(const struct frame_control *c)
{
    return c->kind >= FRAME_ADMIT && c->kind < FRAME_CONTROL_KIND_N;
}

static bool segment_ok(const struct frame_segment *s)
{
    uint32_t both = FRAME_SEGMENT_LOGITS_LAST | FRAME_SEGMENT_LOGITS_ALL;
    return s->n >= 1 && s->n <= FRAME_ROWS_MAX && s->position <= INT32_MAX - s->n &&
           s->kv_len <= INT32_MAX && (s->flags & ~(uint32_t)SEGMENT_FLAGS_KNOWN) == 0 &&
           (s->flags & both) != both;
}

static bool row_shape_ok(const struct frame_header *h)
{
    return h->row_bytes <= FRAME_ROW_BYTES_MAX && h->row_bytes % 4 == 0 &&
           h->n_rows <= FRAME_ROWS_MAX && h->dtype == FRAME_F32 &&
           h->collective == FRAME_COLLECTIVE_NONE && h->fragment_offset == 0;
}

static enum err check_step(const struct frame *f)
{
    const struct frame_step *s = &f->step;
    if (s->n_controls > FRAME_CONTROLS_MAX || f->header.n_segments > FRAME_SEGMENTS_MAX ||
        step_rows(f) > FRAME_ROWS_MAX || f->header.row_bytes > FRAME_ROW_BYTES_MAX)
        return ERR_LIMIT;
    for (unsigned i = 0; i < s->n_controls; i++) {
        if (!control_ok(&s->controls[i]))
            return ERR_INVALID;
    }
    for (unsigned i = 0; i < f->header.n_segments; i++) {
        if (!segment_ok(&s->segments[i]) || !s->segments[i].token_ids)
            return ERR_INVALID;
    }
    return ERR_OK;
}

static bool sampler_ok(const struct frame_sampler *s)
{
    for (unsigned i = 0; i < s->n_biases; i++) {
        if (isnan(s->biases[i]))
            return false;
    }
    return isfinite(s->typical_p) && isfinite(s->temperature) && isfinite(s->top_p) &&
           isfinite(s->min_p) && isfinite(s->repetition_penalty) &&
           isfinite(s->frequency_penalty) && isfinite(s->presence_penalty) && s->temperature >= 0 &&
           s->want_logprob <= 1;
}

static enum err check_open(const struct frame_open *o)
{
    if (o->n_prompt > FRAME_TOKENS_MAX || o->n_emitted > FRAME_TOKENS_MAX - o->n_prompt ||
        o->sampler.n_end_ids > FRAME_END_IDS_MAX || o->sampler.n_logprobs > FRAME_LOGPROBS_MAX ||
        o->sampler.n_biases > FRAME_BIASES_MAX)
        return ERR_LIMIT;
    return sampler_ok(&o->sampler) && (o->token_ids || o->n_prompt + o->n_emitted == 0)
               ? ERR_OK
               : ERR_INVALID;
}

static enum err check_token(const struct frame_token *t)
{
    if (t->n_logprobs > FRAME_LOGPROBS_MAX)
        return ERR_LIMIT;
    if (t->finish >= FRAME_FINISH_N || isnan(t->logprob))
        return ERR_INVALID;
    for (unsigned i = 0; i < t->n_logprobs; i++) {
        if (isnan(t->top_logprobs[i]))
            return ERR_INVALID;
    }
    return ERR_OK;
}

static enum err check(const struct frame *f)
{
    switch (f->header.type) {
    case FRAME_STEP:
        return check_step(f);
    case FRAME_OPEN:
        return check_open(&f->open);
    case FRAME_TOKEN:
        return check_token(&f->token);
    default:
        return f->header.type > 0 && f->header.type < FRAME_TYPE_N ? ERR_OK : ERR_INVALID;
    }
}

enum err frame_encode(const struct frame *f, uint8_t *to, size_t cap, size_t *ret_n)
{
    TRY(check(f));
    size_t n = frame_encoded_bytes(f);
    if (n > cap)
        return ERR_LIMIT;
    struct frame_header h = f->header;
    uint16_t n_controls = 0;
    h.header_len = FRAME_HEADER_BYTES;
    h.len = (uint32_t)n;
    if (h.type == FRAME_STEP) {
        n_controls = f->step.n_controls;
        h.header_len = (uint16_t)n;
        h.n_rows = (uint32_t)step_rows(f);
        h.len = (uint32_t)(n + (size_t)h.n_rows * h.row_bytes);
        if (!row_shape_ok(&h))
            return ERR_INVALID;
    } else {
        h.n_rows = h.row_bytes = h.n_segments = 0;
    }
    h.link_seq = h.ack = 0;
    struct writer w = writer_of(to, cap);
    encode_header(&w, &h, n_controls);
    encode_body(&w, f);
    assert(!w.bad && w.len == n);
    *ret_n = n;
    return ERR_OK;
}

static void decode_header(struct reader *r, struct frame_header *h)
{
    h->len = read_u32(r);
    h->type = read_u8(r);
    h->flags = read_u8(r);
    h->header_len = read_u16(r);
    h->epoch = read_u64(r);
    h->link_seq = read_u64(r);
    h->ack = read_u64(r);
    h->step = read_u64(r);
    h->fragment_offset = read_u32(r);
    h->boundary = read_u16(r);
    h->slice_first = read_u16(r);
    h->slice_n = read_u16(r);
    h->collective = read_u8(r);
    h->dtype = read_u8(r);
    h->row_bytes = read_u32(r);
    h->n_rows = read_u32(r);
    h->n_segments = read_u16(r);
}

enum err frame_decode_header(const uint8_t *bytes, size_t n, struct frame_header *ret)
{
    struct frame_header h;
    struct reader r = reader_of(bytes, n);
    decode_header(&r, &h);
    if (r.bad || h.len < FRAME_HEADER_BYTES || h.len > FRAME_BYTES_MAX ||
        h.header_len < FRAME_HEADER_BYTES || h.header_len > h.len ||
        h.header_len % FRAME_ALIGN != 0)
        return ERR_CORRUPT;
    *ret = h;
    return ERR_OK;
}

static bool decode_segment(struct reader *r, struct frame_segment *s)
{
    read_bytes(r, s->request.bytes, sizeof s->request.bytes);
    s->attempt = read_u32(r);
    s->position = read_u32(r);
    s->n = read_u32(r);
    s->kv_len = read_u32(r);
    read_bytes(r, s->prefix_hash.bytes, sizeof s->prefix_hash.bytes);
    s->flags = read_u32(r);
    if (r->bad || !segment_ok(s))
        return false;
    s->token_ids = (const int32_t *)(const void *)read_view(r, (size_t)s->n * 4);
    return !r->bad;
}

/* `bytes` is the whole frame; its header was checked. */
static bool decode_step(const uint8_t *bytes, struct frame *f)
{
    const struct frame_header *h = &f->header;
    struct frame_step *s = &f->step;
    struct reader r = reader_of(bytes + FRAME_HEADER_BYTES - 2, h->header_len - 62u);
    s->n_controls = read_u16(&r);
    if (s->n_controls > FRAME_CONTROLS_MAX || h->n_segments > FRAME_SEGMENTS_MAX ||
        !row_shape_ok(h))
        return false;
    for (unsigned i = 0; i < s->n_controls; i++) {
        struct frame_control *c = &s->controls[i];
        uint32_t kind = read_u32(&r);
        c->kind = (uint8_t)kind;
        c->attempt = read_u32(&r);
        c->slot = read_u32(&r);
        c->n = read_u32(&r);
        read_bytes(&r, c->request.bytes, sizeof c->request.bytes);
        if (r.bad || kind > UINT8_MAX || !control_ok(c))
            return false;
    }
    uint32_t n_rows = 0;
    for (unsigned i = 0; i < h->n_segments; i++) {
        if (!decode_segment(&r, &s->segments[i]))
            return false;
        n_rows += s->segments[i].n;
    }
    size_t n_payload = h->len - h->header_len;
    s->rows = n_payload ? (const float *)(const void *)(bytes + h->header_len) : NULL;
    return n_rows == h->n_rows && n_payload == (size_t)h->n_rows * h->row_bytes;
}

static void decode_sampler(struct reader *r, struct frame_sampler *s)
{
    s->top_k = read_u32(r);
    s->max_tokens = read_u32(r);
    s->flags = read_u32(r);
    s->seed = read_u64(r);
    s->temperature = read_f32(r);
    s->top_p = read_f32(r);
    s->min_p = read_f32(r);
    s->repetition_penalty = read_f32(r);
    s->frequency_penalty = read_f32(r);
    s->presence_penalty = read_f32(r);
}

static bool decode_open(struct reader *r, struct frame_open *o)
{
    struct frame_sampler *s = &o->sampler;
    read_bytes(r, o->request.bytes, sizeof o->request.bytes);
    read_bytes(r, o->entry.bytes, sizeof o->entry.bytes);
    o->attempt = read_u32(r);
    o->n_prompt = read_u32(r);
    o->n_emitted = read_u32(r);
    o->context_max = read_u32(r);
    o->deadline_ms = read_u32(r);
    decode_sampler(r, s);
    uint16_t n_logprobs = read_u16(r);
    s->want_logprob = read_u8(r);
    (void)read_u8(r);
    uint32_t n_end_ids = read_u32(r);
    s->typical_p = read_f32(r);
    uint32_t n_biases = read_u32(r);
    if (r->bad || n_biases > FRAME_BIASES_MAX || n_end_ids > FRAME_END_IDS_MAX ||
        n_logprobs > FRAME_LOGPROBS_MAX || o->n_prompt > FRAME_TOKENS_MAX ||
        o->n_emitted > FRAME_TOKENS_MAX - o->n_prompt)
        return false;
    s->n_logprobs = (uint8_t)n_logprobs;
    s->n_end_ids = (uint8_t)n_end_ids;
    for (unsigned i = 0; i < n_end_ids; i++)
        s->end_ids[i] = (int32_t)read_u32(r);
    size_t n = (size_t)o->n_prompt + o->n_emitted;
    o->token_ids = (const int32_t *)(const void *)read_view(r, n * 4);
    s->n_biases = (uint16_t)n_biases;
    for (unsigned i = 0; i < n_biases; i++) {
        s->bias_ids[i] = (int32_t)read_u32(r);
        s->biases[i] = read_f32(r);
    }
    return !r->bad && check_open(o) == ERR_OK;
}

static bool decode_token(struct reader *r, struct frame_token *t)
{
    read_bytes(r, t->request.bytes, sizeof t->request.bytes);
    t->attempt = read_u32(r);
    t->position = read_u32(r);
    t->id = (int32_t)read_u32(r);
    t->logprob = read_f32(r);
    uint16_t finish = read_u16(r);
    uint16_t n_logprobs = read_u16(r);
    if (r->bad || finish >= FRAME_FINISH_N || n_logprobs > FRAME_LOGPROBS_MAX)
        return false;
    t->finish = (uint8_t)finish;
    t->n_logprobs = (uint8_t)n_logprobs;
    for (unsigned i = 0; i < n_logprobs; i++) {
        t->top_ids[i] = (int32_t)read_u32(r);
        t->top_logprobs[i] = read_f32(r);
    }
    return !r->bad && check_token(t) == ERR_OK;
}

/* Bodies of fixed length. */
static void decode_small(struct reader *r, struct frame *f)
{
    switch (f->header.type) {
    case FRAME_CANCEL:
        read_bytes(r, f->cancel.request.bytes, sizeof f->cancel.request.bytes);
        f->cancel.attempt = read_u32(r);
        break;
    case FRAME_CREDIT:
        f->credit.n_bytes = read_u64(r);
        f->credit.n_steps = read_u32(r);
        break;
    case FRAME_HAVE:
        read_bytes(r, f->have.request.bytes, sizeof f->have.request.bytes);
        f->have.attempt = read_u32(r);
        f->have.n = read_u32(r);
        read_bytes(r, f->have.hash.bytes, sizeof f->have.hash.bytes);
        f->have.slot = r->left ? read_u32(r) : 0;
        break;
    case FRAME_STALE:
        f->stale.current_epoch = read_u64(r);
        break;
    case FRAME_ERROR:
        read_bytes(r, f->error.request.bytes, sizeof f->error.request.bytes);
        f->error.attempt = read_u32(r);
        f->error.code = read_u16(r);
        break;
    case FRAME_CACHED:
        read_bytes(r, f->cached.request.bytes, sizeof f->cached.request.bytes);
        f->cached.attempt = read_u32(r);
        f->cached.n = read_u32(r);
        break;
    default:
        f->bye.code = read_u16(r);
        break;
    }
}

enum err frame_decode(const uint8_t *bytes, size_t n, struct frame *ret)
{
    assert((uintptr_t)bytes % FRAME_ALIGN == 0);
    struct frame_header *h = &ret->header;
    TRY(frame_decode_header(bytes, n, h));
    if (h->len != n)
        return ERR_CORRUPT;
    if (h->type == 0 || h->type >= FRAME_TYPE_N)
        return h->flags & FRAME_OPTIONAL ? ERR_UNSUPPORTED : ERR_CORRUPT;
    if (h->type == FRAME_STEP)
        return decode_step(bytes, ret) ? ERR_OK : ERR_CORRUPT;
    struct reader r = reader_of(bytes + h->header_len, n - h->header_len);
    bool ok = true;
    if (h->type == FRAME_OPEN)
        ok = decode_open(&r, &ret->open);
    else if (h->type == FRAME_TOKEN)
        ok = decode_token(&r, &ret->token);
    else
        decode_small(&r, ret);
    return ok && !r.bad && r.left == 0 ? ERR_OK : ERR_CORRUPT;
}
