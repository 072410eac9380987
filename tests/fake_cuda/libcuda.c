/* A CUDA driver without a GPU: libcuda.so.1 for the tests of lazy capture.
 *
 * What it has: the functions of the driver that stepwell calls, and a few that only tests call (fakecuda_*, fakecuda.h). Device memory is host memory behind addresses
 * that the host cannot touch: whoever follows a device pointer dies of it. Streams run on threads of their own choosing: any order and any delay that the rules of
 * streams and events allow, drawn from a seed; long copies and updates run in slices, so that two of them that are not ordered do interleave.
 *
 * What it finds (fakecuda_violations): accesses that no stream, event or host wait orders, of which one writes (by vector clocks, so whether they met in time or
 * not); memory that is used after it was freed; copies to host memory that is not registered, or was unregistered under them.
 *
 * What it can be told: to fail the n-th call of a function, or the n-th copy as it runs, once or for ever; to stand still; to be absent in the ways that real ones
 * are (FAKE_CUDA: no-device, stub, init-fails).
 */
#define _GNU_SOURCE
#include "fakecuda.h"
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

enum {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, STUB_LIBRARY = 34, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_READY = 600, ILLEGAL_ADDRESS = 700, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713,
    CAPTURE_UNSUPPORTED = 900, CAPTURE_IMPLICIT = 906
};

enum { MAX_DEVICES = 8, MAX_STREAMS = 256, ENGINES = 3, SLICE = 64 << 10 };

static const size_t WINDOW = (size_t)1 << 40;

/* ---- clocks: what has happened before what ------------------------------------------------------------------------ */

typedef struct { uint64_t at[MAX_STREAMS]; } Clock;

static void join(Clock *into, const Clock *other) {
    for (int i = 0; i < MAX_STREAMS; i++)
        if (other->at[i] > into->at[i]) into->at[i] = other->at[i];
}

/* ---- what there is ------------------------------------------------------------------------------------------------ */

typedef struct Device { int ordinal; int retained; struct Stream *legacy; } Device;

typedef struct Record { int done; int refs; Clock clock; } Record;

typedef struct Event { uint32_t magic; Device *device; Record *last; } Event;

typedef struct { uint64_t low, high; int writes; int stream; uint64_t time; char what[24]; } Access;

typedef struct Block { uint64_t start, bytes; int device; int dead; Access *accesses; int count, room; } Block;

typedef struct Registered { uintptr_t start; size_t bytes; struct Registered *next; } Registered;

typedef enum { COPY, UPDATE, RECORD, WAIT } Kind;

typedef struct Op {
    Kind kind;
    struct Op *next;
    Clock host;
    Record *record;
    /* A copy of rows; an update of one row. */
    uint64_t src, dst;
    size_t width, height, src_pitch, dst_pitch;
    int from_device, to_device;
    uint64_t version;
    int fails;
    /* Its host memory was registered when it began. */
    int pinned;
    /* The context was lost before it began: it never runs. */
    int lost;
} Op;

typedef struct Stream { uint32_t magic; int number; Device *device; Op *first, *last; int busy, dead, capturing; Clock clock; } Stream;

enum { STREAM = 0x57ea3001, EVENT = 0xe7e70001 };

static pthread_mutex_t big = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int started;
static Device devices[MAX_DEVICES];
static int device_count = 2;
static Stream *streams[MAX_STREAMS];
static int stream_count;
static Block *blocks;
static int block_count, block_room;
static Registered *registered;
static uint8_t *window, *mirror;
static size_t used;
static Clock seen_by_host;
static int sticky;
static int stalled;
static uint64_t seed = 1;
static long delay_us = 0;
static long executed;
static char violations[1 << 16];
static size_t violations_len;

static __thread Device *stack[16];
static __thread int depth;
__attribute__((unused)) static __thread int relaxed;

static uint64_t draw(void) {
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return seed;
}

