/* Mailboxes between the threads of the agent: nanomsg, inproc PUSH/PULL, and nowhere on a network.
 *
 * A mailbox is bound once at start, before any sender is made, and closed only at exit
 * (nanomsg 1.1.5 aborts when inproc binding, connecting and closing race; facts: issue of the
 * library, measured). The types keep the order: a sender is made from a mailbox. A mailbox is read
 * by one thread; each sending thread has a sender of its own. */
#ifndef COVEY_TRANSPORT_MAILBOX_H
#define COVEY_TRANSPORT_MAILBOX_H

#include "base/err.h"

#include <stddef.h>
#include <stdint.h>

enum {
    MAIL_BYTES_MAX = 64 << 10,
    MAILBOX_QUEUE_BYTES = 1 << 20, /* waiting in one mailbox; then senders get ERR_BUSY */
    MAILBOX_NAME_MAX = 48,
};

struct mailbox;
struct mailbox_sender;

/* One message received. */
struct mail {
    uint32_t type;     /* the receiver's own enumeration */
    uint32_t n;        /* bytes */
    const void *bytes; /* [n], aligned for any type, until the next receive from this mailbox */
    void *owned;       /* NULL, or a pointer that is now the receiver's */
    void (*drop)(void *owned);
};

/* Frees `owned` where it was not taken (TAKE(m->owned)). */
void mail_clear(struct mail *m);

/* Binds. The name is unique within the process. ERR_EXISTS, ERR_INVALID (name), ERR_NO_MEMORY,
 * ERR_IO. */
enum err mailbox_new(const char *name, struct mailbox **ret);
/* Drops what was not read. Senders that are still there can only be freed then. */
void mailbox_free(struct mailbox *m);

/* Readable when there is mail (for poll, uv_poll); owned by the mailbox. Once it fires, receive
 * until ERR_AGAIN. */
int mailbox_fd(const struct mailbox *m);

/* ERR_AGAIN: empty. */
enum err mailbox_receive(struct mailbox *m, struct mail *ret);

/* ERR_NO_MEMORY, ERR_IO, ERR_TIMEOUT. */
enum err mailbox_sender_new(struct mailbox *m, struct mailbox_sender **ret);
/* What it sent can still be read: nanomsg would lose that, so its socket stays until the mailbox
 * goes. Hence senders are few and made at start. */
void mailbox_sender_free(struct mailbox_sender *s);

/* Copies a small struct (n <= MAIL_BYTES_MAX; NULL and 0: just the type). Never blocks. ERR_BUSY:
 * the mailbox is full. ERR_LIMIT. */
enum err mailbox_send(struct mailbox_sender *s, uint32_t type, const void *bytes, size_t n);

/* The same, and hands over `owned`, which `drop` would free; on failure it stays the sender's. */
enum err mailbox_send_owned(struct mailbox_sender *s, uint32_t type, const void *bytes, size_t n,
                            void *owned, void (*drop)(void *owned));

#endif
