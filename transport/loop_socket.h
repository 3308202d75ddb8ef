/* What the shells on the loop share: opening and binding plain sockets. Private to transport. */
#ifndef COVEY_TRANSPORT_LOOP_SOCKET_H
#define COVEY_TRANSPORT_LOOP_SOCKET_H

#include "base/err.h"
#include "transport/net.h"

#include <stdint.h>

/* Non-blocking and close-on-exec; type as in socket(). ERR_UNSUPPORTED: no such family here. */
enum err loop_socket_open(uint8_t family, int type, int *ret_fd);
enum err loop_socket_prepare(int fd);

enum { LOOP_SOCKET_BOTH = 2 };

/* Opens and binds a socket of each family that the machine has to one port (0: any free), on all
 * addresses; absent ones are -1. ERR_EXISTS, ERR_DENIED, ERR_IO, with a sentence. */
enum err loop_socket_bind_both(int type, uint16_t port, int ret_fds[LOOP_SOCKET_BOTH],
                               uint16_t *ret_port, struct err_text *text);

enum err loop_socket_error(int number);

#endif
