/* The few words of cmocka that the kernels' tests use, so that they can be built for arm64 without
 * a cross-built library. A failure ends the program. */
#ifndef COVEY_TESTS_ARM64_CMOCKA_H
#define COVEY_TESTS_ARM64_CMOCKA_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct CMUnitTest {
    const char *name;
    void (*run)(void **state);
};

#define cmocka_unit_test(f)                                                                        \
    {                                                                                              \
#f, f                                                                                      \
    }
#define fail_msg(...)                                                                              \
    do {                                                                                           \
        fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);                                            \
        fprintf(stderr, __VA_ARGS__);                                                              \
        fputc('\n', stderr);                                                                       \
        exit(1);                                                                                   \
    } while (0)
#define assert_true(c)                                                                             \
    do {                                                                                           \
        if (!(c))                                                                                  \
            fail_msg("%s", #c);                                                                    \
    } while (0)
#define assert_false(c) assert_true(!(c))
#define assert_int_equal(a, b) assert_true((unsigned long long)(a) == (unsigned long long)(b))
#define assert_null(p) assert_true((p) == NULL)
#define assert_non_null(p) assert_true((p) != NULL)
#define assert_memory_equal(a, b, n) assert_true(memcmp((a), (b), (n)) == 0)

#define cmocka_run_group_tests(tests, setup, teardown)                                             \
    run_tests((tests), sizeof(tests) / sizeof((tests)[0]), (setup), (teardown))

static inline int run_tests(const struct CMUnitTest *tests, size_t n, int (*setup)(void **),
                            int (*teardown)(void **))
{
    void *state = NULL;
    if (setup && setup(&state) != 0)
        return 1;
    for (size_t i = 0; i < n; i++) {
        tests[i].run(&state);
        printf("ok %s\n", tests[i].name);
        fflush(stdout);
    }
    return teardown ? teardown(&state) : 0;
}

#endif
