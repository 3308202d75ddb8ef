/* The Avahi libraries, opened when the child process starts and not linked. libavahi-core and
 * libavahi-client both define avahi_entry_group_free(), with different meanings: in one program
 * each would call the other's, and abort when the core frees its groups at exit. Opened like this,
 * each binds to its own, also when another library of this machine has brought one of them into the
 * process. The agent itself does not load them, and runs without them. */
#ifndef COVEY_DISCOVERY_MDNS_LIBRARY_H
#define COVEY_DISCOVERY_MDNS_LIBRARY_H

#include <stdbool.h>
#include <stddef.h>

#if defined(__SANITIZE_ADDRESS__)
#define MDNS_SANITIZED
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define MDNS_SANITIZED
#endif
#endif

/* A list of functions is a macro F(X) that expands to X(name) for each. */
#define MDNS_LIBRARY_MEMBER(name) __typeof__(name) *name;
#define MDNS_LIBRARY_SYMBOL(api, name) {#name, offsetof(api, name)},

struct mdns_symbol {
    const char *name;
    size_t offset; /* of its pointer in the table */
};

/* Fills the function pointers of `api`. The library stays open until the process ends. False: it is
 * not on this machine. */
bool mdns_library_open(const char *file, const struct mdns_symbol *symbols, size_t n, void *api);

#endif
