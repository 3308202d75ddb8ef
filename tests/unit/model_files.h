/* Real model files for tests: COVEY_MODELS names a folder that holds smollm2-135m.gguf. */
#ifndef COVEY_TESTS_MODEL_FILES_H
#define COVEY_TESTS_MODEL_FILES_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

/* The file's path; skips the test when it is absent, which is a failure under CI. */
static inline void need_model_file(const char *file, char path[4096])
{
    const char *folder = getenv("COVEY_MODELS"), *ci = getenv("CI");
    (void)snprintf(path, 4096, "%s/%s", folder ? folder : "", file);
    if (folder && access(path, R_OK) == 0)
        return;
    if (ci && strcmp(ci, "true") == 0)
        fail_msg("%s is not in COVEY_MODELS (%s)", file, folder ? folder : "not set");
    print_message("skipped: %s is not in the folder that COVEY_MODELS names (%s)\n", file,
                  folder ? folder : "not set");
    skip();
}

#endif
