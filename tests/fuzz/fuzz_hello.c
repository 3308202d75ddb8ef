/* The opening of the data port, with the secret that the corpus was made for. The first byte says
 * whether the rest is what an initiator sends (HELLO, proof) or what a responder answers. */
#include "transport/hello.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const struct hello_facts facts = {1, 3, HELLO_AES, 7, 0xabcdef, 1 << 20, 0x3fe};

static struct hello_key key_of(int end)
{
    struct hello_key k = {.peer = {{(uint8_t)(end ? 1 : 2)}},
                          .own_boot_id = end ? 0x2222 : 0x1111,
                          .peer_boot_id = end ? 0x1111 : 0x2222};
    for (int i = 0; i < 32; i++)
        k.secret[i] = (uint8_t)(100 + i);
    return k;
}

static void feed(struct hello *h, const uint8_t *data, size_t size)
{
    struct hello_update u;
    while (hello_wants(h) > 0 && hello_wants(h) <= size) {
        size_t n = hello_wants(h);
        if (hello_step(h, data, n, &u) != ERR_OK)
            return;
        if (u.done) {
            struct hello_result r;
            hello_result_get(h, &r);
            if (r.kind < HELLO_DATA || r.kind >= HELLO_KIND_N || r.protocol < 1)
                abort();
        }
        data += n;
        size -= n;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct hello_gate *gate;
    struct hello *h;
    struct hello_update u;
    struct hello_key own = key_of(size > 0 && (data[0] & 1)), other = own;
    if (size == 0 || hello_gate_new(&gate) != ERR_OK)
        return 0;
    other.secret[0]++;
    if (hello_gate_add(gate, &own) != ERR_OK || hello_gate_add(gate, &other) != ERR_OK)
        abort();
    if (data[0] & 1) {
        if (hello_new_responder(gate, &facts, (const uint8_t *)"RRRRRRRRRRRRRRRR", &h) != ERR_OK)
            abort();
    } else {
        if (hello_new_initiator(&own, HELLO_DATA, &facts, (const uint8_t *)"IIIIIIIIIIIIIIII",
                                &h) != ERR_OK ||
            hello_step(h, NULL, 0, &u) != ERR_OK)
            abort();
    }
    feed(h, data + 1, size - 1);
    hello_free(h);
    hello_gate_free(gate);
    return 0;
}
