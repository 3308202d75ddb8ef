/* Plans on the wire: between struct plan and the message covey.control.Plan (proto/control.proto).
 * Bytes from outside are hostile: every length and number is checked before it is believed. */
#ifndef COVEY_PLANNER_PLAN_WIRE_H
#define COVEY_PLANNER_PLAN_WIRE_H

#include "base/buf.h"
#include "planner/plan.h"
#include "proto/control.pb-c.h"

enum { PLAN_WIRE_MAX = 4096 }; /* bytes of an encoded plan; 16 stages take less than 1,500 */

/* Appends the encoded plan. ERR_LIMIT, ERR_NO_MEMORY. */
enum err plan_encode(const struct plan *p, struct buf *ret);
/* Decodes and checks (plan_check). ERR_CORRUPT, ERR_LIMIT above PLAN_WIRE_MAX, ERR_UNSUPPORTED when
 * the plan is well formed but asks for what this version does not know. */
enum err plan_decode(const void *bytes, size_t n, struct plan *ret);

/* The message's fields as views of `p` and `storage`, for packing inside a larger message. */
struct plan_message {
    Covey__Control__Plan plan;
    Covey__Control__Stage stages[PLAN_STAGES_MAX];
    Covey__Control__Stage *pointers[PLAN_STAGES_MAX];
};
void plan_to_message(const struct plan *p, struct plan_message *storage);
/* As plan_decode, from an unpacked message. */
enum err plan_from_message(const Covey__Control__Plan *m, struct plan *ret);

#endif