static void violation(const char *format, ...) {
    va_list list;
    va_start(list, format);
    size_t room = sizeof violations - violations_len;
    char *line = violations + violations_len;
    int n = vsnprintf(line, room, format, list);
    va_end(list);
    /* Once is enough. */
    char *first = n > 0 ? strstr(violations, line) : NULL;
    if (first && first != line) *line = 0;
    else if (n > 0 && (size_t)n + 2 < room) {
        violations_len += (size_t)n;
        violations[violations_len++] = '\n';
        violations[violations_len] = 0;
    }
}

/* ---- calls that are counted, and fail on demand -------------------------------------------------------------------- */

typedef struct { char name[40]; long calls; long fail_at; int code; int for_ever; } Call;
static Call calls[64];

static Call *call_named(const char *name) {
    for (int i = 0; i < 64; i++) {
        if (!calls[i].name[0]) snprintf(calls[i].name, sizeof calls[i].name, "%s", name), calls[i].fail_at = -1;
        if (!strcmp(calls[i].name, name)) return &calls[i];
    }
    abort();
}

/* An error that stays: what has not begun never will. */
static void lose(int code) {
    sticky = code;
    for (int i = 0; i < stream_count; i++)
        for (Op *op = streams[i]->first; op; op = op->next)
            if (!(streams[i]->busy && op == streams[i]->first)) op->lost = 1;
}

static int enter(const char *name) {
    Call *call = call_named(name);
    long number = call->calls++;
    if (call->fail_at >= 0 && (number == call->fail_at || (call->for_ever && number > call->fail_at))) {
        if (call->for_ever == 2) lose(call->code);
        return call->code;
    }
    return sticky;
}

#define BEGIN                                                                                                                                      \
    pthread_mutex_lock(&big);                                                                                                                      \
    int code = enter(__func__);                                                                                                                    \
    if (code) goto end
#define FAIL(value) do { code = (value); goto end; } while (0)
#define END                                                                                                                                        \
    end:                                                                                                                                           \
    pthread_mutex_unlock(&big);                                                                                                                    \
    return code

/* ---- memory ---------------------------------------------------------------------------------------------------------- */

static Block *block_of(uint64_t address, size_t bytes) {
    for (int i = 0; i < block_count; i++)
        if (address >= blocks[i].start && address + bytes <= blocks[i].start + blocks[i].bytes) return &blocks[i];
    return NULL;
}

static int is_device(uint64_t address) { return address - (uint64_t)window < WINDOW; }

static uint8_t *backing(uint64_t address) { return mirror + (address - (uint64_t)window); }

static int is_registered(uintptr_t address, size_t bytes) {
    for (Registered *one = registered; one; one = one->next)
        if (address >= one->start && address + bytes <= one->start + one->bytes) return 1;
    return 0;
}

static size_t reach(size_t width, size_t height, size_t pitch) { return height ? (height - 1) * pitch + width : 0; }

/* Tells of accesses that nothing orders with this one, and remembers it. */
static void access_block(Op *op, Stream *stream, const Clock *clock, uint64_t low, size_t bytes, int writes, const char *what) {
    Block *block = block_of(low, bytes);
    if (!block) {
        violation("%s on stream %d touches %#lx + %zu, which is no device memory", what, stream->number, (unsigned long)low, bytes);
        op->fails = ILLEGAL_ADDRESS;
        return;
    }
    if (block->dead) violation("%s on stream %d uses memory that was freed", what, stream->number);
    uint64_t high = low + bytes;
    int kept = 0;
    for (int i = 0; i < block->count; i++) {
        Access *other = &block->accesses[i];
        int before = other->time <= clock->at[other->stream];
        int meets = other->low < high && low < other->high;
        if (meets && (writes || other->writes) && !before)
            violation("%s on stream %d races %s on stream %d: nothing orders them", what, stream->number, other->what, other->stream);
        if (!(before && writes && other->low >= low && other->high <= high)) block->accesses[kept++] = *other;
    }
    block->count = kept;
    if (block->count == block->room) {
        block->room = block->room ? 2 * block->room : 16;
        block->accesses = realloc(block->accesses, (size_t)block->room * sizeof *block->accesses);
    }
    Access *mine = &block->accesses[block->count++];
    *mine = (Access){low, high, writes, stream->number, clock->at[stream->number], ""};
    snprintf(mine->what, sizeof mine->what, "%s", what);
}

