/* Memory of all kinds, in host memory, so that its bytes can be checked. A managed range also has, for each page of 64
 * KiB, where the page is and what was advised, so that queries answer truthfully. Freed ranges are unmapped: a use
 * after free ends the process. */
#define _GNU_SOURCE
#include "device.h"
#include "standin.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 64 << 10, BLOCK = 2 << 20 };

struct page {
    char where;
    char advice[ADVICE_COUNT];
    bool accessed_by;
};

struct range {
    struct range* next;
    char* start; /* what the caller has */
    size_t nbytes;
    char* mapped; /* what mmap gave */
    size_t mapped_bytes;
    enum kind kind;
    struct page* pages; /* managed only */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct range* ranges;
static size_t device_bytes, managed_bytes;

static size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

static size_t page_count(const struct range* range) { return round_up(range->nbytes, PAGE) / PAGE; }

static struct range* find(const void* address) {
    for (struct range* range = ranges; range; range = range->next) {
        if ((char*)address >= range->start && (char*)address < range->start + range->nbytes) return range;
    }
    return NULL;
}

void* standin_take(size_t nbytes, enum kind kind) {
    if (nbytes == 0) nbytes = 1;
    struct range* range = calloc(1, sizeof *range);
    /* STANDIN_MISALIGN moves managed ranges off the boundary of 2 MiB that a driver usually keeps. */
    size_t shift = kind == KIND_MANAGED ? (size_t)standin_setting("STANDIN_MISALIGN", 0) : 0;
    size_t align = kind == KIND_MANAGED || nbytes >= BLOCK ? BLOCK : 4096;
    range->mapped_bytes = round_up(nbytes, 4096) + align + shift;
    range->mapped =
        mmap(NULL, range->mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range->mapped == MAP_FAILED) {
        free(range);
        return NULL;
    }
    range->start = (char*)round_up((size_t)range->mapped, align) + shift;
    range->nbytes = nbytes;
    range->kind = kind;
    if (kind == KIND_MANAGED) range->pages = calloc(page_count(range), sizeof *range->pages);
    pthread_mutex_lock(&lock);
    if (kind == KIND_DEVICE) device_bytes += nbytes;
    if (kind == KIND_MANAGED) managed_bytes += nbytes;
    range->next = ranges;
    ranges = range;
    pthread_mutex_unlock(&lock);
    return range->start;
}

bool standin_give(void* start) {
    if (!start) return true;
    pthread_mutex_lock(&lock);
    struct range** link = &ranges;
    while (*link && (*link)->start != start) link = &(*link)->next;
    struct range* range = *link;
    if (range) {
        *link = range->next;
        if (range->kind == KIND_DEVICE) device_bytes -= range->nbytes;
        if (range->kind == KIND_MANAGED) managed_bytes -= range->nbytes;
        for (size_t i = 0; range->pages && i < page_count(range); i++) {
            if (range->pages[i].where == PLACE_DEVICE) device_bytes -= PAGE;
        }
    }
    pthread_mutex_unlock(&lock);
    if (!range) return false;
    munmap(range->mapped, range->mapped_bytes);
    free(range->pages);
    free(range);
    return true;
}

void standin_hold(void* start, size_t nbytes, bool held) {
    if (!held) madvise(start, nbytes, MADV_DONTNEED);
    mprotect(start, nbytes, held ? PROT_READ | PROT_WRITE : PROT_NONE);
    pthread_mutex_lock(&lock);
    device_bytes += held ? nbytes : -nbytes;
    pthread_mutex_unlock(&lock);
}

enum kind standin_kind(const void* address) {
    pthread_mutex_lock(&lock);
    struct range* range = find(address);
    enum kind kind = range ? range->kind : KIND_NONE;
    pthread_mutex_unlock(&lock);
    return kind;
}

bool standin_is_managed(const void* start, size_t nbytes) {
    pthread_mutex_lock(&lock);
    struct range* range = find(start);
    bool inside =
        range && range->kind == KIND_MANAGED && nbytes > 0 && (char*)start + nbytes <= range->start + range->nbytes;
    pthread_mutex_unlock(&lock);
    return inside;
}

/* The pages that [start, start + nbytes) touches, in a range that standin_is_managed has found. */
static struct page* pages_of(const void* start, size_t nbytes, size_t* count) {
    struct range* range = find(start);
    size_t first = ((char*)start - range->start) / PAGE;
    *count = round_up((char*)start - range->start + nbytes, PAGE) / PAGE - first;
    return range->pages + first;
}

void standin_set_place(const void* start, size_t nbytes, enum advice advice, enum place place) {
    size_t count;
    pthread_mutex_lock(&lock);
    struct page* pages = pages_of(start, nbytes, &count);
    for (size_t i = 0; i < count; i++) pages[i].advice[advice] = place;
    pthread_mutex_unlock(&lock);
}

/* Only the first pages of the span with one answer get the new one: seen on an H200 (`ops contract`, 2026-11-26). */
void standin_set_prefetched(const void* start, size_t nbytes, enum place place) {
    size_t count;
    pthread_mutex_lock(&lock);
    struct page* pages = pages_of(start, nbytes, &count);
    enum place before = pages[0].advice[ADVICE_PREFETCHED];
    for (size_t i = 0; i < count && pages[i].advice[ADVICE_PREFETCHED] == before; i++) {
        pages[i].advice[ADVICE_PREFETCHED] = place;
    }
    pthread_mutex_unlock(&lock);
}

void standin_set_accessed_by(const void* start, size_t nbytes, bool accessed) {
    size_t count;
    pthread_mutex_lock(&lock);
    struct page* pages = pages_of(start, nbytes, &count);
    for (size_t i = 0; i < count; i++) pages[i].accessed_by = accessed;
    pthread_mutex_unlock(&lock);
}

void standin_move(const void* start, size_t nbytes, enum place place) {
    size_t count;
    pthread_mutex_lock(&lock);
    struct page* pages = pages_of(start, nbytes, &count);
    for (size_t i = 0; i < count; i++) {
        if (pages[i].where == place) continue;
        if (pages[i].where == PLACE_DEVICE) device_bytes -= PAGE;
        if (place == PLACE_DEVICE) device_bytes += PAGE;
        pages[i].where = place;
    }
    pthread_mutex_unlock(&lock);
}

enum place standin_shared_place(const void* start, size_t nbytes, enum advice advice) {
    size_t count;
    pthread_mutex_lock(&lock);
    struct page* pages = pages_of(start, nbytes, &count);
    enum place shared = pages[0].advice[advice];
    for (size_t i = 1; i < count; i++) {
        if (pages[i].advice[advice] != shared) shared = PLACE_NONE;
    }
    pthread_mutex_unlock(&lock);
    return shared;
}

bool standin_accessed_by(const void* start, size_t nbytes) {
    size_t count;
    pthread_mutex_lock(&lock);
    struct page* pages = pages_of(start, nbytes, &count);
    bool all = true;
    for (size_t i = 0; i < count; i++) all &= pages[i].accessed_by;
    pthread_mutex_unlock(&lock);
    return all;
}

/* The driver takes the VRAM of the pages for something else. They still prefer the GPU, so a read brings them back. */
EXPORT void standin_evict(const void* start, size_t nbytes) { standin_move(start, nbytes, PLACE_HOST); }

/* What a read by the GPU takes, near what an H200 was measured to take; a fault is the shortest that an H100 showed.
 * The first read of a block after another one misses the TLB. */
EXPORT unsigned standin_read_cycles(const void* from) {
    enum { NEAR = 700, FAR = 2800, TLB_MISS = 2500, FAULT = 191528 };
    static size_t last_block;
    unsigned cycles = (size_t)from / BLOCK == last_block ? 0 : TLB_MISS;
    last_block = (size_t)from / BLOCK;
    if (!standin_is_managed(from, 1)) return cycles + (standin_kind(from) == KIND_DEVICE ? NEAR : FAR);
    size_t count;
    pthread_mutex_lock(&lock);
    struct page page = *pages_of(from, 1, &count);
    pthread_mutex_unlock(&lock);
    if (page.where == PLACE_DEVICE) return cycles + NEAR;
    if (page.advice[ADVICE_PREFERRED] != PLACE_DEVICE) return cycles + FAR;
    const char* block = (const char*)((size_t)from / BLOCK * BLOCK);
    bool whole = standin_is_managed(block, BLOCK);
    standin_move(whole ? block : from, whole ? BLOCK : 1, PLACE_DEVICE);
    return cycles + FAULT;
}

EXPORT size_t standin_managed_bytes(void) { return managed_bytes; }

/* What others hold of the VRAM of the calling thread's GPU: its place in the list STANDIN_TAKEN, none behind its end.
 */
static size_t taken(void) {
    const char* list = getenv("STANDIN_TAKEN");
    for (int i = 0; list && i < standin_current_gpu(); i++) {
        list = strchr(list, ',');
        if (list) list++;
    }
    return list ? strtoull(list, NULL, 10) : 0;
}

void standin_vram(size_t* free_bytes, size_t* total_bytes) {
    size_t total = standin_setting("STANDIN_VRAM", 16LL << 30);
    pthread_mutex_lock(&lock);
    size_t used = device_bytes + taken();
    pthread_mutex_unlock(&lock);
    *total_bytes = total;
    *free_bytes = used < total ? total - used : 0;
}
