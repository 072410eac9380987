/* What the fake driver has for tests; see libcuda.c. */
#ifndef FAKECUDA_H
#define FAKECUDA_H
#include <stddef.h>
#include <stdint.h>

/* Order and delays from here on: operations take up to so many microseconds; 0: none waits. */
void fakecuda_random(uint64_t seed, long delay_us);
/* Puts an update on a stream: bytes of the pattern of that version, from the first one of the memory on. */
int fakecuda_update(void *stream, uint64_t address, size_t bytes, uint64_t version);
/* Bytes `from` and following of that pattern. */
void fakecuda_pattern(uint8_t *out, uint64_t from, size_t bytes, uint64_t version);
/* Looks at device memory, or changes it, now and past all streams. */
void fakecuda_peek(uint64_t address, uint8_t *out, size_t bytes);
void fakecuda_poke(uint64_t address, const uint8_t *bytes, size_t count);
/* The n-th call of a function from now on (0: the next) fails with a code; `copy` is a copy that runs. how: 0 once, 1 and all later ones, 2 and every call of the driver. */
void fakecuda_fail(const char *name, long nth, int error, int how);
/* How often a function was called. */
long fakecuda_calls(const char *name);
/* Nothing runs any more; or it does again. */
void fakecuda_stall(int on);
/* A graph is captured on that stream. */
void fakecuda_capturing(void *stream, int on);
/* No failure is left, nor one to come. */
void fakecuda_heal(void);
/* Operations that have not run. */
long fakecuda_pending(void);
/* Bytes of host memory that are registered. */
size_t fakecuda_registered(void);
/* What was found, line by line; it is forgotten. Gives the length. */
size_t fakecuda_violations(char *out, size_t room);

#endif