/* ---- streams ---------------------------------------------------------------------------------------------------------- */

static void *engine(void *unused);

static void start(void) {
    if (started) return;
    started = 1;
    const char *count = getenv("FAKE_CUDA_DEVICES");
    if (count) device_count = atoi(count);
    const char *delay = getenv("FAKE_CUDA_DELAY_US");
    if (delay) delay_us = atol(delay);
    window = mmap(NULL, WINDOW, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    mirror = mmap(NULL, WINDOW, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (window == MAP_FAILED || mirror == MAP_FAILED) abort();
    madvise(mirror, WINDOW, MADV_DONTFORK);
    for (int i = 0; i < MAX_DEVICES; i++) devices[i].ordinal = i;
    for (int i = 0; i < ENGINES; i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, engine, NULL)) abort();
        pthread_detach(thread);
    }
}

static Stream *new_stream(Device *device) {
    int number = stream_count;
    for (int i = 0; i < stream_count; i++)
        if (streams[i]->dead && !streams[i]->first && !streams[i]->busy) number = i;
    if (number == MAX_STREAMS) return NULL;
    Clock clock = {{0}};
    if (number < stream_count) {
        /* The number goes on counting where the last one ended, or old accesses would seem ordered. */
        clock = streams[number]->clock;
        streams[number]->magic = 0;
    } else {
        stream_count++;
    }
    Stream *stream = calloc(1, sizeof *stream);
    *stream = (Stream){.magic = STREAM, .number = number, .device = device, .clock = clock};
    streams[number] = stream;
    return stream;
}

static Device *current(void) { return depth ? stack[depth - 1] : NULL; }

/* The stream of a handle; 0 is the one that the current context has by itself. */
static Stream *stream_of(void *handle) {
    if (handle && (uintptr_t)handle > 2) {
        Stream *stream = handle;
        return stream->magic == STREAM && !stream->dead ? stream : NULL;
    }
    Device *device = current();
    if (!device) return NULL;
    if (!device->legacy) device->legacy = new_stream(device);
    return device->legacy;
}

static void put(Stream *stream, Op op) {
    Op *own = malloc(sizeof *own);
    *own = op;
    own->next = NULL;
    own->host = seen_by_host;
    if (stream->last) stream->last->next = own; else stream->first = own;
    stream->last = own;
    pthread_cond_broadcast(&changed);
}

static int can_run(Stream *stream) {
    Op *op = stream->first;
    return op && !stream->busy && !stalled && (op->kind != WAIT || op->record->done);
}

static void let_go(Record *record) {
    if (--record->refs == 0) free(record);
}

static void pause_us(uint64_t us) {
    struct timespec time = {(time_t)(us / 1000000), (long)(us % 1000000) * 1000};
    nanosleep(&time, NULL);
}

static uint8_t word(uint64_t version, uint64_t at) {
    uint64_t mixed = (version + 1) * 0x9e3779b97f4a7c15ull ^ (at / 8) * 0xd6e8feb86659fd93ull;
    mixed ^= mixed >> 32;
    mixed *= 0xd6e8feb86659fd93ull;
    return (uint8_t)(mixed >> (8 * (at % 8)));
}

API void fakecuda_pattern(uint8_t *out, uint64_t from, size_t bytes, uint64_t version) {
    for (size_t i = 0; i < bytes; i++) out[i] = word(version, from + i);
}

