#include "agent/peer_credentials.h"

#include <sys/socket.h>
#include <unistd.h>

bool peer_is_our_user(int fd)
{
    struct ucred who;
    socklen_t n = sizeof who;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &n) == 0 &&
           (who.uid == getuid() || who.uid == 0);
}
