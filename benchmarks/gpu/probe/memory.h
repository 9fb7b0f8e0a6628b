// The kinds of memory that are compared, and the driver calls that move managed pages.
#pragma once

#include "common.h"

enum class kind { plain, pinned, managed, managed_4k, host_numa };

inline const char* name_of(kind it) {
    const char* const names[] = {"plain", "pinned", "managed", "managed_4k", "host_numa"};
    return names[static_cast<int>(it)];
}

inline cudaMemLocation on_device(int device) { return {cudaMemLocationTypeDevice, device}; }
inline cudaMemLocation on_host() { return {cudaMemLocationTypeHost, 0}; }

inline void advise(const char* start, size_t nbytes, cudaMemoryAdvise advice, cudaMemLocation where) {
    CHECK(cudaMemAdvise(start, nbytes, advice, where));
}

inline void prefetch(const char* start, size_t nbytes, cudaMemLocation where, cudaStream_t stream) {
    CHECK(cudaMemPrefetchAsync(start, nbytes, where, 0, stream));
}

struct piece {
    size_t offset, nbytes;
};

inline void prefetch_batch(char* base, const std::vector<piece>& pieces, cudaMemLocation where, cudaStream_t stream) {
    std::vector<void*> starts;
    std::vector<size_t> sizes;
    for (const piece& it : pieces) {
        starts.push_back(base + it.offset);
        sizes.push_back(it.nbytes);
    }
    size_t first = 0;
    CHECK(cudaMemPrefetchBatchAsync(starts.data(), sizes.data(), starts.size(), &where, &first, 1, 0, stream));
}

// The driver API, looked up by name: where a machine has no driver, the program still links.
template <typename Function>
Function driver_function(const char* name) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult answer = cudaDriverEntryPointSymbolNotFound;
    CHECK(cudaGetDriverEntryPointByVersion(name, &found, 12020, cudaEnableDefault, &answer));
    if (answer != cudaDriverEntryPointSuccess || !found) fail(std::string("the driver has no ") + name);
    return reinterpret_cast<Function>(found);
}

// Host memory of NUMA node 0 mapped for the GPU by the virtual memory API. Containers and old kernels refuse it: then
// `refusal` names the call and its error.
class host_numa_memory {
  public:
    host_numa_memory(size_t nbytes, int device) {
        CUmemAllocationProp what = {};
        what.type = CU_MEM_ALLOCATION_TYPE_PINNED;
        what.location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
        what.location.id = 0;
        size_t granularity = 0;
        if (!ok(granularity_(&granularity, &what, CU_MEM_ALLOC_GRANULARITY_MINIMUM), "granularity")) return;
        if (granularity == 0) granularity = block_bytes;
        nbytes_ = (nbytes + granularity - 1) / granularity * granularity;
        if (!ok(create_(&handle_, nbytes_, &what, 0), "cuMemCreate")) return;
        created_ = true;
        if (!ok(reserve_(&address_, nbytes_, block_bytes, 0, 0), "cuMemAddressReserve")) return;
        if (!address_) {
            refusal = "cuMemAddressReserve gave no address";
            return;
        }
        if (!ok(map_(address_, nbytes_, 0, handle_, 0), "cuMemMap")) return;
        mapped_ = true;
        CUmemAccessDesc access = {};
        access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        access.location.id = device;
        access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        ok(set_access_(address_, nbytes_, &access, 1), "cuMemSetAccess");
    }
    ~host_numa_memory() {
        bool clean = true;
        if (mapped_) clean &= unmap_(address_, nbytes_) == CUDA_SUCCESS;
        if (address_) clean &= free_(address_, nbytes_) == CUDA_SUCCESS;
        if (created_) clean &= release_(handle_) == CUDA_SUCCESS;
        if (!clean) fail("host memory of the virtual memory API could not be given back");
    }
    host_numa_memory(const host_numa_memory&) = delete;
    host_numa_memory& operator=(const host_numa_memory&) = delete;

    char* start() const { return reinterpret_cast<char*>(address_); }
    std::string refusal;

  private:
    bool ok(CUresult result, const char* call) {
        if (result != CUDA_SUCCESS) refusal = std::string(call) + " returned " + std::to_string(result);
        return result == CUDA_SUCCESS;
    }

    decltype(&cuMemGetAllocationGranularity) granularity_ =
        driver_function<decltype(granularity_)>("cuMemGetAllocationGranularity");
    decltype(&cuMemCreate) create_ = driver_function<decltype(create_)>("cuMemCreate");
    decltype(&cuMemAddressReserve) reserve_ = driver_function<decltype(reserve_)>("cuMemAddressReserve");
    decltype(&cuMemMap) map_ = driver_function<decltype(map_)>("cuMemMap");
    decltype(&cuMemSetAccess) set_access_ = driver_function<decltype(set_access_)>("cuMemSetAccess");
    decltype(&cuMemUnmap) unmap_ = driver_function<decltype(unmap_)>("cuMemUnmap");
    decltype(&cuMemAddressFree) free_ = driver_function<decltype(free_)>("cuMemAddressFree");
    decltype(&cuMemRelease) release_ = driver_function<decltype(release_)>("cuMemRelease");
    CUmemGenericAllocationHandle handle_ = 0;
    CUdeviceptr address_ = 0;
    size_t nbytes_ = 0;
    bool created_ = false, mapped_ = false;
};

