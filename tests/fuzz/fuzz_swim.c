/* Datagrams and session messages of members into a swim core with four members.
 *
 * The input is a run of entries: a byte (bits 0-1 the member, bit 2 datagram or session, bits 3-7
 * time that passes before it, in 32 ms), a length in two bytes (little-endian), and the message.
 * What must hold whatever comes: no crash, next_due ahead of the clock, our own incarnation and
 * every held one never go back, messages within their limits. */
#include "tests/unit/swim_net.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { FUZZ_MEMBERS = 4, FUZZ_ENTRIES_MAX = 64 };

static void check(bool good)
{
    if (!good)
        abort();
}

static void step(struct swim *s, const struct swim_event *e, uint64_t now, struct swim_update *u,
                 uint64_t incarnations[FUZZ_MEMBERS + 1])
{
    enum err result = swim_step(s, e, now, u);
    check(result == ERR_OK || result == ERR_CORRUPT);
    check(swim_next_due(s) > now);
    for (uint32_t i = 0; i < u->outbox.n; i++) {
        const struct wire_message *m = &u->outbox.messages[i];
        check(m->len <=
              (uint32_t)(m->way == WAY_DATAGRAM ? DATAGRAM_PAYLOAD_MAX : FRAME_PAYLOAD_MAX));
    }
    swim_update_clear(u);
    check(swim_self_incarnation(s) >= incarnations[0]);
    incarnations[0] = swim_self_incarnation(s);
    for (uint32_t i = 0; i < FUZZ_MEMBERS; i++) {
        struct swim_member_view v;
        swim_member_at(s, i, &v);
        check(v.incarnation >= incarnations[i + 1]);
        incarnations[i + 1] = v.incarnation;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct swim_options o;
    swim_options_default(&o);
    o.self = net_make_id(0);
    o.boot_id = 1;
    o.rng_seed = 1;
    struct swim *s = NULL;
    check(swim_new(&o, 1, &s) == ERR_OK);
    struct swim_update u = SWIM_UPDATE_INIT;
    uint64_t now = 1, incarnations[FUZZ_MEMBERS + 1] = {0};
    for (uint32_t i = 1; i <= FUZZ_MEMBERS; i++) {
        struct swim_event add = {.type = SWIM_EVENT_MEMBER_ADD, .peer = net_make_id(i)};
        check(swim_step(s, &add, now, &u) == ERR_OK);
        if (i > 2)
            continue;
        struct swim_event up = {
            .type = SWIM_EVENT_SESSION, .peer = add.peer, .session = SWIM_SESSION_UP};
        check(swim_step(s, &up, now, &u) == ERR_OK);
    }
    for (int n = 0; n < FUZZ_ENTRIES_MAX && size >= 3; n++) {
        uint32_t what = data[0], len = data[1] | (uint32_t)data[2] << 8;
        data += 3;
        size -= 3;
        len = len < size ? len : (uint32_t)size;
        uint64_t until = now + UINT64_C(32) * (what >> 3) * NET_MS;
        for (int ticks = 0; swim_next_due(s) <= until && ticks < 50; ticks++) {
            now = swim_next_due(s);
            struct swim_event tick = {.type = SWIM_EVENT_TICK};
            step(s, &tick, now, &u, incarnations);
        }
        now = until > now ? until : now;
        struct swim_event e = {
            .type = what & 4 ? SWIM_EVENT_DATAGRAM : SWIM_EVENT_MESSAGE,
            .peer = net_make_id(1 + (what & 3)),
            .path = what & 4,
            .bytes = data,
            .len = len,
        };
        step(s, &e, now, &u, incarnations);
        data += len;
        size -= len;
    }
    swim_update_deinit(&u);
    swim_free(s);
    return 0;
}
