/* Lines "key = value" as covey.ini and the command line give them. A refused one must be refused
 * with a sentence, and leave every word of the settings ended. */
#include "agent/config.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_words(const struct config *c)
{
    if (!memchr(c->http_host, 0, sizeof c->http_host) || !memchr(c->name, 0, sizeof c->name) ||
        !memchr(c->model, 0, sizeof c->model) || !memchr(c->hub, 0, sizeof c->hub) ||
        !memchr(c->api_key, 0, sizeof c->api_key) || c->n_peers > CONFIG_PEERS_MAX)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct config *c = malloc(sizeof *c);
    char *copy = malloc(size + 1);
    if (!c || !copy)
        abort();
    memcpy(copy, data, size);
    copy[size] = 0;
    config_init(c);
    char *rest = NULL;
    for (char *line = strtok_r(copy, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        struct err_text text = {""};
        char *value = strchr(line, '=');
        if (value)
            *value++ = 0;
        if (config_set(c, line, value ? value : "", &text) != ERR_OK && !text.text[0])
            abort();
        check_words(c);
    }
    free(copy);
    free(c);
    return 0;
}