/* Moves the bytes of an op: without the lock, in slices. */
static void move(Op *op, uint64_t jitter) {
    size_t since = 0;
    for (size_t row = 0; row < op->height; row++) {
        uint64_t src = op->src + row * op->src_pitch, dst = op->dst + row * op->dst_pitch;
        uint8_t *to = op->to_device ? backing(dst) : (uint8_t *)dst;
        for (size_t at = 0; at < op->width; at += SLICE) {
            size_t n = op->width - at < SLICE ? op->width - at : SLICE;
            if (op->kind == UPDATE) fakecuda_pattern(to + at, at, n, op->version);
            else memmove(to + at, (op->from_device ? backing(src) : (uint8_t *)src) + at, n);
            if (jitter && (since += n) >= SLICE) pause_us(jitter % 50), jitter = jitter * 6364136223846793005ull + 1, since = 0;
        }
    }
}

static void check_accesses(Op *op, Stream *stream, const Clock *clock) {
    size_t src_bytes = reach(op->width, op->height, op->src_pitch), dst_bytes = reach(op->width, op->height, op->dst_pitch);
    if (!src_bytes) return;
    if (op->kind == UPDATE) {
        access_block(op, stream, clock, op->dst, dst_bytes, 1, "an update");
        return;
    }
    if (op->from_device) access_block(op, stream, clock, op->src, src_bytes, 0, "a copy to the host");
    if (op->to_device) access_block(op, stream, clock, op->dst, dst_bytes, 1, "a copy to the device");
    op->pinned = (op->to_device || is_registered((uintptr_t)op->dst, dst_bytes)) && (op->from_device || is_registered((uintptr_t)op->src, src_bytes));
    if (!op->pinned) violation("a copy %s host memory that is not registered", op->to_device ? "comes from" : "goes to");
}

static void execute(Stream *stream, Op *op) {
    uint64_t jitter = delay_us ? draw() : 0;
    join(&stream->clock, &op->host);
    if (op->kind == WAIT) join(&stream->clock, &op->record->clock);
    stream->clock.at[stream->number]++;
    Clock clock = stream->clock;
    int moves = op->kind == COPY || op->kind == UPDATE;
    if (moves && !sticky && !op->lost) {
        Call *copies = call_named("copy");
        if (op->kind == COPY && enter("copy")) lose(copies->code);
        check_accesses(op, stream, &clock);
        if (op->fails) lose(op->fails);
    }
    int dead = sticky || op->lost;
    pthread_mutex_unlock(&big);
    if (delay_us) pause_us(jitter % (uint64_t)delay_us);
    if (moves && !dead) move(op, delay_us ? jitter | 1 : 0);
    pthread_mutex_lock(&big);
    if (moves && !dead && op->pinned && !op->to_device && !is_registered((uintptr_t)op->dst, reach(op->width, op->height, op->dst_pitch)))
        violation("host memory was unregistered while a copy went there");
    if (op->kind == RECORD) {
        op->record->clock = clock;
        op->record->done = 1;
    }
    if (op->record) let_go(op->record);
    executed++;
}

static void *engine(void *unused) {
    (void)unused;
    pthread_mutex_lock(&big);
    for (;;) {
        int ready = 0;
        Stream *chosen = NULL;
        for (int i = 0; i < stream_count; i++)
            if (can_run(streams[i]) && draw() % (uint64_t)++ready == 0) chosen = streams[i];
        if (!chosen) {
            pthread_cond_wait(&changed, &big);
            continue;
        }
        Op *op = chosen->first;
        chosen->busy = 1;
        execute(chosen, op);
        chosen->busy = 0;
        chosen->first = op->next;
        if (!chosen->first) chosen->last = NULL;
        free(op);
        pthread_cond_broadcast(&changed);
    }
    return NULL;
}

static void drain(Stream *stream) {
    while (stream->first && !stalled) pthread_cond_wait(&changed, &big);
    join(&seen_by_host, &stream->clock);
}

/* ---- the driver -------------------------------------------------------------------------------------------------------- */

API int cuInit(unsigned flags) {
    const char *mode = getenv("FAKE_CUDA");
    BEGIN;
    if (flags) FAIL(INVALID_VALUE);
    if (mode && !strcmp(mode, "stub")) FAIL(STUB_LIBRARY);
    if (mode && !strcmp(mode, "no-device")) FAIL(NO_DEVICE);
    if (mode && !strcmp(mode, "init-fails")) FAIL(7777);
    start();
    END;
}

