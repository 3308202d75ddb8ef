/* Connections of a peer are cut from another thread's hand, and only those. */
#include "agent/peer_fds.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

static struct node_id id_of(int who)
{
    struct node_id id;
    memset(id.bytes, who, sizeof id.bytes);
    return id;
}

static int end_of(const int pair[2])
{
    char c;
    return (int)recv(pair[1], &c, 1, MSG_DONTWAIT);
}

static void test_cut_ends_those_of_the_peer(void **state)
{
    (void)state;
    struct peer_fds *p = NULL;
    struct node_id ann = id_of(1), bob = id_of(2);
    int pairs[4][2];
    assert_int_equal(peer_fds_new(&p), ERR_OK);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pairs[i]), 0);
        assert_int_equal(peer_fds_add(p, i == 1 ? &bob : &ann, pairs[i][0]), ERR_OK);
    }
    peer_fds_remove(p, pairs[2][0]); /* its owner is about to close it */
    peer_fds_remove(p, 12345);
    peer_fds_cut(p, &ann);
    assert_int_equal(end_of(pairs[0]), 0); /* the end of the stream */
    assert_int_equal(end_of(pairs[1]), -1);
    assert_int_equal(end_of(pairs[2]), -1);
    assert_int_equal(end_of(pairs[3]), 0);
    peer_fds_cut_all(p);
    assert_int_equal(end_of(pairs[1]), 0);
    assert_int_equal(end_of(pairs[2]), -1);
    for (int i = 0; i < 4; i++) {
        (void)close(pairs[i][0]);
        (void)close(pairs[i][1]);
    }
    peer_fds_free(p);
}

static void test_full_table_says_so(void **state)
{
    (void)state;
    struct peer_fds *p = NULL;
    struct node_id ann = id_of(1);
    assert_int_equal(peer_fds_new(&p), ERR_OK);
    for (int i = 0; i < PEER_FDS_MAX; i++)
        assert_int_equal(peer_fds_add(p, &ann, 1000 + i), ERR_OK);
    assert_int_equal(peer_fds_add(p, &ann, 5), ERR_LIMIT);
    peer_fds_remove(p, 1000);
    assert_int_equal(peer_fds_add(p, &ann, 5), ERR_OK);
    peer_fds_free(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cut_ends_those_of_the_peer),
        cmocka_unit_test(test_full_table_says_so),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
