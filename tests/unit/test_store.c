/* The model store and manifests, on a small real model (tests/reference/tiny_split.gguf). */
#include "agent/store.h"
#include "base/file.h"
#include "runtime/model.h"
#include "transport/bulk.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

struct fixture {
    char folder[64], other[80], first[80], model[512];
};

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof *f);
    const char *source = getenv("COVEY_SOURCE");
    assert_non_null(f);
    (void)snprintf(f->folder, sizeof f->folder, "/tmp/covey-store-XXXXXX");
    assert_non_null(mkdtemp(f->folder));
    (void)snprintf(f->first, sizeof f->first, "%s/one", f->folder);
    (void)snprintf(f->other, sizeof f->other, "%s/two", f->folder);
    (void)snprintf(f->model, sizeof f->model, "%s/tests/reference/tiny_split.gguf",
                   source ? source : ".");
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    char command[128];
    (void)snprintf(command, sizeof command, "rm -rf -- %s", f->folder);
    int r = system(command);
    free(f);
    return r;
}

static struct store *open_store(const char *folder)
{
    struct store *s = NULL;
    struct err_text text = {""};
    assert_int_equal(store_open(folder, &s, &text), ERR_OK);
    return s;
}

static struct hash256 add(struct store *s, const struct fixture *f)
{
    struct hash256 id;
    struct err_text text = {""};
    assert_int_equal(store_add_file(s, f->model, "tiny", NULL, NULL, &id, &text), ERR_OK);
    return id;
}

static void test_store_uses_a_file_in_place(void **state)
{
    const struct fixture *f = *state;
    struct store *s = open_store(f->first);
    struct hash256 id = add(s, f);
    struct store_entry e;
    char path[STORE_PATH_MAX];
    assert_int_equal(store_find(s, "TINY", &e), ERR_OK);
    assert_true(hash256_eq(&e.id, &id));
    assert_true(e.complete && e.external && e.header_present);
    assert_int_equal(e.present_bytes, e.n_bytes);
    assert_int_equal(store_path(s, &id, path), ERR_OK);
    assert_string_equal(path, f->model);
    store_close(s);
    s = open_store(f->first); /* known after a restart */
    assert_int_equal(store_get(s, &id, &e), ERR_OK);
    assert_true(e.complete);
    store_close(s);
}

/* What a peer does: manifest first, then blocks, each checked; what was synced is there after a
 * restart. */
static void test_store_takes_blocks_that_fit_the_manifest(void **state)
{
    const struct fixture *f = *state;
    struct store *from = open_store(f->first), *to = open_store(f->other);
    struct hash256 id = add(from, f), wrong = id;
    struct buf manifest = BUF_INIT(MANIFEST_BYTES_MAX);
    struct err_text text = {""};
    struct store_entry e;
    wrong.bytes[0] ^= 1;
    assert_int_equal(store_manifest_bytes(from, &id, &manifest), ERR_OK);
    assert_int_equal(store_add_manifest(to, &wrong, manifest.data, manifest.len, &text),
                     ERR_CORRUPT);
    assert_int_equal(store_add_manifest(to, &id, manifest.data, manifest.len, &text), ERR_OK);
    assert_int_equal(store_get(to, &id, &e), ERR_OK);
    assert_int_equal(e.present_bytes, 0);
    assert_false(store_has(to, &id, 0, 1));
    uint8_t byte;
    assert_int_equal(store_read(to, &id, 0, &byte, 1), ERR_NOT_FOUND);
    assert_int_equal(store_read(from, &id, e.n_bytes, &byte, 1), ERR_INVALID);

    size_t n = (size_t)(e.n_bytes < MANIFEST_LEAF_BYTES ? e.n_bytes : MANIFEST_LEAF_BYTES);
    uint8_t *block = malloc(n);
    assert_non_null(block);
    assert_int_equal(store_read(from, &id, 0, block, n), ERR_OK);
    block[n / 2] ^= 0x40;
    assert_int_equal(store_write_block(to, &id, 0, block, n, &text), ERR_CORRUPT);
    block[n / 2] ^= 0x40;
    assert_int_equal(store_write_block(to, &id, 0, block, n - 1, &text), ERR_INVALID);
    assert_int_equal(store_write_block(to, &id, 99, block, n, &text), ERR_INVALID);
    assert_int_equal(store_write_block(to, &id, 0, block, n, &text), ERR_OK);
    assert_true(store_has(to, &id, 0, n));
    struct spare_run runs[2];
    assert_int_equal(store_runs(to, &id, runs, 2), 1);
    assert_int_equal(runs[0].first, 0);
    assert_int_equal(runs[0].n, 1);
    assert_int_equal(store_runs(to, &wrong, runs, 2), 0);
    assert_int_equal(store_sync(to, &id, &text), ERR_OK);
    store_close(to);
    to = open_store(f->other);
    assert_true(store_has(to, &id, 0, n));
    store_close(to);
    store_close(from);
    free(block);
    buf_deinit(&manifest);
}