API int cuDriverGetVersion(int *version) {
    BEGIN;
    *version = getenv("FAKE_CUDA_VERSION") ? atoi(getenv("FAKE_CUDA_VERSION")) : 13000;
    END;
}

API int cuDeviceGetCount(int *count) {
    BEGIN;
    *count = device_count;
    END;
}

API int cuDeviceGet(int *device, int ordinal) {
    BEGIN;
    if (ordinal < 0 || ordinal >= device_count) FAIL(INVALID_DEVICE);
    *device = ordinal;
    END;
}

API int cuDeviceGetName(char *name, int len, int device) {
    BEGIN;
    snprintf(name, (size_t)len, "Fake GPU %d", device);
    END;
}

API int cuDevicePrimaryCtxRetain(void **context, int device) {
    BEGIN;
    if (device < 0 || device >= device_count) FAIL(INVALID_DEVICE);
    devices[device].retained++;
    *context = &devices[device];
    END;
}

API int cuDevicePrimaryCtxRelease_v2(int device) {
    BEGIN;
    if (--devices[device].retained < 0) FAIL(INVALID_CONTEXT);
    END;
}

API int cuCtxPushCurrent_v2(void *context) {
    BEGIN;
    if (depth == 16) FAIL(INVALID_VALUE);
    stack[depth++] = context;
    END;
}

API int cuCtxPopCurrent_v2(void **context) {
    /* The stack is the thread's own: its top is taken off whatever has become of the device. */
    Device *top = depth ? stack[--depth] : NULL;
    BEGIN;
    if (!top) FAIL(INVALID_CONTEXT);
    if (context) *context = top;
    END;
}

API int cuCtxGetCurrent(void **context) {
    BEGIN;
    *context = current();
    END;
}

API int cuCtxSetCurrent(void *context) {
    BEGIN;
    if (!depth) depth = 1;
    stack[depth - 1] = context;
    if (!context) depth--;
    END;
}

API int cuCtxSynchronize(void) {
    BEGIN;
    if (!current()) FAIL(INVALID_CONTEXT);
    for (int i = 0; i < stream_count; i++)
        if (streams[i]->device == current()) drain(streams[i]);
    END;
}

#ifndef INCOMPLETE
API int cuThreadExchangeStreamCaptureMode(int *mode) {
    BEGIN;
    int before = relaxed;
    relaxed = *mode;
    *mode = before;
    END;
}
#endif

API int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    (void)priority;
    BEGIN;
    if (flags != 1) violation("a stream that synchronises with the default stream was created");
    if (!current()) FAIL(INVALID_CONTEXT);
    *stream = new_stream(current());
    if (!*stream) FAIL(OUT_OF_MEMORY);
    END;
}

API int cuStreamDestroy_v2(void *handle) {
    BEGIN;
    Stream *stream = stream_of(handle);
    if (!handle || !stream) FAIL(INVALID_HANDLE);
    stream->dead = 1;
    END;
}

API int cuStreamSynchronize(void *handle) {
    BEGIN;
    Stream *stream = stream_of(handle);
    if (!stream) FAIL(INVALID_HANDLE);
    drain(stream);
    END;
}

API int cuStreamQuery(void *handle) {
    BEGIN;
    Stream *stream = stream_of(handle);
    if (!stream) FAIL(INVALID_HANDLE);
    if (stream->first) FAIL(NOT_READY);
    join(&seen_by_host, &stream->clock);
    END;
}

API int cuStreamIsCapturing(void *handle, int *status) {
    BEGIN;
    Stream *stream = stream_of(handle);
    if (!stream) FAIL(INVALID_HANDLE);
    *status = stream->capturing;
    END;
}

