#include "discovery/mdns_wire.h"

#include "base/buf.h"

#include <assert.h>
#include <string.h>

const char *mdns_backend_name(enum mdns_backend_kind kind)
{
    switch (kind) {
    case MDNS_BACKEND_AVAHI_DAEMON:
        return "avahi-daemon";
    case MDNS_BACKEND_AVAHI_CORE:
        return "avahi-core";
    case MDNS_BACKEND_DNS_SD:
        return "dns_sd";
    default:
        return "none";
    }
}

static void write_text(struct writer *w, const char *s, size_t size)
{
    size_t n = strnlen(s, size - 1);
    write_u8(w, (uint8_t)n);
    write_bytes(w, s, n);
}

/* `ret` holds `size` bytes and is zero. */
static void read_text(struct reader *r, char *ret, size_t size)
{
    size_t n = read_u8(r);
    const uint8_t *p = read_view(r, n);
    if (r->bad || n >= size || !mdns_text_ok((const char *)p, n))
        r->bad = true;
    else
        memcpy(ret, p, n);
}

static void write_tag(struct writer *w, const uint8_t *tag, uint8_t n)
{
    write_u8(w, n);
    write_bytes(w, tag, n);
}

static uint8_t read_tag(struct reader *r, uint8_t ret[MDNS_TAG_MAX])
{
    uint8_t n = read_u8(r);
    if (n > MDNS_TAG_MAX)
        r->bad = true;
    else
        read_bytes(r, ret, n);
    return r->bad ? 0 : n;
}

static void write_service(struct writer *w, const struct mdns_service *s)
{
    write_text(w, s->instance, sizeof s->instance);
    write_u16(w, s->port);
    write_u16(w, s->txt.version);
    write_text(w, s->txt.name, sizeof s->txt.name);
    write_tag(w, s->txt.cluster_tag, s->txt.n_cluster_tag);
    write_tag(w, s->txt.invite_tag, s->txt.n_invite_tag);
}

static void read_service(struct reader *r, struct mdns_service *s)
{
    read_text(r, s->instance, sizeof s->instance);
    s->port = read_u16(r);
    s->txt.version = read_u16(r);
    read_text(r, s->txt.name, sizeof s->txt.name);
    s->txt.n_cluster_tag = read_tag(r, s->txt.cluster_tag);
    s->txt.n_invite_tag = read_tag(r, s->txt.invite_tag);
}

size_t mdns_message_encode(const struct mdns_message *m, uint8_t ret[MDNS_MESSAGE_MAX])
{
    struct writer w = writer_of(ret + 2, MDNS_MESSAGE_MAX - 2);
    write_u8(&w, (uint8_t)m->type);
    switch (m->type) {
    case MDNS_PUBLISH:
        write_service(&w, &m->service);
        break;
    case MDNS_INTERFACES:
        break;
    case MDNS_STARTED:
        write_u8(&w, (uint8_t)m->backend);
        break;
    case MDNS_SIGHTING:
        write_u32(&w, m->interface);
        write_u8(&w, m->protocol);
        write_u8(&w, m->family);
        write_bytes(&w, m->ip, m->family == 4 ? 4 : 16);
        write_service(&w, &m->service);
        break;
    case MDNS_LOST:
        write_u32(&w, m->interface);
        write_u8(&w, m->protocol);
        write_text(&w, m->service.instance, sizeof m->service.instance);
        break;
    case MDNS_COLLISION:
        write_text(&w, m->service.instance, sizeof m->service.instance);
        break;
    case MDNS_TROUBLE:
        write_text(&w, m->text, sizeof m->text);
        break;
    }
    assert(!w.bad);
    ret[0] = (uint8_t)w.len;
    ret[1] = (uint8_t)(w.len >> 8);
    return w.len + 2;
}

static bool is_family(uint8_t v)
{
    return v == 4 || v == 6;
}

static void read_body(struct reader *r, struct mdns_message *m)
{
    switch (m->type) {
    case MDNS_PUBLISH:
        read_service(r, &m->service);
        break;
    case MDNS_INTERFACES:
        break;
    case MDNS_STARTED: {
        uint8_t kind = read_u8(r);
        if (kind >= MDNS_BACKEND_N)
            r->bad = true;
        else
            m->backend = (enum mdns_backend_kind)kind;
        break;
    }
    case MDNS_SIGHTING:
        m->interface = read_u32(r);
        m->protocol = read_u8(r);
        m->family = read_u8(r);
        if (!is_family(m->family) || !is_family(m->protocol) || m->interface == 0)
            r->bad = true;
        read_bytes(r, m->ip, m->family == 4 ? 4 : 16);
        read_service(r, &m->service);
        if (!m->service.instance[0] || m->service.port == 0)
            r->bad = true;
        break;
    case MDNS_LOST:
        m->interface = read_u32(r);
        m->protocol = read_u8(r);
        if (!is_family(m->protocol) || m->interface == 0)
            r->bad = true;
        read_text(r, m->service.instance, sizeof m->service.instance);
        break;
    case MDNS_COLLISION:
        read_text(r, m->service.instance, sizeof m->service.instance);
        break;
    case MDNS_TROUBLE:
        read_text(r, m->text, sizeof m->text);
        break;
    default:
        r->bad = true;
    }
}

enum err mdns_message_decode(const uint8_t *bytes, size_t n, struct mdns_message *ret,
                             size_t *ret_used)
{
    struct mdns_message m = {0};
    if (n < 2)
        return ERR_AGAIN;
    size_t len = bytes[0] | (size_t)bytes[1] << 8;
    if (len == 0 || len > MDNS_MESSAGE_MAX - 2)
        return ERR_CORRUPT;
    if (n < len + 2)
        return ERR_AGAIN;
    struct reader r = reader_of(bytes + 2, len);
    m.type = (enum mdns_message_type)read_u8(&r);
    read_body(&r, &m);
    if (r.bad || r.left > 0)
        return ERR_CORRUPT;
    *ret = m;
    *ret_used = len + 2;
    return ERR_OK;
}
