#include "agent/peer_credentials.h"

#include <sys/types.h>
#include <unistd.h>

bool peer_is_our_user(int fd)
{
    uid_t uid;
    gid_t gid;
    return getpeereid(fd, &uid, &gid) == 0 && (uid == getuid() || uid == 0);
}
