/* Runs a fuzz target over every file of the folders given, so that a corpus is an ordinary test.
 * Each file is also tried cut short at many lengths and with single bytes changed: cheap mutations
 * that need no fuzzer. */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { FILE_BYTES_MAX = 1 << 20, CUTS = 64, FLIPS = 256 };

/* A copy of exact size, so that ASan sees a read past the end. */
static void run_once(const uint8_t *bytes, size_t n)
{
    uint8_t *copy = malloc(n ? n : 1);
    if (!copy)
        abort();
    memcpy(copy, bytes, n);
    (void)LLVMFuzzerTestOneInput(copy, n);
    free(copy);
}

static void run_mutations(uint8_t *bytes, size_t n)
{
    run_once(bytes, n);
    for (size_t i = 0; i < CUTS && n > 0; i++)
        run_once(bytes, i < CUTS / 2 ? (i < n ? i : n - 1) : n * (i - CUTS / 2) / (CUTS / 2));
    uint32_t state = 1;
    for (int i = 0; i < FLIPS && n > 0; i++) {
        state = state * 1664525u + 1013904223u;
        size_t at = state % n;
        uint8_t old = bytes[at];
        bytes[at] = (uint8_t)(i % 3 == 0 ? 0xff : i % 3 == 1 ? 0 : state >> 16);
        run_once(bytes, n);
        bytes[at] = old;
    }
}

static int run_file(const char *path)
{
    FILE *f = fopen(path, "rb");
    if (!f)
        return 0;
    uint8_t *bytes = malloc(FILE_BYTES_MAX);
    if (!bytes)
        abort();
    size_t n = fread(bytes, 1, FILE_BYTES_MAX, f);
    (void)fclose(f);
    run_mutations(bytes, n);
    free(bytes);
    return 1;
}

int main(int argc, char **argv)
{
    int n_files = 0;
    for (int i = 1; i < argc; i++) {
        DIR *dir = opendir(argv[i]);
        if (!dir) {
            (void)fprintf(stderr, "%s: no such folder\n", argv[i]);
            return 1;
        }
        for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
            if (entry->d_name[0] == '.')
                continue;
            char path[4096];
            (void)snprintf(path, sizeof path, "%s/%s", argv[i], entry->d_name);
            n_files += run_file(path);
        }
        (void)closedir(dir);
    }
    (void)printf("%d files replayed\n", n_files);
    return n_files > 0 ? 0 : 1;
}
