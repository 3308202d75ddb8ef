/* The token as people type it: what is accepted is written back as the same token. */
#include "proto/token.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct token t, back;
    char written[TOKEN_TEXT_MAX], *text = malloc(size + 1);
    if (!text)
        return 0;
    if (size)
        memcpy(text, data, size);
    text[size] = 0;
    if (token_parse(text, &t) == ERR_OK) {
        token_format(&t, written);
        if (token_parse(written, &back) != ERR_OK || memcmp(&t, &back, sizeof t) != 0)
            abort();
    }
    free(text);
    return 0;
}
