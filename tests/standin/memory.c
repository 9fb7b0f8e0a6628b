/* Memory of all kinds, in host memory, so that its bytes can be checked. A managed range also has, for each page of 64
 * KiB, where the page is and where it prefers to be. Addresses are used once: a use after free always ends the process,
 * not only where nothing took its place.
 *
 * The GPU has as much VRAM as STANDIN_VRAM says. Where it is full, what needs some takes it from managed blocks of 2
 * MiB, as the driver does (open kernel modules, 580.95.05, kernel-open/nvidia-uvm):
 *
 * - The block that was populated longest ago goes to host RAM, whatever was advised (uvm_pmm_gpu.c:1450,
 *   pick_root_chunk_to_evict). A read by the GPU does not renew it, a prefetch does (uvm_va_block.c:5097).
 * - Plain allocations evict (uvm_pmm_gpu.c:2481, uvm_pmm_gpu_pma_evict_pages). So do prefetches and faults, which keep
 *   the block that they have freed: no other takes it away (uvm_va_block.c:1978, block_alloc_gpu_chunk).
 * - Where no managed block is left, plain allocations and prefetches fail (NV_ERR_NO_MEMORY). A fault is cancelled,
 *   which ends the program that faulted (uvm_gpu_replayable_faults.c:2961).
 * - An evicted block that prefers the GPU is not mapped for it in host RAM, though it is AccessedBy the GPU
 *   (uvm_va_block.c:11289), so a read faults and brings it back. One that prefers the host is read there.
 */
#define _GNU_SOURCE
#include "device.h"
#include "standin.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { PAGE = 64 << 10, BLOCK = 2 << 20, BLOCK_PAGES = BLOCK / PAGE };

struct page {
    char where;
    char preferred;
};

