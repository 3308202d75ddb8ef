/* Settings of one agent: defaults, then the INI file, then flags (every key is also a flag).
 *
 * COVEY_HOME=DIR puts config, data, socket and logs of one agent under one folder, so that several
 * can run on one computer. Without it the system's own places are used (agent/folders_linux.c,
 * agent/folders_macos.c). */
#ifndef COVEY_AGENT_CONFIG_H
#define COVEY_AGENT_CONFIG_H

#include "base/err.h"
#include "base/log.h"

#include <stdbool.h>
#include <stdint.h>

enum {
    CONFIG_PATH_MAX = 1024,
    CONFIG_PEERS_MAX = 16,
    CONFIG_WORD_MAX = 256,
    CONFIG_KEEP_ALIVE_MIN_S = 10, /* use is noted every few seconds */
    CONFIG_KEEP_ALIVE_MAX_S = 10 * 365 * 86400,
    CONFIG_CONTEXT_MIN = 16, /* tokens; fewer hold no question and answer */
    DEFAULT_HTTP_PORT = 26839,
    DEFAULT_CONTROL_PORT = 26840,
    DEFAULT_DATA_PORT = 26841,
};

struct folders {
    char config[CONFIG_PATH_MAX]; /* covey.ini */
    char data[CONFIG_PATH_MAX];   /* identity, trust, control state, models/ */
    char socket[CONFIG_PATH_MAX]; /* path of agent.sock */
};

struct config {
    struct folders folders;
    char http_host[CONFIG_WORD_MAX];
    uint16_t http_port; /* 0: any free one */
    uint16_t control_port;
    uint16_t data_port;
    uint64_t memory_limit; /* bytes; 0: decided from what the machine has */
    uint32_t n_threads;    /* 0: as many as usable cores */
    uint32_t n_peers;
    char peers[CONFIG_PEERS_MAX][CONFIG_WORD_MAX]; /* HOST[:PORT] */
    char model[CONFIG_PATH_MAX];                   /* name or file to run from the start, or "" */
    uint8_t precision;                             /* enum precision of planner/plan.h */
    uint32_t context;                              /* 0: the most that fits */
    uint32_t keep_alive_s; /* a model unused for so long is unloaded; 0: never */
    enum log_level log_level;
    char api_key[CONFIG_WORD_MAX]; /* "" when none */
    char hub[CONFIG_WORD_MAX];     /* base URL of the model hub */
    char name[64];                 /* what people call this node */
    bool mdns;                     /* announce and browse */
    bool spare_copies;             /* hold second copies for others (agent/spare.h) */
    uint64_t
        spare_margin; /* disk that these leave free; UINT64_MAX: 10 GiB or a tenth, the larger */
};

/* Where this user's agent keeps things: COVEY_HOME, else the system's places. */
enum err folders_find(struct folders *ret, struct err_text *text);
/* The system's places (one file per system). */
enum err folders_of_system(struct folders *ret);

void config_init(struct config *c);
/* Reads folders.config/covey.ini when it is there. A key that is not known is an error that names
 * the line. */
enum err config_read_file(struct config *c, struct err_text *text);
/* One setting by its key ("http", "control-port", …), as in the file and on the command line. */
enum err config_set(struct config *c, const char *key, const char *value, struct err_text *text);
/* "1.5G", "512M", "800MiB", "123456" (bytes). */
enum err config_parse_size(const char *word, uint64_t *ret);
/* "90" or "90s", "10m", "2h", "1d"; "forever" is 0. Between the two limits above. */
enum err config_parse_keep_alive(const char *word, uint32_t *ret_s);
/* "HOST:PORT", "[v6]:PORT", "HOST"; port stays untouched when not given. */
enum err config_parse_host_port(const char *word, char host[CONFIG_WORD_MAX], uint16_t *port);

#endif
