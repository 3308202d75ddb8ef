#include "transport/mailbox.h"

#include "base/util.h"

#include <setjmp.h>
#include <stdarg.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include <cmocka.h>

enum { SENDERS = 4, EACH = 2000 };

static void wait_mail(struct mailbox *m, struct mail *ret)
{
    while (mailbox_receive(m, ret) == ERR_AGAIN) {
        struct pollfd p = {mailbox_fd(m), POLLIN, 0};
        assert_int_equal(poll(&p, 1, 10000), 1);
    }
}

struct job {
    struct mailbox_sender *sender;
    uint32_t number;
};

static void *send_many(void *context)
{
    struct job *j = context;
    for (uint32_t i = 0; i < EACH; i++) {
        uint32_t body[2] = {j->number, i};
        while (mailbox_send(j->sender, 7, body, sizeof body) == ERR_BUSY)
            (void)poll(NULL, 0, 1);
    }
    return NULL;
}

static void test_threads_send_in_order(void **state)
{
    (void)state;
    struct mailbox *m;
    assert_int_equal(mailbox_new("test-order", &m), ERR_OK);
    struct job jobs[SENDERS];
    pthread_t threads[SENDERS];
    for (uint32_t i = 0; i < SENDERS; i++) {
        jobs[i].number = i;
        assert_int_equal(mailbox_sender_new(m, &jobs[i].sender), ERR_OK);
    }
    for (int i = 0; i < SENDERS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, send_many, &jobs[i]), 0);
    uint32_t seen[SENDERS] = {0};
    for (int i = 0; i < SENDERS * EACH; i++) {
        struct mail mail = {.type = 0};
        uint32_t body[2];
        wait_mail(m, &mail);
        assert_int_equal(mail.type, 7);
        assert_int_equal(mail.n, sizeof body);
        assert_int_equal((uintptr_t)mail.bytes % 16, 0);
        memcpy(body, mail.bytes, sizeof body);
        assert_true(body[0] < SENDERS);
        assert_int_equal(body[1], seen[body[0]]++);
        mail_clear(&mail);
    }
    for (int i = 0; i < SENDERS; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        mailbox_sender_free(jobs[i].sender);
    }
    mailbox_free(m);
}

/* What is sent counts there when it is dropped. */
static void count_drop(void *p)
{
    (*(int *)p)++;
}

static void test_owned_pointers_change_hands(void **state)
{
    (void)state;
    struct mailbox *m;
    struct mailbox_sender *s;
    assert_int_equal(mailbox_new("test-owned", &m), ERR_OK);
    assert_int_equal(mailbox_sender_new(m, &s), ERR_OK);
    int n_dropped = 0;
    for (int i = 0; i < 3; i++)
        assert_int_equal(mailbox_send_owned(s, 1, NULL, 0, &n_dropped, count_drop), ERR_OK);
    struct mail mail = {.n = 1};
    wait_mail(m, &mail);
    assert_int_equal(mail.n, 0);
    assert_ptr_equal(TAKE(mail.owned), &n_dropped);
    mail_clear(&mail);
    assert_int_equal(n_dropped, 0);
    wait_mail(m, &mail);
    mail_clear(&mail);
    assert_int_equal(n_dropped, 1);
    mailbox_free(m); /* the third was never read */
    assert_int_equal(n_dropped, 2);
    assert_int_equal(mailbox_send_owned(s, 1, NULL, 0, &n_dropped, count_drop), ERR_BUSY);
    mailbox_sender_free(s);
}

static void test_mail_outlives_its_sender(void **state)
{
    (void)state;
    struct mailbox *m;
    struct mailbox_sender *s;
    int n_dropped = 0;
    assert_int_equal(mailbox_new("test-outlive", &m), ERR_OK);
    assert_int_equal(mailbox_sender_new(m, &s), ERR_OK);
    for (uint32_t i = 0; i < 5; i++)
        assert_int_equal(mailbox_send_owned(s, i, NULL, 0, &n_dropped, count_drop), ERR_OK);
    mailbox_sender_free(s);
    for (uint32_t i = 0; i < 3; i++) {
        struct mail mail = {.type = 99};
        wait_mail(m, &mail);
        assert_int_equal(mail.type, i);
        mail_clear(&mail);
    }
    mailbox_free(m);
    assert_int_equal(n_dropped, 5);
}

