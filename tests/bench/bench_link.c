/* One-way latency of sealed frames between two processes over loopback TCP (half a round trip), for
 * frames of 64 B and 16 KiB with either cipher, spinning and not; then throughput of large frames.
 * Run: bench_link [rounds]. Least and median of the rounds, in microseconds. */
#include "base/clock.h"
#include "base/util.h"
#include "transport/link_tcp.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>

enum { LARGE = 8 << 20, N_LARGE = 16, WAIT_US = 10 * 1000 * 1000, ROUNDS_MAX = 100000 };

static void demand(bool so, const char *what)
{
    if (so)
        return;
    perror(what);
    exit(1);
}

static void tcp_pair(int ret[2])
{
    int l = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof a;
    demand(bind(l, (struct sockaddr *)&a, n) == 0 && listen(l, 1) == 0 &&
               getsockname(l, (struct sockaddr *)&a, &n) == 0,
           "listen");
    ret[0] = socket(AF_INET, SOCK_STREAM, 0);
    demand(connect(ret[0], (struct sockaddr *)&a, n) == 0, "connect");
    ret[1] = accept(l, NULL, NULL);
    demand(ret[1] >= 0, "accept");
    (void)close(l);
}

static struct link *link_on(int fd, int end, uint8_t cipher)
{
    struct link_tcp_options o = {.fd = fd, .keys.cipher = cipher, .frame_bytes_max = LARGE};
    memset(o.keys.send, end ? 2 : 1, sizeof o.keys.send);
    memset(o.keys.receive, end ? 1 : 2, sizeof o.keys.receive);
    struct link *l;
    demand(link_tcp_new(&o, &l) == ERR_OK, "link");
    return l;
}

static enum err receive(struct link *l, uint32_t spin_us, const uint8_t **bytes, size_t *n)
{
    enum err e;
    struct link_ready ready;
    while ((e = link_receive(l, bytes, n)) == ERR_AGAIN) {
        e = link_wait(&l, 1, -1, WAIT_US, spin_us, &ready);
        if (e != ERR_OK)
            break;
    }
    return e;
}

static void send_all(struct link *l, const void *bytes, size_t n)
{
    struct link_piece p = {bytes, n};
    enum err e;
    while ((e = link_send(l, &p, 1)) == ERR_AGAIN)
        demand(link_flush_wait(l, WAIT_US) == ERR_OK, "flush");
    demand(e == ERR_OK, "send");
}

/* The other process: sends back what is small, and the header of what is large. */
static void echo(struct link *l, uint32_t spin_us)
{
    const uint8_t *bytes;
    size_t n;
    static uint8_t small[64] = {64};
    while (receive(l, spin_us, &bytes, &n) == ERR_OK) {
        if (n <= 1 << 16)
            send_all(l, bytes, n);
        else
            send_all(l, small, sizeof small);
    }
}

static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static void latency(struct link *l, size_t n, uint32_t spin_us, unsigned rounds)
{
    static uint64_t us[ROUNDS_MAX];
    static uint8_t frame[1 << 16];
    struct writer w = writer_of(frame, 4);
    write_u32(&w, (uint32_t)n);
    for (unsigned i = 0; i < rounds; i++) {
        const uint8_t *got;
        size_t n_got;
        uint64_t begin = clock_monotonic_us();
        send_all(l, frame, n);
        demand(receive(l, spin_us, &got, &n_got) == ERR_OK, "receive");
        us[i] = clock_monotonic_us() - begin;
    }
    qsort(us, rounds, sizeof us[0], by_value);
    uint64_t p50 = us[rounds / 2], p99 = us[rounds * 99 / 100];
    (void)printf("  %6zu B  spin %2u us   min %5.1f   p50 %5.1f   p99 %6.1f\n", n, spin_us,
                 (double)us[0] / 2, (double)p50 / 2, (double)p99 / 2);
}

static void throughput(struct link *l)
{
    uint8_t *frame = calloc(1, LARGE);
    demand(frame != NULL, "memory");
    struct writer w = writer_of(frame, 4);
    write_u32(&w, LARGE);
    uint64_t begin = clock_monotonic_us();
    for (int i = 0; i < N_LARGE; i++) {
        const uint8_t *got;
        size_t n;
        send_all(l, frame, LARGE);
        demand(link_flush_wait(l, WAIT_US) == ERR_OK, "flush");
        demand(receive(l, 0, &got, &n) == ERR_OK, "receive");
    }
    uint64_t us = clock_monotonic_us() - begin;
    (void)printf("  frames of 8 MiB: %.0f MB/s\n", (double)LARGE * N_LARGE / (double)us);
    free(frame);
}

static void bench(uint8_t cipher, uint32_t spin_us, unsigned rounds)
{
    int fds[2];
    tcp_pair(fds);
    pid_t child = fork();
    demand(child >= 0, "fork");
    if (child == 0) {
        (void)close(fds[0]);
        echo(link_on(fds[1], 1, cipher), spin_us);
        _exit(0);
    }
    (void)close(fds[1]);
    struct link *l = link_on(fds[0], 0, cipher);
    (void)printf("%s\n", cipher == SEAL_AES_256_GCM ? "AES-256-GCM" : "ChaCha20-Poly1305");
    latency(l, 64, spin_us, rounds);
    latency(l, 16384, spin_us, rounds);
    throughput(l);
    link_free(l);
    (void)waitpid(child, NULL, 0);
}

int main(int argc, char **argv)
{
    unsigned rounds = argc > 1 ? (unsigned)strtoul(argv[1], NULL, 10) : 5000;
    rounds = MAX_OF(MIN_OF(rounds, (unsigned)ROUNDS_MAX), 1u);
    for (uint32_t spin_us = 0; spin_us <= 40; spin_us += 40) {
        bench(SEAL_CHACHA20_POLY1305, spin_us, rounds);
        if (seal_has_aes())
            bench(SEAL_AES_256_GCM, spin_us, rounds);
    }
    return 0;
}