API int cuStreamWaitEvent(void *handle, void *event, unsigned flags) {
    (void)flags;
    BEGIN;
    Stream *stream = stream_of(handle);
    Event *waited = event;
    if (!stream || !waited || waited->magic != EVENT) FAIL(INVALID_HANDLE);
    if (waited->last) {
        waited->last->refs++;
        put(stream, (Op){.kind = WAIT, .record = waited->last});
    }
    END;
}

API int cuEventCreate(void **event, unsigned flags) {
    BEGIN;
    if (!(flags & 2)) violation("an event with timing was created");
    if (!current()) FAIL(INVALID_CONTEXT);
    Event *made = calloc(1, sizeof *made);
    *made = (Event){EVENT, current(), NULL};
    *event = made;
    END;
}

API int cuEventDestroy_v2(void *event) {
    BEGIN;
    Event *own = event;
    if (!own || own->magic != EVENT) FAIL(INVALID_HANDLE);
    own->magic = 0;
    if (own->last) let_go(own->last);
    free(own);
    END;
}

API int cuEventRecord(void *event, void *handle) {
    BEGIN;
    Stream *stream = stream_of(handle);
    Event *own = event;
    if (!stream || !own || own->magic != EVENT || own->device != stream->device) FAIL(INVALID_HANDLE);
    if (stream->capturing) FAIL(CAPTURE_UNSUPPORTED);
    if (own->last) let_go(own->last);
    own->last = calloc(1, sizeof *own->last);
    own->last->refs = 2;
    put(stream, (Op){.kind = RECORD, .record = own->last});
    END;
}

API int cuEventQuery(void *event) {
    BEGIN;
    Event *own = event;
    if (!own || own->magic != EVENT) FAIL(INVALID_HANDLE);
    if (own->last && !own->last->done) FAIL(NOT_READY);
    if (own->last) join(&seen_by_host, &own->last->clock);
    END;
}

API int cuEventSynchronize(void *event) {
    BEGIN;
    Event *own = event;
    if (!own || own->magic != EVENT) FAIL(INVALID_HANDLE);
    while (own->last && !own->last->done) pthread_cond_wait(&changed, &big);
    if (own->last) join(&seen_by_host, &own->last->clock);
    END;
}

API int cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags) {
    (void)flags;
    BEGIN;
    if (!bytes) FAIL(INVALID_VALUE);
    for (Registered *one = registered; one; one = one->next)
        if ((uintptr_t)address < one->start + one->bytes && one->start < (uintptr_t)address + bytes) FAIL(ALREADY_REGISTERED);
    Registered *own = malloc(sizeof *own);
    *own = (Registered){(uintptr_t)address, bytes, registered};
    registered = own;
    END;
}

API int cuMemHostUnregister(void *address) {
    BEGIN;
    Registered **place = &registered;
    while (*place && (*place)->start != (uintptr_t)address) place = &(*place)->next;
    if (!*place) FAIL(NOT_REGISTERED);
    Registered *own = *place;
    *place = own->next;
    /* The memory must still be there: pages that are gone were unmapped too early. */
    unsigned char present;
    if (mincore((void *)(own->start & ~(uintptr_t)4095), 1, &present)) violation("host memory was unmapped before it was unregistered");
    free(own);
    END;
}

API int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    BEGIN;
    if (!current()) FAIL(INVALID_CONTEXT);
    if (!bytes) FAIL(INVALID_VALUE);
    if (used + bytes > WINDOW) FAIL(OUT_OF_MEMORY);
    if (block_count == block_room) {
        block_room = block_room ? 2 * block_room : 64;
        blocks = realloc(blocks, (size_t)block_room * sizeof *blocks);
    }
    *address = (uint64_t)window + used;
    used += (bytes + 511) / 512 * 512;
    blocks[block_count++] = (Block){*address, bytes, current()->ordinal, 0, NULL, 0, 0};
    END;
}