struct range {
    struct range* next;
    char* start; /* what the caller has */
    size_t nbytes;
    char* mapped; /* what mmap gave */
    size_t mapped_bytes;
    enum kind kind;
    struct page* pages;  /* managed only */
    uint64_t* populated; /* managed only: when each block of 2 MiB was moved to VRAM */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct range* ranges;
static size_t device_bytes, managed_bytes;
static uint64_t clock_of_blocks;
static bool evicted_any;

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
    standin_begin_context();
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
    if (kind == KIND_MANAGED) {
        range->pages = calloc(page_count(range), sizeof *range->pages);
        range->populated = calloc(page_count(range) / BLOCK_PAGES + 1, sizeof *range->populated);
    }
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
    mmap(range->mapped, range->mapped_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    free(range->pages);
    free(range->populated);
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

void standin_prefer(const void* start, size_t nbytes, enum place place) {
    size_t count;
    pthread_mutex_lock(&lock);
    struct page* pages = pages_of(start, nbytes, &count);
    for (size_t i = 0; i < count; i++) pages[i].preferred = place;
    pthread_mutex_unlock(&lock);
}

/* Changes where pages [first, end) are; the VRAM is there. */
static void put(struct range* range, size_t first, size_t end, enum place place) {
    for (size_t i = first; i < end; i++) {
        if (range->pages[i].where == place) continue;
        if (range->pages[i].where == PLACE_DEVICE) device_bytes -= PAGE;
        if (place == PLACE_DEVICE) device_bytes += PAGE;
        range->pages[i].where = place;
    }
}

static size_t block_end(const struct range* range, size_t block) {
    size_t end = (block + 1) * BLOCK_PAGES;
    return end < page_count(range) ? end : page_count(range);
}

static bool in_vram(const struct range* range, size_t block) {
    for (size_t i = block * BLOCK_PAGES; i < block_end(range, block); i++) {
        if (range->pages[i].where == PLACE_DEVICE) return true;
    }
    return false;
}

/* Evicts until so many bytes are free, but not block `kept` of the range `of`. False if what is left cannot be evicted.
 */
static bool make_room(size_t nbytes, const struct range* of, size_t kept) {
    size_t total = standin_setting("STANDIN_VRAM", 16LL << 30), evicted = 0;
    bool fits;
    while (!(fits = device_bytes + nbytes <= total)) {
        struct range* oldest = NULL;
        size_t chosen = 0;
        for (struct range* range = ranges; range; range = range->next) {
            for (size_t block = 0; range->pages && block * BLOCK_PAGES < page_count(range); block++) {
                if ((range == of && block == kept) || !in_vram(range, block)) continue;
                if (oldest && oldest->populated[chosen] <= range->populated[block]) continue;
                oldest = range;
                chosen = block;
            }
        }
        if (!oldest) break;
        size_t before = device_bytes;
        put(oldest, chosen * BLOCK_PAGES, block_end(oldest, chosen), PLACE_HOST);
        evicted += before - device_bytes;
    }
    if (evicted) {
        evicted_any = true;
        standin_log("evict", 0, "\"nbytes\": %zu", evicted);
    }
    return fits;
}

bool standin_make_room(size_t nbytes) {
    pthread_mutex_lock(&lock);
    bool fits = make_room(nbytes, NULL, 0);
    pthread_mutex_unlock(&lock);
    return fits;
}

/* Moves pages [first, end) to VRAM, block by block. Where no room can be made, those from there on stay. */
static bool populate(struct range* range, size_t first, size_t end) {
    while (first < end) {
        size_t block = first / BLOCK_PAGES, stop = block_end(range, block) < end ? block_end(range, block) : end;
        size_t away = 0;
        for (size_t i = first; i < stop; i++) away += range->pages[i].where != PLACE_DEVICE;
        if (away && !make_room(away * PAGE, range, block)) return false;
        put(range, first, stop, PLACE_DEVICE);
        range->populated[block] = ++clock_of_blocks;
        first = stop;
    }
    return true;
}

bool standin_move(const void* start, size_t nbytes, enum place place) {
    bool moved = true;
    pthread_mutex_lock(&lock);
    struct range* range = find(start);
    size_t first = ((char*)start - range->start) / PAGE;
    size_t end = round_up((char*)start - range->start + nbytes, PAGE) / PAGE;
    if (place == PLACE_DEVICE)
        moved = populate(range, first, end);
    else
        put(range, first, end, place);
    pthread_mutex_unlock(&lock);
    return moved;
}

/* The GPU reads `nbytes` of a range, or all from `start` on if that is less: blocks of which a page prefers the GPU and
 * is elsewhere come back. Returns how many did. */
size_t standin_read(const void* start, size_t nbytes) {
    size_t faults = 0;
    if (!evicted_any) return 0;
    pthread_mutex_lock(&lock);
    struct range* range = find(start);
    if (range && range->pages) {
        size_t offset = (char*)start - range->start, first = offset / PAGE;
        size_t end = round_up(offset + nbytes, PAGE) / PAGE;
        if (end > page_count(range)) end = page_count(range);
        for (size_t i = first; i < end; i++) {
            struct page page = range->pages[i];
            if (page.where == PLACE_DEVICE || page.preferred != PLACE_DEVICE) continue;
            size_t block = i / BLOCK_PAGES;
            bool back = populate(range, block * BLOCK_PAGES, block_end(range, block));
            standin_log("fault", back ? 0 : 2, "\"address\": %zu", (size_t)range->start + block * BLOCK);
            faults++;
            i = block_end(range, block) - 1;
        }
    }
    pthread_mutex_unlock(&lock);
    return faults;
}

bool standin_in_vram(const void* start, size_t nbytes) {
    size_t count;
    pthread_mutex_lock(&lock);
    struct page* pages = pages_of(start, nbytes, &count);
    bool all = true;
    for (size_t i = 0; i < count; i++) all &= pages[i].where == PLACE_DEVICE;
    pthread_mutex_unlock(&lock);
    return all;
}

/* The driver takes the VRAM of the pages for something else. They still prefer the GPU, so a read brings them back. */
EXPORT void standin_evict(const void* start, size_t nbytes) {
    standin_move(start, nbytes, PLACE_HOST);
    evicted_any = true;
}

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
    return cycles + (standin_read(from, 1) ? FAULT : FAR);
}

EXPORT size_t standin_managed_bytes(void) { return managed_bytes; }

void standin_vram(size_t* free_bytes, size_t* total_bytes) {
    size_t total = standin_setting("STANDIN_VRAM", 16LL << 30);
    pthread_mutex_lock(&lock);
    size_t used = device_bytes;
    pthread_mutex_unlock(&lock);
    *total_bytes = total;
    *free_bytes = used < total ? total - used : 0;
}
