/* The data connections that are open, by peer, so that all of one peer can be cut at once from the
 * loop thread while other threads use them: when its membership ends (PROTOCOL 1.5).
 *
 * Who has a connection stays its owner: adds it before use, takes it out before closing it. */
#ifndef COVEY_AGENT_PEER_FDS_H
#define COVEY_AGENT_PEER_FDS_H

#include "base/err.h"
#include "base/id.h"

enum { PEER_FDS_MAX = 256 };

struct peer_fds;

enum err peer_fds_new(struct peer_fds **ret);
void peer_fds_free(struct peer_fds *p);
/* From any thread. ERR_LIMIT: too many are open; use no connection that is not in. */
enum err peer_fds_add(struct peer_fds *p, const struct node_id *peer, int fd);
/* Nothing happens when it is not in. */
void peer_fds_remove(struct peer_fds *p, int fd);
/* Shuts down every connection with the peer, both ways: reading and writing them end at once. */
void peer_fds_cut(struct peer_fds *p, const struct node_id *peer);
/* All peers': this node stops, and nobody shall wait for a transfer. */
void peer_fds_cut_all(struct peer_fds *p);

#endif
