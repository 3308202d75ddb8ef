#include "agent/peer_fds.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/socket.h>

struct peer_fds {
    pthread_mutex_t mutex;
    uint32_t n;
    int fds[PEER_FDS_MAX];
    struct node_id peers[PEER_FDS_MAX];
};

enum err peer_fds_new(struct peer_fds **ret)
{
    struct peer_fds *p = calloc(1, sizeof *p);
    if (!p)
        return ERR_NO_MEMORY;
    (void)pthread_mutex_init(&p->mutex, NULL);
    *ret = p;
    return ERR_OK;
}

void peer_fds_free(struct peer_fds *p)
{
    if (!p)
        return;
    (void)pthread_mutex_destroy(&p->mutex);
    free(p);
}

enum err peer_fds_add(struct peer_fds *p, const struct node_id *peer, int fd)
{
    (void)pthread_mutex_lock(&p->mutex);
    enum err e = p->n < PEER_FDS_MAX ? ERR_OK : ERR_LIMIT;
    if (e == ERR_OK) {
        p->fds[p->n] = fd;
        p->peers[p->n++] = *peer;
    }
    (void)pthread_mutex_unlock(&p->mutex);
    return e;
}

void peer_fds_remove(struct peer_fds *p, int fd)
{
    (void)pthread_mutex_lock(&p->mutex);
    for (uint32_t i = 0; i < p->n; i++) {
        if (p->fds[i] != fd)
            continue;
        p->fds[i] = p->fds[--p->n];
        p->peers[i] = p->peers[p->n];
        break;
    }
    (void)pthread_mutex_unlock(&p->mutex);
}

/* NULL: all peers. */
static void cut(struct peer_fds *p, const struct node_id *peer)
{
    (void)pthread_mutex_lock(&p->mutex);
    for (uint32_t i = 0; i < p->n; i++) {
        if (!peer || node_id_eq(&p->peers[i], peer))
            (void)shutdown(p->fds[i], SHUT_RDWR);
    }
    (void)pthread_mutex_unlock(&p->mutex);
}

void peer_fds_cut(struct peer_fds *p, const struct node_id *peer)
{
    cut(p, peer);
}

void peer_fds_cut_all(struct peer_fds *p)
{
    cut(p, NULL);
}
