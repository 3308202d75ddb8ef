/* The frames of the data plane (PROTOCOL 4), as plain structs, and their encoding.
 *
 * A frame is a fixed header of FRAME_HEADER_BYTES, then for a STEP its controls and segments, zeros
 * up to `header_len`, then the payload (activation rows). In every other type the body follows the
 * fixed header at once. All integers are little-endian. A frame in memory starts at an address that
 * is a multiple of FRAME_ALIGN; then token ids and rows are aligned too and are handed out as views
 * into the frame, without a copy. `link_seq` and `ack` are stamped by the link.
 *
 * Nothing is allocated here. Decoding checks every length, count and sum against the named maxima;
 * whether the shape fits the local plan (epoch, boundary, row_bytes) is for the caller to check. */
#ifndef COVEY_TRANSPORT_FRAME_H
#define COVEY_TRANSPORT_FRAME_H

#include "base/err.h"
#include "base/id.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    FRAME_ALIGN = 16,
    FRAME_HEADER_BYTES = 64, /* the fields of the protocol (62) and n_controls */
    FRAME_ROWS_MAX = 512,    /* rows of one step, in all of its segments */
    FRAME_SEGMENTS_MAX = 64,
    FRAME_CONTROLS_MAX = 128,       /* two for each slot of a stage */
    FRAME_ROW_BYTES_MAX = 64 << 10, /* 16,384 values in F32 */
    FRAME_TOKENS_MAX = 1 << 20,     /* prompt and emitted ids of one OPEN together */
    FRAME_END_IDS_MAX = 16,
    FRAME_BIASES_MAX = 300,
    FRAME_LOGPROBS_MAX = 20,
    FRAME_SEGMENT_BYTES = 52,
    FRAME_CONTROL_BYTES = 32,
    /* of a STEP without its rows: 9,536 */
    FRAME_STEP_HEADER_MAX = FRAME_HEADER_BYTES + FRAME_CONTROLS_MAX * FRAME_CONTROL_BYTES +
                            FRAME_SEGMENTS_MAX * FRAME_SEGMENT_BYTES + FRAME_ROWS_MAX * 4,
    /* of any other type but OPEN */
    FRAME_SMALL_MAX = 512,
    FRAME_OPEN_BYTES_MAX = FRAME_HEADER_BYTES + 256 + FRAME_BIASES_MAX * 8 + FRAME_TOKENS_MAX * 4,
    /* the largest that any node accepts; a link is given a smaller bound from the plan */
    FRAME_BYTES_MAX = FRAME_STEP_HEADER_MAX + FRAME_ROWS_MAX * FRAME_ROW_BYTES_MAX,
};

enum frame_type {
    FRAME_STEP = 1, /* activations, segments and KV control of one step */
    FRAME_OPEN = 2,
    FRAME_TOKEN = 3,
    FRAME_CANCEL = 4,
    FRAME_CREDIT = 5,
    FRAME_HAVE = 6,
    FRAME_STALE = 7,
    FRAME_ERROR = 8,
    FRAME_BYE = 9,
    FRAME_CACHED = 10, /* optional */
    FRAME_TYPE_N
};

enum frame_flag {
    FRAME_OPTIONAL = 1, /* a receiver that does not know the type skips the frame */
};

enum frame_dtype { FRAME_F32 = 0 };
enum frame_collective { FRAME_COLLECTIVE_NONE = 0 };

struct frame_header {
    uint32_t len;        /* bytes of the whole frame, header and payload included */
    uint8_t type;        /* enum frame_type */
    uint8_t flags;       /* enum frame_flag */
    uint16_t header_len; /* where the payload starts, a multiple of FRAME_ALIGN */
    uint64_t epoch;      /* alias of the plan's epoch, never 0 where a computation is touched */
    uint64_t link_seq;   /* 1, 2, 3 … in each direction; stamped and checked by the link */
    uint64_t ack;        /* link_seq of the last frame received; stamped by the link */
    uint64_t step;
    uint32_t fragment_offset; /* bytes of the payload before this fragment; 0 for now */
    uint16_t boundary;        /* layer boundary: the first layer that these rows enter */
    uint16_t slice_first;     /* slices of the boundary that the rows cover; 0 of 1 for now */
    uint16_t slice_n;
    uint8_t collective;  /* enum frame_collective */
    uint8_t dtype;       /* enum frame_dtype */
    uint32_t row_bytes;  /* of one row: 4 × n_embd */
    uint32_t n_rows;     /* sum of n over the segments */
    uint16_t n_segments; /* derived on encoding */
};

