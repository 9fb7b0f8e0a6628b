/* The GPU that the stand-in plays: what runtime.c and driver.c both answer. */
#ifndef STANDIN_DEVICE_H
#define STANDIN_DEVICE_H

#include <stdbool.h>

#define DEVICE_SMS 132
#define DEVICE_MAJOR 9
#define DEVICE_MINOR 0
#define DEVICE_REGISTERS 65536
#define DEVICE_SHARED_MEMORY_SM 233472
#define DEVICE_SHARED_MEMORY_OPTIN 232448
#define DEVICE_L2 62914560

/* STANDIN_NAME, such as "NVIDIA H100 80GB HBM3", else an H200. */
const char* standin_name(void);
/* A device attribute: cudaDeviceAttr and CUdevice_attribute share their numbers. STANDIN_ATTRIBUTE_<number> overrides.
 */
int standin_attribute(int attribute);
/* How many GPUs there are: STANDIN_GPUS, or one; none where CUDA_VISIBLE_DEVICES is empty. They are alike and share one
 * memory. */
int standin_gpus(void);
/* The calling thread's GPU. */
int standin_current_gpu(void);
void standin_use_gpu(int gpu);
/* Whether this process has a context on any GPU: once it has chosen one or taken memory. */
void standin_begin_context(void);
bool standin_has_context(void);

/* What the driver serves: STANDIN_DRIVER, such as 12040, else 13000. */
int standin_driver_version(void);

#endif
