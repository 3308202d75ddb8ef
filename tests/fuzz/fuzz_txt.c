/* TXT records of strangers: what is accepted is bounded, printable, and written back as the same.
 */
#include "discovery/mdns_txt.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct mdns_txt txt, back;
    uint8_t written[MDNS_TXT_BYTES_MAX];
    if (mdns_txt_parse(data, size, &txt) != ERR_OK)
        return 0;
    size_t name = strnlen(txt.name, sizeof txt.name);
    if (name == sizeof txt.name || !mdns_text_ok(txt.name, name) || txt.version == 0 ||
        txt.n_cluster_tag > MDNS_TAG_MAX || txt.n_invite_tag > MDNS_TAG_MAX)
        abort();
    size_t n = mdns_txt_build(&txt, written);
    if (mdns_txt_parse(written, n, &back) != ERR_OK || !mdns_txt_eq(&txt, &back))
        abort();
    return 0;
}
