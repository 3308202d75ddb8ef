/* Plans from the wire: whatever the bytes, a plan that is accepted passes its check and comes out
 * of the encoder so that it is accepted again. */
#include "planner/plan_wire.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct plan p, back;
    if (plan_decode(data, size, &p) != ERR_OK)
        return 0;
    struct buf b = BUF_INIT(PLAN_WIRE_MAX);
    if (plan_check(&p) != ERR_OK || plan_encode(&p, &b) != ERR_OK ||
        plan_decode(b.data, b.len, &back) != ERR_OK || memcmp(&p, &back, sizeof p) != 0)
        abort();
    buf_deinit(&b);
    return 0;
}
