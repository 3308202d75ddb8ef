/* Who is at the other end of a local socket. One file per system. */
#ifndef COVEY_AGENT_PEER_CREDENTIALS_H
#define COVEY_AGENT_PEER_CREDENTIALS_H

#include <stdbool.h>

/* True when the process at the other end runs as our user, or as root. */
bool peer_is_our_user(int fd);

#endif
