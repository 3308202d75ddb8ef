/* base/file: files that are replaced whole, and parts of open ones. */
#include "base/file.h"
#include "base/util.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

struct folder {
    char path[64], file[96], beside[96];
};

static void folder_make(struct folder *f)
{
    (void)snprintf(f->path, sizeof f->path, "/tmp/covey-test-XXXXXX");
    assert_non_null(mkdtemp(f->path));
    (void)snprintf(f->file, sizeof f->file, "%s/file", f->path);
    (void)snprintf(f->beside, sizeof f->beside, "%s/file.new", f->path);
}

static void folder_remove(struct folder *f)
{
    (void)unlink(f->file);
    (void)unlink(f->beside);
    assert_int_equal(rmdir(f->path), 0);
}

static void assert_content(const char *path, const char *expected, unsigned mode)
{
    struct stat st;
    struct buf b = BUF_INIT(100);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, mode);
    assert_int_equal(file_read(path, &b), ERR_OK);
    assert_string_equal(buf_cstr(&b), expected);
    buf_deinit(&b);
}

static void test_file_is_replaced_whole(void **state)
{
    (void)state;
    struct folder f;
    folder_make(&f);
    assert_int_equal(file_write_atomic(f.file, "a longer one", 12, 0600), ERR_OK);
    assert_content(f.file, "a longer one", 0600);
    /* What a crash has left beside it, longer and for all to read, takes no part. */
    int fd = open(f.beside, O_WRONLY | O_CREAT, 0644);
    assert_int_equal(write(fd, "left over, and rather long", 26), 26);
    (void)close(fd);
    assert_int_equal(file_write_atomic(f.file, "short", 5, 0600), ERR_OK);
    assert_content(f.file, "short", 0600);
    assert_int_not_equal(access(f.beside, F_OK), 0);
    folder_remove(&f);
}

static void test_file_stays_when_it_cannot_be_replaced(void **state)
{
    (void)state;
    struct folder f;
    folder_make(&f);
    assert_int_equal(file_write_atomic(f.file, "old", 3, 0600), ERR_OK);
    assert_int_equal(symlink("/dev/null", f.beside), 0); /* not followed */
    assert_int_equal(file_write_atomic(f.file, "new", 3, 0600), ERR_IO);
    assert_content(f.file, "old", 0600);
    char deep[96];
    (void)snprintf(deep, sizeof deep, "%.60s/none/file", f.path);
    assert_int_equal(file_write_atomic(deep, "x", 1, 0600), ERR_IO);
    folder_remove(&f);
}

static void test_file_needs_no_folder_in_its_path(void **state)
{
    (void)state;
    struct folder f;
    char before[4096];
    folder_make(&f);
    assert_non_null(getcwd(before, sizeof before));
    assert_int_equal(chdir(f.path), 0);
    assert_int_equal(file_write_atomic("file", "here", 4, 0640), ERR_OK);
    assert_int_equal(chdir(before), 0);
    assert_content(f.file, "here", 0640);
    folder_remove(&f);
}

/* Its folder is "/" then, not the file itself. */
static void test_file_in_the_root_folder(void **state)
{
    (void)state;
    static const char path[] = "/covey-test-file";
    if (access("/", W_OK) != 0)
        skip();
    assert_int_equal(file_write_atomic(path, "x", 1, 0600), ERR_OK);
    assert_content(path, "x", 0600);
    assert_int_equal(unlink(path), 0);
}

static void test_parts_of_a_file(void **state)
{
    (void)state;
    struct folder f;
    char bytes[8] = "";
    folder_make(&f);
    int fd = open(f.file, O_RDWR | O_CREAT, 0600);
    assert_int_equal(file_write_at(fd, 3, "defgh", 5), ERR_OK);
    assert_int_equal(file_write_at(fd, 0, "abc", 3), ERR_OK);
    assert_int_equal(file_read_at(fd, 2, bytes, 4), ERR_OK);
    assert_string_equal(bytes, "cdef");
    assert_int_equal(file_read_at(fd, 0, bytes, 8), ERR_OK);
    assert_memory_equal(bytes, "abcdefgh", 8);
    assert_int_equal(file_read_at(fd, 1, bytes, 8), ERR_IO); /* one byte too few */
    (void)close(fd);
    assert_int_equal(file_write_at(fd, 0, "x", 1), ERR_IO);
    folder_remove(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_file_is_replaced_whole),
        cmocka_unit_test(test_file_stays_when_it_cannot_be_replaced),
        cmocka_unit_test(test_file_needs_no_folder_in_its_path),
        cmocka_unit_test(test_file_in_the_root_folder),
        cmocka_unit_test(test_parts_of_a_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