API int cuMemFree_v2(uint64_t address) {
    BEGIN;
    Block *block = block_of(address, 1);
    if (!block || block->start != address || block->dead) FAIL(INVALID_VALUE);
    block->dead = 1;
    size_t page = 4096, first = (address - (uint64_t)window + page - 1) / page * page, last = (address - (uint64_t)window + block->bytes) / page * page;
    if (last > first) madvise(mirror + first, last - first, MADV_DONTNEED);
    END;
}

API int cuPointerGetAttribute(void *data, int attribute, uint64_t address) {
    BEGIN;
    Block *block = block_of(address, 1);
    if (!block || block->dead) FAIL(INVALID_VALUE);
    if (attribute == 9) *(int *)data = block->device;
    else if (attribute == 2) *(unsigned *)data = 2;
    else FAIL(INVALID_VALUE);
    END;
}

static int copy(void *stream, uint64_t src, uint64_t dst, int from_device, int to_device, size_t width, size_t height, size_t src_pitch, size_t dst_pitch) {
    Stream *own = stream_of(stream);
    if (!own) return INVALID_HANDLE;
    if (own->capturing) return CAPTURE_UNSUPPORTED;
    put(own, (Op){.kind = COPY, .src = src, .dst = dst, .from_device = from_device, .to_device = to_device, .width = width, .height = height,
                  .src_pitch = src_pitch, .dst_pitch = dst_pitch});
    return OK;
}

API int cuMemcpyDtoHAsync_v2(void *dst, uint64_t src, size_t bytes, void *stream) {
    BEGIN;
    code = copy(stream, src, (uint64_t)dst, 1, 0, bytes, 1, bytes, bytes);
    END;
}

API int cuMemcpyHtoDAsync_v2(uint64_t dst, const void *src, size_t bytes, void *stream) {
    BEGIN;
    code = copy(stream, (uint64_t)src, dst, 0, 1, bytes, 1, bytes, bytes);
    END;
}

API int cuMemcpyDtoDAsync_v2(uint64_t dst, uint64_t src, size_t bytes, void *stream) {
    BEGIN;
    code = copy(stream, src, dst, 1, 1, bytes, 1, bytes, bytes);
    END;
}

/* CUDA_MEMCPY2D, as cuda.h lays it out. */
typedef struct {
    size_t src_x, src_y;
    int src_type;
    const void *src_host;
    uint64_t src_device;
    void *src_array;
    size_t src_pitch, dst_x, dst_y;
    int dst_type;
    void *dst_host;
    uint64_t dst_device;
    void *dst_array;
    size_t dst_pitch, width, height;
} Copy2D;

API int cuMemcpy2DAsync_v2(const void *description, void *stream) {
    BEGIN;
    const Copy2D *one = description;
    if (one->src_x || one->src_y || one->dst_x || one->dst_y || one->width > one->src_pitch || one->width > one->dst_pitch) FAIL(INVALID_VALUE);
    int from_device = one->src_type == 2, to_device = one->dst_type == 2;
    code = copy(stream, from_device ? one->src_device : (uint64_t)one->src_host, to_device ? one->dst_device : (uint64_t)one->dst_host, from_device, to_device,
                one->width, one->height, one->src_pitch, one->dst_pitch);
    END;
}

/* CUmemcpyAttributes, as cuda.h lays it out. */
typedef struct { int order; struct { int type, id; } src_hint, dst_hint; unsigned flags; } CopyAttributes;

API int cuMemcpyBatchAsync(uint64_t *dst, uint64_t *src, size_t *bytes, size_t count, CopyAttributes *how, size_t *since, size_t hows, size_t *failed, void *stream) {
    size_t *order = NULL;
    BEGIN;
    *failed = SIZE_MAX;
    if (!stream || !count || hows != 1 || since[0]) FAIL(INVALID_VALUE);
    if (how->order != 1) violation("a batch of copies that need not see what is on its stream before it");
    /* Nothing orders them among themselves. */
    order = malloc(count * sizeof *order);
    for (size_t i = 0; i < count; i++) {
        size_t other = draw() % (i + 1);
        order[i] = order[other];
        order[other] = i;
    }
    for (size_t i = 0; i < count; i++) {
        size_t one = order[i];
        if (!bytes[one]) FAIL(INVALID_VALUE);
        code = copy(stream, src[one], dst[one], is_device(src[one]), is_device(dst[one]), bytes[one], 1, bytes[one], bytes[one]);
        if (code) FAIL(code);
    }
end:
    free(order);
    pthread_mutex_unlock(&big);
    return code;
}