/* A chain of tokens by its hash; all zero where there is none. */
struct hash128 {
    uint8_t bytes[16];
};

enum frame_segment_flag {
    FRAME_SEGMENT_PREFILL = 1,
    FRAME_SEGMENT_LAST_CHUNK = 2, /* the last rows of a prompt */
    FRAME_SEGMENT_LOGITS_LAST = 4,
    FRAME_SEGMENT_LOGITS_ALL = 8, /* never together with LAST */
};

/* Some consecutive positions of one request. */
struct frame_segment {
    struct request_id request;
    uint32_t attempt;
    uint32_t position; /* of the first row */
    uint32_t n;        /* rows, at least 1 */
    uint32_t kv_len;   /* positions that the stage must already hold */
    struct hash128 prefix_hash;
    uint32_t flags;           /* enum frame_segment_flag */
    const int32_t *token_ids; /* [n]; every stage gets them. A view into the frame when decoded */
};

enum frame_control_kind {
    FRAME_ADMIT = 1, /* the request gets a slot (of that number) on every stage */
    FRAME_CUT = 2,   /* the request's rows end before this step; its KV beyond n goes */
    FRAME_FREE = 3,  /* slot and KV are free again; no request named: whoever has the slot */
    FRAME_SHARE = 4, /* the slot has the first n positions of slot `from`, not what it had */
    FRAME_CONTROL_KIND_N
};

/* A change of the KV, in step order on every stage, applied before the step's rows. */
struct frame_control {
    uint8_t kind; /* enum frame_control_kind */
    union {
        uint32_t attempt; /* but for SHARE */
        uint32_t from;    /* SHARE */
    };
    uint32_t slot;
    uint32_t n; /* ADMIT: positions to reserve at most; CUT, SHARE: positions it has; FREE: 0 */
    struct request_id request; /* SHARE: whom the slot was given to */
};

struct frame_step {
    uint16_t n_controls;
    struct frame_control controls[FRAME_CONTROLS_MAX];
    struct frame_segment segments[FRAME_SEGMENTS_MAX]; /* n_segments is in the header */
    /* [n_rows, row_bytes / 4] F32 little-endian. Decoding: a view, NULL when there are none.
     * Encoding: not read; the rows are the second piece given to the link. */
    const float *rows;
};

enum frame_sampler_flag {
    FRAME_SAMPLER_IGNORE_END = 1, /* end ids do not end the answer */
};

struct frame_sampler {
    float temperature; /* 0: greedy */
    float top_p, min_p;
    float typical_p; /* 0 or 1: off */
    float repetition_penalty, frequency_penalty, presence_penalty;
    uint32_t top_k; /* 0: off */
    uint32_t max_tokens;
    uint64_t seed;
    uint32_t flags;       /* enum frame_sampler_flag */
    uint8_t n_logprobs;   /* alternatives wanted with each token, <= FRAME_LOGPROBS_MAX */
    uint8_t want_logprob; /* 1: the token's own log-probability is wanted */
    uint8_t n_end_ids;
    uint16_t n_biases;
    int32_t end_ids[FRAME_END_IDS_MAX];
    int32_t bias_ids[FRAME_BIASES_MAX];
    float biases[FRAME_BIASES_MAX]; /* added to the logits; not NaN */
};

/* An entry asks for (more of) an answer; also passed from the head to the tail. */
struct frame_open {
    struct request_id request;
    uint32_t attempt;
    struct node_id entry; /* tokens go there */
    struct frame_sampler sampler;
    uint32_t n_prompt, n_emitted; /* together <= FRAME_TOKENS_MAX */
    const int32_t *token_ids;     /* [n_prompt + n_emitted]; a view when decoded */
    uint32_t context_max;         /* positions that the request may fill */
    uint32_t deadline_ms;         /* relative to its arrival; 0: none */
};

