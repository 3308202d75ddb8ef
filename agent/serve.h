/* `covey serve`: runs an agent until it is told to stop. */
#ifndef COVEY_AGENT_SERVE_H
#define COVEY_AGENT_SERVE_H

#include "agent/config.h"

/* Returns when stopped: ERR_OK after a polite stop. On failure `text` says what and what to do. */
enum err serve(const struct config *config, struct err_text *text);

#endif
