#include "discovery/mdns_library.h"

#include <dlfcn.h>
#include <string.h>

/* Its own symbols before all others. AddressSanitizer refuses that: there it holds only as long as
 * nobody else loads Avahi. */
#if defined(RTLD_DEEPBIND) && !defined(MDNS_SANITIZED)
enum { OWN_FIRST = RTLD_DEEPBIND };
#else
enum { OWN_FIRST = 0 };
#endif

bool mdns_library_open(const char *file, const struct mdns_symbol *symbols, size_t n, void *api)
{
    void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL | OWN_FIRST);
    if (!library)
        return false;
    for (size_t i = 0; i < n; i++) {
        void *function = dlsym(library, symbols[i].name);
        if (!function) {
            (void)dlclose(library);
            return false;
        }
        memcpy((char *)api + symbols[i].offset, &function, sizeof function);
    }
    return true;
}
