/* How long what crosses the link takes, by the rates in STANDIN_LINK: reads in sequence, scattered reads and copies by
 * our kernels, and copies by the copy engine, in GB/s. Only these advance the clock that events tell.
 */
#include "standin.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum way { SEQUENTIAL, SCATTERED, COPIED, ENGINE, WAYS };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static double milliseconds;

static void spend(enum way way, size_t nbytes) {
    double of[WAYS] = {51.1, 51.1, 50.4, 54.5}; /* as an H200 was measured (GPU_STATUS.md) */
    const char* set = getenv("STANDIN_LINK");
    if (set) sscanf(set, "%lf,%lf,%lf,%lf", of, of + 1, of + 2, of + 3);
    pthread_mutex_lock(&lock);
    milliseconds += nbytes / (of[way] * 1e6);
    pthread_mutex_unlock(&lock);
}

static bool in_host_ram(const void* address, size_t nbytes) {
    return standin_kind(address) == KIND_MANAGED && !standin_in_vram(address, nbytes);
}

/* As in kernels/uvm_ops.cu: uvm_copy and layer_copies. */
struct part {
    char *from, *to;
    size_t nbytes;
};

struct copies {
    struct part part[32];
    unsigned pieces[32], in_vram[512], near;
    int count;
};

void standin_link_kernel(const char* kernel, void** arguments) {
    if (!strcmp(kernel, "uvm_read_kernel")) {
        const uint64_t* pieces = *(uint64_t**)arguments[0];
        const int count = *(int*)arguments[1];
        const size_t nbytes = *(size_t*)arguments[2];
        bool apart = false;
        size_t crossing = 0;
        for (int i = 0; i < count; i++) {
            apart |= i > 0 && pieces[i] != pieces[i - 1] + nbytes;
            if (in_host_ram((void*)pieces[i], nbytes)) crossing += nbytes;
            standin_read((void*)pieces[i], nbytes);
        }
        spend(apart ? SCATTERED : SEQUENTIAL, crossing);
    } else if (!strcmp(kernel, "uvm_copy_kernel")) {
        const struct copies* copies = arguments[0];
        for (int i = 0; i < copies->count; i++) {
            const struct part* part = &copies->part[i];
            if (in_host_ram(part->from, part->nbytes)) spend(COPIED, part->nbytes);
            standin_read(part->from, part->nbytes);
        }
    }
}

void standin_link_copy(const void* from, size_t nbytes) {
    if (in_host_ram(from, nbytes)) spend(ENGINE, nbytes);
}

double standin_link_time(void) { return milliseconds; }

float standin_link_elapsed(double start, double end) { return end > start ? (float)(end - start) : 1; }
