/* Avahi's poll interface on a libuv loop, for its core and its client alike. */
#ifndef COVEY_DISCOVERY_MDNS_UV_H
#define COVEY_DISCOVERY_MDNS_UV_H

#include <avahi-common/watch.h>
#include <uv.h>

/* Fills *api; the loop must outlive it. What is freed through it is gone when the loop next runs.
 */
void mdns_uv_init(AvahiPoll *api, uv_loop_t *loop);

#endif