static void test_store_forgets_blocks_that_were_not_synced(void **state)
{
    const struct fixture *f = *state;
    struct store *from = open_store(f->first), *to = open_store(f->other);
    struct hash256 id = add(from, f);
    struct buf manifest = BUF_INIT(MANIFEST_BYTES_MAX);
    struct err_text text = {""};
    struct store_entry e;
    assert_int_equal(store_manifest_bytes(from, &id, &manifest), ERR_OK);
    assert_int_equal(store_add_manifest(to, &id, manifest.data, manifest.len, &text), ERR_OK);
    assert_int_equal(store_get(to, &id, &e), ERR_OK);
    uint8_t *block = malloc((size_t)e.n_bytes);
    assert_non_null(block);
    assert_int_equal(store_read(from, &id, 0, block, (size_t)e.n_bytes), ERR_OK);
    assert_int_equal(store_write_block(to, &id, 0, block, (size_t)e.n_bytes, &text), ERR_OK);
    store_close(to); /* as a crash would: the map on disk never promised the block */
    to = open_store(f->other);
    assert_false(store_has(to, &id, 0, 1));
    store_close(to);
    store_close(from);
    free(block);
    buf_deinit(&manifest);
}

static void test_manifest_refuses_every_cut(void **state)
{
    const struct fixture *f = *state;
    struct store *s = open_store(f->first);
    struct hash256 id = add(s, f);
    struct buf b = BUF_INIT(MANIFEST_BYTES_MAX);
    struct manifest *m = NULL;
    assert_int_equal(store_manifest_bytes(s, &id, &b), ERR_OK);
    for (size_t n = 0; n < b.len; n++)
        assert_int_not_equal(manifest_decode(b.data, n, &m), ERR_OK);
    assert_int_equal(manifest_decode(b.data, b.len, &m), ERR_OK);
    assert_true(hash256_eq(&m->id, &id));
    manifest_free(m);
    buf_deinit(&b);
    store_close(s);
}

static void test_store_refuses_what_is_no_model(void **state)
{
    const struct fixture *f = *state;
    struct store *s = open_store(f->first);
    struct hash256 id;
    struct err_text text = {""};
    char path[128];
    (void)snprintf(path, sizeof path, "%s/not-a-model.gguf", f->folder);
    assert_int_equal(file_write_atomic(path, "hello", 5, 0600), ERR_OK);
    assert_int_not_equal(store_add_file(s, path, "x", NULL, NULL, &id, &text), ERR_OK);
    assert_non_null(strstr(text.text, "not-a-model.gguf")); /* the sentence names the file */
    store_close(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_store_uses_a_file_in_place, setup, teardown),
        cmocka_unit_test_setup_teardown(test_store_takes_blocks_that_fit_the_manifest, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_store_forgets_blocks_that_were_not_synced, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_manifest_refuses_every_cut, setup, teardown),
        cmocka_unit_test_setup_teardown(test_store_refuses_what_is_no_model, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