inline size_t free_vram() {
    size_t free_bytes = 0, total = 0;
    CHECK(cudaMemGetInfo(&free_bytes, &total));
    return free_bytes;
}

// A managed range on a boundary of 2 MiB with AccessedBy, as the project allocates them.
class managed_range {
  public:
    managed_range(size_t nbytes, int device) : nbytes(nbytes) {
        // Oversubscribed managed memory can hang a GPU, and not for this process only: stay far from it.
        if (nbytes >= free_vram() / 3) fail("managed memory would exceed a third of the free VRAM");
        CHECK(cudaMallocManaged(&base_, nbytes + block_bytes, cudaMemAttachGlobal));
        start =
            reinterpret_cast<char*>((reinterpret_cast<size_t>(base_) + block_bytes - 1) / block_bytes * block_bytes);
        advise(start, nbytes, cudaMemAdviseSetAccessedBy, on_device(device));
    }
    ~managed_range() { CHECK(cudaFree(base_)); }
    managed_range(const managed_range&) = delete;
    managed_range& operator=(const managed_range&) = delete;

    void prefer(cudaMemLocation where) { advise(start, nbytes, cudaMemAdviseSetPreferredLocation, where); }
    void bring(cudaMemLocation where, cudaStream_t stream) {
        prefetch(start, nbytes, where, stream);
        CHECK(cudaStreamSynchronize(stream));
    }

    char* start = nullptr;
    size_t nbytes;

  private:
    void* base_ = nullptr;
};

class plain_memory {
  public:
    explicit plain_memory(size_t nbytes) { CHECK(cudaMalloc(&start_, nbytes)); }
    ~plain_memory() { CHECK(cudaFree(start_)); }
    plain_memory(const plain_memory&) = delete;
    plain_memory& operator=(const plain_memory&) = delete;
    char* start() const { return static_cast<char*>(start_); }

  private:
    void* start_ = nullptr;
};

class pinned_memory {
  public:
    explicit pinned_memory(size_t nbytes) { CHECK(cudaHostAlloc(&start_, nbytes, cudaHostAllocMapped)); }
    ~pinned_memory() { CHECK(cudaFreeHost(start_)); }
    pinned_memory(const pinned_memory&) = delete;
    pinned_memory& operator=(const pinned_memory&) = delete;
    char* start() const { return static_cast<char*>(start_); }

  private:
    void* start_ = nullptr;
};

// Which share of the 2 MiB blocks of a range the kernel backs with one aligned, contiguous stretch of host memory, and
// the mean length of such stretches. Reads /proc/self/pagemap, which shows frame numbers to root only: -1 where it does
// not. The CPU reads each page first, so that it is in this process's page table.
struct host_pages {
    double whole_blocks = -1;
    double mean_run_kib = -1;
};

inline host_pages look_at_host_pages(const char* start, size_t nbytes) {
    constexpr size_t page = 4 * kib;
    FILE* pagemap = fopen("/proc/self/pagemap", "rb");
    if (!pagemap) return {};
    std::vector<uint64_t> frames(nbytes / page);
    unsigned sum = 0;
    for (size_t i = 0; i < frames.size(); i++)
        sum += static_cast<const volatile unsigned char*>(
            reinterpret_cast<const volatile unsigned char*>(start))[i * page];
    (void)sum;
    bool read = fseek(pagemap, static_cast<long>(reinterpret_cast<size_t>(start) / page * 8), SEEK_SET) == 0 &&
                fread(frames.data(), 8, frames.size(), pagemap) == frames.size();
    fclose(pagemap);
    if (!read) return {};
    constexpr uint64_t frame_mask = (1ULL << 55) - 1, present = 1ULL << 63;
    size_t runs = 0, whole = 0, per_block = block_bytes / page;
    for (size_t i = 0; i < frames.size(); i++) {
        if (!(frames[i] & present) || !(frames[i] & frame_mask)) return {};
        frames[i] &= frame_mask;
        if (i == 0 || frames[i] != frames[i - 1] + 1) runs++;
    }
    for (size_t b = 0; b + per_block <= frames.size(); b += per_block) {
        bool contiguous = frames[b] % per_block == 0;
        for (size_t i = 1; i < per_block; i++) contiguous &= frames[b + i] == frames[b] + i;
        whole += contiguous;
    }
    return {static_cast<double>(whole) / (frames.size() / per_block), nbytes / 1024.0 / runs};
}
