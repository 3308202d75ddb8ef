#include "transport/mailbox.h"

#include "base/clock.h"
#include "base/util.h"

#include <errno.h>
#include <nanomsg/nn.h>
#include <nanomsg/pipeline.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum {
    URL_MAX = 16 + MAILBOX_NAME_MAX,
    CONNECT_MS_MAX =
        5000, /* inproc connects at once; this is for a machine that is out of breath */
};

/* What stands before the bytes of each message. */
struct head {
    _Alignas(16) uint32_t type; /* so that what follows is aligned for any type */
    uint32_t n;
    void *owned;
    void (*drop)(void *owned);
};

struct mailbox {
    int socket, fd;
    pthread_mutex_t lock;           /* of the three below */
    struct mailbox_sender *retired; /* freed by their owners; their mail may not be read yet */
    unsigned n_users;               /* the reader and each sender in use */
    bool closed;
    char url[URL_MAX];
    _Alignas(16) uint8_t message[sizeof(struct head) + MAIL_BYTES_MAX];
};

struct mailbox_sender {
    int socket;
    struct mailbox *mailbox;
    struct mailbox_sender *next;
};

static enum err error_of(int number)
{
    switch (number) {
    case EADDRINUSE:
        return ERR_EXISTS;
    case ENOMEM:
    case EMFILE:
        return ERR_NO_MEMORY;
    default:
        return ERR_IO;
    }
}

void mail_clear(struct mail *m)
{
    if (m->owned && m->drop)
        m->drop(m->owned);
    m->owned = NULL;
}

/* The last one out frees it. */
static void leave(struct mailbox *m)
{
    (void)pthread_mutex_lock(&m->lock);
    bool last = --m->n_users == 0;
    (void)pthread_mutex_unlock(&m->lock);
    if (!last)
        return;
    (void)pthread_mutex_destroy(&m->lock);
    free(m);
}

static void sender_close(struct mailbox_sender *s)
{
    if (s->socket >= 0)
        (void)nn_close(s->socket);
    free(s);
}

static enum err mailbox_open(struct mailbox *m)
{
    m->socket = nn_socket(AF_SP, NN_PULL);
    if (m->socket < 0)
        return error_of(errno);
    int bytes = MAILBOX_QUEUE_BYTES;
    size_t n = sizeof m->fd;
    if (nn_setsockopt(m->socket, NN_SOL_SOCKET, NN_RCVBUF, &bytes, sizeof bytes) < 0 ||
        nn_bind(m->socket, m->url) < 0 ||
        nn_getsockopt(m->socket, NN_SOL_SOCKET, NN_RCVFD, &m->fd, &n) < 0)
        return error_of(errno);
    return ERR_OK;
}

enum err mailbox_new(const char *name, struct mailbox **ret)
{
    if (!name || !*name || strlen(name) >= MAILBOX_NAME_MAX)
        return ERR_INVALID;
    struct mailbox *m = calloc(1, sizeof *m);
    if (!m)
        return ERR_NO_MEMORY;
    if (pthread_mutex_init(&m->lock, NULL) != 0) {
        free(m);
        return ERR_NO_MEMORY;
    }
    m->n_users = 1;
    (void)snprintf(m->url, sizeof m->url, "inproc://%s", name);
    enum err e = mailbox_open(m);
    if (e != ERR_OK) {
        if (m->socket >= 0)
            (void)nn_close(m->socket);
        leave(m);
        return e;
    }
    *ret = m;
    return ERR_OK;
}

void mailbox_free(struct mailbox *m)
{
    if (!m)
        return;
    struct mail mail;
    while (mailbox_receive(m, &mail) == ERR_OK)
        mail_clear(&mail);
    (void)pthread_mutex_lock(&m->lock);
    m->closed = true;
    struct mailbox_sender *retired = TAKE(m->retired);
    (void)pthread_mutex_unlock(&m->lock);
    for (struct mailbox_sender *s; (s = retired) != NULL;) {
        retired = s->next;
        sender_close(s);
    }
    (void)nn_close(m->socket);
    leave(m);
}

