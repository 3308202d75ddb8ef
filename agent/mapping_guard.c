#include "agent/mapping_guard.h"

#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>
#include <unistd.h>

static atomic_ullong n_replaced; /* NOLINT(cppcoreguidelines-avoid-non-const-global-variables) */
static atomic_ulong page_bytes;  /* NOLINT(cppcoreguidelines-avoid-non-const-global-variables) */

static void on_sigbus(int number, siginfo_t *info, void *context)
{
    (void)context;
    uintptr_t page = atomic_load(&page_bytes);
    void *start = (void *)((uintptr_t)info->si_addr & ~(page - 1));
    if (info->si_code > 0 && page > 0 && start &&
        mmap(start, page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == start) {
        (void)atomic_fetch_add(&n_replaced, 1);
        return;
    }
    (void)signal(number, SIG_DFL); /* not ours: die of it when it comes again */
}

enum err mapping_guard_install(void)
{
    struct sigaction action = {.sa_flags = SA_SIGINFO | SA_RESTART};
    long page = sysconf(_SC_PAGESIZE);
    if (page <= 0)
        return ERR_IO;
    atomic_store(&page_bytes, (unsigned long)page);
    action.sa_sigaction = on_sigbus;
    (void)sigemptyset(&action.sa_mask);
    return sigaction(SIGBUS, &action, NULL) == 0 ? ERR_OK : ERR_IO;
}

uint64_t mapping_guard_count(void)
{
    return atomic_load(&n_replaced);
}
