#include "transport/loop_socket.h"

#include "base/util.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>

enum { ANY_PORT_TRIES = 16 };

enum err loop_socket_error(int number)
{
    switch (number) {
    case 0:
        return ERR_OK;
    case ECONNREFUSED:
    case ECONNRESET:
    case EPIPE:
        return ERR_CLOSED;
    case ETIMEDOUT:
        return ERR_TIMEOUT;
    case ENETUNREACH:
    case EHOSTUNREACH:
    case ENETDOWN:
    case EHOSTDOWN:
    case EADDRNOTAVAIL:
    case ENODEV:
    case ENXIO:
    case EINVAL: /* a link-local address without its scope */
        return ERR_NOT_FOUND;
    case EACCES:
    case EPERM:
        return ERR_DENIED;
    case EADDRINUSE:
        return ERR_EXISTS;
    case EAFNOSUPPORT:
    case EPROTONOSUPPORT:
        return ERR_UNSUPPORTED;
    case ENOMEM:
        return ERR_NO_MEMORY;
    case EMFILE:
    case ENFILE:
        return ERR_LIMIT;
    default:
        return ERR_IO;
    }
}

enum err loop_socket_prepare(int fd)
{
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ||
        fcntl(fd, F_SETFD, FD_CLOEXEC) < 0)
        return ERR_IO;
#ifdef SO_NOSIGPIPE
    int on = 1;
    (void)setsockopt(fd, SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof on);
#endif
    return ERR_OK;
}

enum err loop_socket_open(uint8_t family, int type, int *ret_fd)
{
    int fd = socket(family == NET_IPV4 ? AF_INET : AF_INET6, type, 0);
    if (fd < 0)
        return loop_socket_error(errno);
    enum err e = loop_socket_prepare(fd);
    if (e != ERR_OK) {
        (void)close(fd);
        return e;
    }
    *ret_fd = fd;
    return ERR_OK;
}

static enum err bind_one(uint8_t family, int type, uint16_t *port, int *ret_fd)
{
    int fd = -1, on = 1;
    TRY(loop_socket_open(family, type, &fd));
    struct address any = {.family = family, .port = *port};
    struct sockaddr_storage a;
    socklen_t n = net_address_to(&any, &a);
    if (type == SOCK_STREAM)
        (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (family == NET_IPV6)
        (void)setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
    if (bind(fd, (struct sockaddr *)&a, n) < 0 ||
        (type == SOCK_STREAM && listen(fd, SOMAXCONN) < 0) ||
        getsockname(fd, (struct sockaddr *)&a, &n) < 0) {
        enum err e = loop_socket_error(errno);
        (void)close(fd);
        return e;
    }
    TRY(net_address_of(&a, &any));
    *port = any.port;
    *ret_fd = fd;
    return ERR_OK;
}

/* The machine lacks this family, or has it without any address. */
static bool family_absent(enum err e)
{
    return e == ERR_UNSUPPORTED || e == ERR_NOT_FOUND;
}

static enum err bind_both(int type, uint16_t *port, int fds[LOOP_SOCKET_BOTH])
{
    fds[0] = fds[1] = -1;
    enum err e = bind_one(NET_IPV6, type, port, &fds[0]);
    if (e != ERR_OK && !family_absent(e))
        return e;
    e = bind_one(NET_IPV4, type, port, &fds[1]);
    if (e == ERR_OK || (family_absent(e) && fds[0] >= 0))
        return ERR_OK;
    closep(&fds[0]);
    return e;
}

enum err loop_socket_bind_both(int type, uint16_t port, int ret_fds[LOOP_SOCKET_BOTH],
                               uint16_t *ret_port, struct err_text *text)
{
    enum err e = ERR_EXISTS;
    int fds[LOOP_SOCKET_BOTH];
    for (int i = 0; e == ERR_EXISTS && i < (port ? 1 : ANY_PORT_TRIES); i++) {
        uint16_t p = port;
        e = bind_both(type, &p, fds);
        if (e == ERR_OK) {
            memcpy(ret_fds, fds, sizeof fds);
            *ret_port = p;
        }
    }
    const char *what = type == SOCK_STREAM ? "TCP" : "UDP";
    if (e == ERR_EXISTS)
        return err_set(text, e, "%s port %u is taken by another program", what, port);
    if (e == ERR_DENIED)
        return err_set(text, e, "the system does not let us use %s port %u", what, port);
    if (e != ERR_OK)
        return err_set(text, e, "cannot listen on %s port %u: %s", what, port, strerror(errno));
    return ERR_OK;
}