enum frame_finish {
    FRAME_GOES_ON = 0,
    FRAME_END_TOKEN = 1, /* an end id was sampled */
    FRAME_LENGTH = 2,    /* max_tokens or context_max */
    FRAME_STOPPED = 3,   /* cancelled */
    FRAME_FINISH_N
};

struct frame_token {
    struct request_id request;
    uint32_t attempt;
    uint32_t position; /* of this token in the sequence (prompt included) */
    int32_t id;
    uint8_t finish; /* enum frame_finish */
    uint8_t n_logprobs;
    float logprob; /* of id; 0 when not wanted */
    int32_t top_ids[FRAME_LOGPROBS_MAX];
    float top_logprobs[FRAME_LOGPROBS_MAX];
};

/* Ends every attempt of the request up to this one. */
struct frame_cancel {
    struct request_id request;
    uint32_t attempt;
};

/* What the sender may still have under way. */
struct frame_credit {
    uint64_t n_bytes;
    uint32_t n_steps;
};

/* How many positions of KV the sender holds for the chain of the request. */
struct frame_have {
    struct request_id request;
    uint32_t attempt;
    uint32_t n;
    struct hash128 hash;
    uint32_t slot; /* that holds it, where a stream starts; else 0. Not sent when 0 */
};

/* Of a request's prompt so many positions need not be computed: they were held already. */
struct frame_cached {
    struct request_id request;
    uint32_t attempt;
    uint32_t n;
};

/* The frame named an epoch that is not (or no longer) committed here. */
struct frame_stale {
    uint64_t current_epoch; /* alias; 0: none */
};

/* Codes on the wire; never renumbered. */
enum frame_error_code {
    FRAME_E_OTHER = 1,
    FRAME_E_NO_MEMORY = 2,
    FRAME_E_INVALID = 3,
    FRAME_E_LIMIT = 4,
    FRAME_E_CORRUPT = 5,
    FRAME_E_UNSUPPORTED = 6,
    FRAME_E_NOT_FOUND = 7,
    FRAME_E_IO = 8,
    FRAME_E_TIMEOUT = 9,
    FRAME_E_BUSY = 10,
    FRAME_E_STALE = 11,
    FRAME_E_CANCELLED = 12,
};

struct frame_error {
    struct request_id request;
    uint32_t attempt;
    uint16_t code; /* enum frame_error_code; unknown ones count as OTHER */
};

struct frame_bye {
    uint16_t code; /* enum frame_error_code or 0: all is well */
};

struct frame {
    struct frame_header header;
    union {
        struct frame_step step;
        struct frame_open open;
        struct frame_token token;
        struct frame_cancel cancel;
        struct frame_credit credit;
        struct frame_have have;
        struct frame_stale stale;
        struct frame_error error;
        struct frame_bye bye;
        struct frame_cached cached;
    };
};

/* An error as its code on the wire, and back. */
uint16_t frame_error_of(enum err e);
enum err frame_error_to(uint16_t code);

/* Bytes that frame_encode will write: the whole frame but for a STEP's rows. */
size_t frame_encoded_bytes(const struct frame *f);

/* Writes the frame to `to`; a STEP ends where its rows begin (header_len), with `len` counting the
 * rows (n_rows × row_bytes). len, header_len and n_rows of the header are derived, not read;
 * link_seq and ack are left for the link. ERR_LIMIT: a count above its maximum, or `cap` too small;
 * ERR_INVALID: numbers that decoding would refuse. */
enum err frame_encode(const struct frame *f, uint8_t *to, size_t cap, size_t *ret_n);

/* Reads one whole frame of n bytes that starts at an address aligned to FRAME_ALIGN. `ret` holds
 * views into it. ERR_UNSUPPORTED: an unknown type that is flagged optional, to be skipped (only
 * ret->header is set). ERR_CORRUPT: everything else, which closes the link. */
enum err frame_decode(const uint8_t *bytes, size_t n, struct frame *ret);

/* The fixed header alone: for a length and shape check before the rest has come. */
enum err frame_decode_header(const uint8_t *bytes, size_t n, struct frame_header *ret);

/* What the link does before it seals. */
void frame_stamp(uint8_t *bytes, uint64_t link_seq, uint64_t ack);

#endif
