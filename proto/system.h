/* What operating systems do differently for key files: one .c per system. Private to proto. */
#ifndef COVEY_PROTO_SYSTEM_H
#define COVEY_PROTO_SYSTEM_H

#include "base/err.h"

#include <stddef.h>
#include <stdint.h>

enum { MACHINE_ID_MAX = 64 };

/* The machine's own id as raw bytes. ERR_NOT_FOUND where there is none. */
enum err system_machine_id(uint8_t ret[MACHINE_ID_MAX], size_t *ret_n);

#endif
