/* Linux only, for the test: as sysinfo_wired(), with proc and sys below `root` ("" for the real
 * ones). */
#ifndef COVEY_AGENT_SYSINFO_NET_LINUX_H
#define COVEY_AGENT_SYSINFO_NET_LINUX_H

#include <stdbool.h>

bool sysinfo_wired_below(const char *root);

#endif