API int cuGetErrorName(int error, const char **name) {
    static const struct { int code; const char *name; } names[] = {
        {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"}, {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"}, {STUB_LIBRARY, "CUDA_ERROR_STUB_LIBRARY"},
        {NO_DEVICE, "CUDA_ERROR_NO_DEVICE"}, {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"}, {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
        {719, "CUDA_ERROR_LAUNCH_FAILED"}, {46, "CUDA_ERROR_DEVICE_UNAVAILABLE"}, {214, "CUDA_ERROR_ECC_UNCORRECTABLE"},
        {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].code == error) {
            *name = names[i].name;
            return OK;
        }
    *name = NULL;
    return INVALID_VALUE;
}

/* ---- for tests ----------------------------------------------------------------------------------------------------------- */

API void fakecuda_random(uint64_t new_seed, long new_delay_us) {
    pthread_mutex_lock(&big);
    seed = new_seed * 2654435769u + 88172645463325252ull;
    delay_us = new_delay_us;
    pthread_mutex_unlock(&big);
}

API int fakecuda_update(void *handle, uint64_t address, size_t bytes, uint64_t version) {
    BEGIN;
    Stream *stream = stream_of(handle);
    if (!stream) FAIL(INVALID_HANDLE);
    put(stream, (Op){.kind = UPDATE, .dst = address, .to_device = 1, .width = bytes, .height = 1, .src_pitch = bytes, .dst_pitch = bytes, .version = version});
    END;
}

API void fakecuda_peek(uint64_t address, uint8_t *out, size_t bytes) { memcpy(out, backing(address), bytes); }

API void fakecuda_poke(uint64_t address, const uint8_t *bytes, size_t count) { memcpy(backing(address), bytes, count); }

API void fakecuda_fail(const char *name, long nth, int error, int how) {
    pthread_mutex_lock(&big);
    Call *call = call_named(name);
    call->fail_at = nth < 0 ? -1 : call->calls + nth;
    call->code = error;
    call->for_ever = how;
    pthread_mutex_unlock(&big);
}

API long fakecuda_calls(const char *name) {
    pthread_mutex_lock(&big);
    long found = call_named(name)->calls;
    pthread_mutex_unlock(&big);
    return found;
}

API void fakecuda_stall(int on) {
    pthread_mutex_lock(&big);
    stalled = on;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&big);
}

API void fakecuda_capturing(void *handle, int on) {
    pthread_mutex_lock(&big);
    Stream *stream = stream_of(handle);
    if (stream) stream->capturing = on;
    pthread_mutex_unlock(&big);
}

API void fakecuda_heal(void) {
    pthread_mutex_lock(&big);
    sticky = 0;
    stalled = 0;
    for (int i = 0; i < 64; i++) calls[i].fail_at = -1;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&big);
}

API long fakecuda_pending(void) {
    pthread_mutex_lock(&big);
    long found = 0;
    for (int i = 0; i < stream_count; i++)
        for (Op *op = streams[i]->first; op; op = op->next) found++;
    pthread_mutex_unlock(&big);
    return found;
}

API size_t fakecuda_registered(void) {
    pthread_mutex_lock(&big);
    size_t bytes = 0;
    for (Registered *one = registered; one; one = one->next) bytes += one->bytes;
    pthread_mutex_unlock(&big);
    return bytes;
}

API size_t fakecuda_violations(char *out, size_t room) {
    pthread_mutex_lock(&big);
    size_t found = violations_len;
    if (out && room) snprintf(out, room, "%s", violations);
    violations_len = 0;
    violations[0] = 0;
    pthread_mutex_unlock(&big);
    return found;
}