int mailbox_fd(const struct mailbox *m)
{
    return m->fd;
}

enum err mailbox_receive(struct mailbox *m, struct mail *ret)
{
    int n;
    do {
        n = nn_recv(m->socket, m->message, sizeof m->message, NN_DONTWAIT);
    } while (n < 0 && errno == EINTR);
    if (n < 0)
        return errno == EAGAIN ? ERR_AGAIN : ERR_IO;
    struct head head;
    if ((size_t)n < sizeof head)
        return ERR_IO;
    memcpy(&head, m->message, sizeof head);
    *ret = (struct mail){head.type, head.n, m->message + sizeof head, head.owned, head.drop};
    return ERR_OK;
}

/* Sending works once the pipe to the mailbox is there. */
static enum err wait_connected(int socket)
{
    int fd;
    size_t n = sizeof fd;
    if (nn_getsockopt(socket, NN_SOL_SOCKET, NN_SNDFD, &fd, &n) < 0)
        return error_of(errno);
    uint64_t due = clock_monotonic_us() + CONNECT_MS_MAX * 1000ull;
    while (clock_monotonic_us() < due) {
        struct pollfd p = {fd, POLLIN, 0};
        int got = poll(&p, 1, CONNECT_MS_MAX);
        if (got > 0)
            return ERR_OK;
        if (got < 0 && errno != EINTR)
            return ERR_IO;
    }
    return ERR_TIMEOUT;
}

enum err mailbox_sender_new(struct mailbox *m, struct mailbox_sender **ret)
{
    struct mailbox_sender *s = calloc(1, sizeof *s);
    if (!s)
        return ERR_NO_MEMORY;
    enum err e = ERR_OK;
    s->socket = nn_socket(AF_SP, NN_PUSH);
    if (s->socket < 0 || nn_connect(s->socket, m->url) < 0)
        e = error_of(errno);
    else
        e = wait_connected(s->socket);
    if (e != ERR_OK) {
        sender_close(s);
        return e;
    }
    s->mailbox = m;
    (void)pthread_mutex_lock(&m->lock);
    m->n_users++;
    (void)pthread_mutex_unlock(&m->lock);
    *ret = s;
    return ERR_OK;
}

void mailbox_sender_free(struct mailbox_sender *s)
{
    if (!s)
        return;
    struct mailbox *m = s->mailbox;
    (void)pthread_mutex_lock(&m->lock);
    bool closed = m->closed;
    if (!closed) {
        s->next = m->retired;
        m->retired = s;
    }
    (void)pthread_mutex_unlock(&m->lock);
    if (closed)
        sender_close(s);
    leave(m);
}

enum err mailbox_send_owned(struct mailbox_sender *s, uint32_t type, const void *bytes, size_t n,
                            void *owned, void (*drop)(void *owned))
{
    if (n > MAIL_BYTES_MAX)
        return ERR_LIMIT;
    struct head head = {.type = type, .n = (uint32_t)n, .owned = owned, .drop = drop};
    struct nn_iovec pieces[2] = {{&head, sizeof head}, {(void *)(uintptr_t)bytes, n}};
    struct nn_msghdr message = {.msg_iov = pieces, .msg_iovlen = n ? 2 : 1};
    int sent;
    do {
        sent = nn_sendmsg(s->socket, &message, NN_DONTWAIT);
    } while (sent < 0 && errno == EINTR);
    if (sent >= 0)
        return ERR_OK;
    return errno == EAGAIN ? ERR_BUSY : errno == ENOMEM ? ERR_NO_MEMORY : ERR_IO;
}

enum err mailbox_send(struct mailbox_sender *s, uint32_t type, const void *bytes, size_t n)
{
    return mailbox_send_owned(s, type, bytes, n, NULL, NULL);
}
