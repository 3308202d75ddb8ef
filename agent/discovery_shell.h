/* Between discovery/mdns and the node core: announces this node's tags, passes on what is found,
 * and looks up the names that people gave with --peer. On the loop thread. */
#ifndef COVEY_AGENT_DISCOVERY_SHELL_H
#define COVEY_AGENT_DISCOVERY_SHELL_H

#include "base/err.h"

struct agent;
struct discovery_shell;

/* The hidden verb by which the program runs as the child of discovery/mdns.h. */
#define DISCOVERY_CHILD_VERB "mdns-child"

enum err discovery_shell_new(struct agent *a, struct discovery_shell **ret, struct err_text *text);
/* The memory goes when the loop next runs. */
void discovery_shell_free(struct discovery_shell *d);
/* The tags changed. NULL is fine: what is true at the start is announced then. */
void discovery_shell_announce(struct discovery_shell *d);
/* HOST[:PORT]: looked up now and again, and given to the core as an address to dial. */
void discovery_shell_add_peer(struct discovery_shell *d, const char *host_port);
/* Looks all names up again. */
void discovery_shell_refresh(struct discovery_shell *d);
/* Who speaks mDNS for us: "avahi-daemon", "avahi-core"; "none" while nobody does, "off". */
const char *discovery_shell_backend(const struct discovery_shell *d);

#endif
