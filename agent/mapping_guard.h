/* Weights are read through a file mapping. Where the file is cut short or its disk fails under us,
 * the system answers a read with SIGBUS; that must end a request, not the agent (PROTOCOL 5.2).
 *
 * The handler puts a page of zeros in the place of the page that cannot be read and counts it; the
 * computation runs on, and whoever computes looks at the count afterwards and throws the result
 * away. A signal handler has no context to be passed, so this is the one place with process-wide
 * state. */
#ifndef COVEY_AGENT_MAPPING_GUARD_H
#define COVEY_AGENT_MAPPING_GUARD_H

#include "base/err.h"

#include <stdint.h>

/* Once, before any thread computes. ERR_IO. */
enum err mapping_guard_install(void);
/* Pages replaced so far in this process. */
uint64_t mapping_guard_count(void);

#endif