static void test_mailbox_is_bounded(void **state)
{
    (void)state;
    struct mailbox *m;
    struct mailbox_sender *s;
    static uint8_t big[MAIL_BYTES_MAX + 1];
    assert_int_equal(mailbox_new("test-bound", &m), ERR_OK);
    assert_int_equal(mailbox_sender_new(m, &s), ERR_OK);
    assert_int_equal(mailbox_send(s, 1, big, sizeof big), ERR_LIMIT);
    unsigned n = 0;
    enum err e;
    memset(big, 5, sizeof big);
    while ((e = mailbox_send(s, n, big, MAIL_BYTES_MAX)) == ERR_OK && n < 1000)
        n++;
    assert_int_equal(e, ERR_BUSY);
    assert_true(n >= 8 && n <= MAILBOX_QUEUE_BYTES / MAIL_BYTES_MAX + 2);
    struct mail mail = {.type = 0};
    for (unsigned i = 0; i < n; i++) {
        wait_mail(m, &mail);
        assert_int_equal(mail.type, i);
        assert_int_equal(mail.n, MAIL_BYTES_MAX);
        assert_memory_equal(mail.bytes, big, MAIL_BYTES_MAX);
    }
    assert_int_equal(mailbox_receive(m, &mail), ERR_AGAIN);
    assert_int_equal(mailbox_send(s, 1, NULL, 0), ERR_OK);
    wait_mail(m, &mail);
    mailbox_sender_free(s);
    mailbox_free(m);
}

static void test_names_are_checked(void **state)
{
    (void)state;
    struct mailbox *m, *other;
    char name[MAILBOX_NAME_MAX + 1];
    memset(name, 'x', sizeof name);
    name[MAILBOX_NAME_MAX] = 0;
    assert_int_equal(mailbox_new("", &m), ERR_INVALID);
    assert_int_equal(mailbox_new(name, &m), ERR_INVALID);
    assert_int_equal(mailbox_new("test-name", &m), ERR_OK);
    assert_int_equal(mailbox_new("test-name", &other), ERR_EXISTS);
    mailbox_free(m);
}

/* Many senders at start, as the agent has. */
static void test_many_senders(void **state)
{
    (void)state;
    struct mailbox *m;
    struct mailbox_sender *s[100] = {NULL};
    assert_int_equal(mailbox_new("test-many", &m), ERR_OK);
    for (unsigned i = 0; i < ARRAY_LEN(s); i++)
        assert_int_equal(mailbox_sender_new(m, &s[i]), ERR_OK);
    for (unsigned i = 0; i < ARRAY_LEN(s); i++)
        assert_int_equal(mailbox_send(s[i], i, NULL, 0), ERR_OK);
    unsigned sum = 0;
    for (unsigned i = 0; i < ARRAY_LEN(s); i++) {
        struct mail mail = {.type = 0};
        wait_mail(m, &mail);
        sum += mail.type;
    }
    assert_int_equal(sum, 4950);
    for (unsigned i = 0; i < ARRAY_LEN(s); i++)
        mailbox_sender_free(s[i]);
    mailbox_free(m);
}

/* nanomsg must not open anything that a network can reach: every descriptor of this process that is
 * a socket is of the local family. */
static void test_no_network_sockets(void **state)
{
    (void)state;
    struct mailbox *m;
    struct mailbox_sender *s;
    assert_int_equal(mailbox_new("test-network", &m), ERR_OK);
    assert_int_equal(mailbox_sender_new(m, &s), ERR_OK);
    assert_int_equal(mailbox_send(s, 1, "x", 1), ERR_OK);
    int n_seen = 0;
    for (int fd = 0; fd < 1024; fd++) {
        struct sockaddr_storage a = {0};
        socklen_t n = sizeof a;
        if (fcntl(fd, F_GETFD) < 0)
            continue;
        n_seen++;
        if (getsockname(fd, (struct sockaddr *)&a, &n) == 0)
            assert_int_equal(a.ss_family, AF_UNIX);
    }
    assert_true(n_seen > 3);
    struct mail mail = {.type = 0};
    wait_mail(m, &mail);
    mailbox_sender_free(s);
    mailbox_free(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_threads_send_in_order),
        cmocka_unit_test(test_owned_pointers_change_hands),
        cmocka_unit_test(test_mail_outlives_its_sender),
        cmocka_unit_test(test_mailbox_is_bounded),
        cmocka_unit_test(test_names_are_checked),
        cmocka_unit_test(test_many_senders),
        cmocka_unit_test(test_no_network_sockets),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
