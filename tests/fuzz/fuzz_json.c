/* Bodies of /v1/chat/completions and /covey/generate, as a client sends them. The first byte
 * chooses which; whatever is refused must be refused with a sentence. */
#include "agent/exchange.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0)
        return 0;
    struct exchange x = {.body = BUF_INIT(EXCHANGE_BODY_MAX)};
    struct err_text text = {""};
    if (buf_append(&x.body, data + 1, size - 1) == ERR_OK) {
        enum err e = openai_check(&x, data[0] & 1, &text);
        if (e != ERR_OK && e != ERR_NO_MEMORY && !text.text[0])
            abort();
    }
    buf_deinit(&x.body);
    return 0;
}
