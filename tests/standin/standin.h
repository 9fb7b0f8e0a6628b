/* The stand-in CUDA: what its parts share. See README.md. */
#ifndef STANDIN_H
#define STANDIN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* ---- record.c: the log of calls, and failures on demand ---- */

/* The error that STANDIN_FAIL asks this call to return, or 0. Counts the call; never returns from one that hangs. */
int standin_injected(const char* call);

/* Appends {"pid": .., "call": .., "result": .., FIELDS} to the file STANDIN_LOG, if set. */
void standin_log(const char* call, int result, const char* fields, ...) __attribute__((format(printf, 3, 4)));

/* Whether the log shows all that orders work: STANDIN_LOG_ORDER. */
bool standin_logs_order(void);

/* An environment variable as a number, or `otherwise`. */
long long standin_setting(const char* name, long long otherwise);

/* ---- memory.c: plain and managed memory, all of it host memory ---- */

enum kind { KIND_NONE, KIND_HOST, KIND_DEVICE, KIND_MANAGED };
enum place { PLACE_NONE, PLACE_HOST, PLACE_DEVICE, PLACE_NODE };

void* standin_take(size_t nbytes, enum kind kind);
/* Whether `start` was taken (NULL counts as taken). */
bool standin_give(void* start);
/* Whether there is memory behind these addresses of one range of KIND_DEVICE. Where there is none, a use of them ends
 * the process; memory that is there again is zero. */
void standin_hold(void* start, size_t nbytes, bool held);
enum kind standin_kind(const void* address);
/* Whether all of [start, start + nbytes) is one managed range. */
bool standin_is_managed(const void* start, size_t nbytes);
void standin_prefer(const void* start, size_t nbytes, enum place place);
/* False if not all of it could move: VRAM is full of what cannot be evicted. */
bool standin_move(const void* start, size_t nbytes, enum place place);
/* What a read by the GPU does to managed memory. Returns how many blocks faulted. */
size_t standin_read(const void* start, size_t nbytes);
/* Evicts managed blocks until so many bytes are free; false if they do not suffice. */
bool standin_make_room(size_t nbytes);
/* Whether every page of a managed range is there. */
bool standin_in_vram(const void* start, size_t nbytes);
size_t standin_managed_bytes(void); /* exported, for programs that look for what is left */
void standin_vram(size_t* free_bytes, size_t* total_bytes);

/* ---- stream.c: streams, events, capture, graphs ---- */

/* One operation that a stream runs now, or records while it captures. */
typedef void (*work_fn)(void* state);
/* The bytes that it writes and reads, and whether CUDA promises that the call returns after it: for the log. */
struct touched {
    const void *to, *from;
    size_t nbytes;
    bool waits;
};
void standin_enqueue(void* stream, const char* what, struct touched bytes, work_fn work, void* state,
                     size_t state_bytes);
/* `shown`: how many arguments, at most 2, surely exist and are words: the log shows them. */
void standin_launch(void* stream, const char* kernel, void** arguments, int shown, unsigned blocks, unsigned threads,
                    const char* call);
bool standin_capturing(void* stream);
/* Runs what a stream, or every stream, still has to run. */
void standin_finish(void* stream);
void standin_finish_all(void);

/* ---- link.c: how long what crosses the link takes ---- */

void standin_link_kernel(const char* kernel, void** arguments);
void standin_link_copy(const void* from, size_t nbytes);
double standin_link_time(void); /* milliseconds */
float standin_link_elapsed(double start, double end);

/* ---- symbols.c ---- */

/* What a lookup by name finds: our function, its _v2, or one that returns success. */
void* standin_symbol(const char* name);

#endif
