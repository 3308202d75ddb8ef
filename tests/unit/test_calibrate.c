#include "runtime/calibrate.h"
#include "runtime/pool.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

/* Rates are whatever this machine gives: only what cannot be true is checked. */
static void test_calibration_gives_rates(void **state)
{
    (void)state;
    for (uint32_t n = 1; n <= 2; n++) {
        struct pool *pool;
        struct calibration c;
        assert_int_equal(pool_new(n, &pool), ERR_OK);
        assert_int_equal(calibrate(pool, &c), ERR_OK);
        print_message("%u threads, %s: %.2f GB/s of weights, %.1f G multiply-adds/s\n", n,
                      c.kernels, c.stream_bytes_per_s * 1e-9, c.macs_per_s * 1e-9);
        assert_true(c.stream_bytes_per_s > 1e6 && c.stream_bytes_per_s < 1e14);
        assert_true(c.macs_per_s > 1e6 && c.macs_per_s < 1e16);
        assert_int_equal(c.n_threads, n);
        pool_free(pool);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_calibration_gives_rates)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
