// How fast several threads populate host pages, which is most of the time that placing experts takes at load: by
// prefetch, as the extension does, by writes of the CPU, and, for comparison, by writes to plain memory in huge pages.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <thread>

#include "common.h"
#include "kernels.h"
#include "memory.h"
#include "moves.h"
#include "numa.h"
#include "pressure.h"
#include "reader.h"

enum class populating { prefetch, plain_writes, writes };

inline const char* name_of(populating it) {
    const char* const names[] = {"prefetch", "CPU writes, plain memory", "CPU writes"};
    return names[static_cast<int>(it)];
}

constexpr size_t cpu_page = 4 * kib;

// What the CPU writes to the first byte of a page: never 0, and another one 512 pages, or any power of two, further on.
__host__ __device__ inline unsigned stamp_of(size_t page) { return 1 + page % 251; }

inline void stamp_pages(char* base, const piece& part) {
    for (size_t at = part.offset; at < part.offset + part.nbytes; at += cpu_page) {
        *reinterpret_cast<volatile unsigned char*>(base + at) = static_cast<unsigned char>(stamp_of(at / cpu_page));
    }
}

// Counts the words that are right: 0, but for the stamps. Words that are not read are not right either.
__global__ void count_right(const uint4* start, size_t count, bool stamped, unsigned* right) {
    const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
    unsigned seen = 0;
    for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < count; i += step) {
        const uint4 value = load(start + i);
        const size_t at = i * sizeof(uint4);
        seen += value.x == (stamped && at % cpu_page == 0 ? stamp_of(at / cpu_page) : 0);
        seen += (value.y == 0) + (value.z == 0) + (value.w == 0);
    }
    seen = __reduce_add_sync(0xffffffffu, seen);
    if (threadIdx.x % 32 == 0) atomicAdd(right, seen);
}

// Anonymous memory on a boundary of 2 MiB, in huge pages where the kernel gives any.
class anonymous_memory {
  public:
    explicit anonymous_memory(size_t nbytes) : mapped_bytes_(nbytes + block_bytes) {
        mapped_ = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapped_ == MAP_FAILED) fail("populate: no anonymous memory");
        start =
            reinterpret_cast<char*>((reinterpret_cast<size_t>(mapped_) + block_bytes - 1) / block_bytes * block_bytes);
        madvise(start, nbytes, MADV_HUGEPAGE);  // if it is refused, the share of huge pages shows it
    }
    ~anonymous_memory() { munmap(mapped_, mapped_bytes_); }
    anonymous_memory(const anonymous_memory&) = delete;
    anonymous_memory& operator=(const anonymous_memory&) = delete;

    char* start = nullptr;

  private:
    void* mapped_ = nullptr;
    size_t mapped_bytes_;
};

// Where the extension puts host pages: on the GPU's NUMA node, if the machine has several and the driver accepts it.
inline cudaMemLocation nearest_host(session& it) {
    int node = -1;
    CHECK(cudaDeviceGetAttribute(&node, cudaDevAttrHostNumaId, it.device));
    if (node < 0 || memory_nodes().size() < 2) return on_host();
    const cudaMemLocation where = {cudaMemLocationTypeHostNuma, node};
    managed_range tried(block_bytes, it.device);
    const bool accepted =
        cudaMemAdvise(tried.start, block_bytes, cudaMemAdviseSetPreferredLocation, where) == cudaSuccess &&
        cudaMemPrefetchAsync(tried.start, block_bytes, where, 0, it.stream) == cudaSuccess;
    cudaGetLastError();  // a refusal is no error of the next launch
    CHECK(cudaStreamSynchronize(it.stream));
    return accepted ? where : on_host();
}

// Seconds from before the first call of `hands` threads, each with a stream of its own, to the end of the last stream.
// The threads and their streams are there before. The pieces are dealt to them in turn.
template <typename Work>
double seconds_of_threads(session& it, int hands, const std::vector<piece>& pieces, Work&& work) {
    std::atomic<int> ready{0};
    std::atomic<bool> begun{false};
    std::vector<double> ended(hands);
    std::vector<std::thread> all;
    for (int hand = 0; hand < hands; hand++) {
        all.emplace_back([&, hand] {
            CHECK(cudaSetDevice(it.device));
            cudaStream_t stream = nullptr;
            CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
            ready++;
            while (!begun) std::this_thread::yield();
            for (size_t i = hand; i < pieces.size(); i += hands) work(pieces[i], stream);
            CHECK(cudaStreamSynchronize(stream));
            ended[hand] = now();
            CHECK(cudaStreamDestroy(stream));
        });
    }
    while (ready < hands) std::this_thread::yield();
    const double start = now();
    begun = true;
    for (std::thread& each : all) each.join();
    return *std::max_element(ended.begin(), ended.end()) - start;
}

// One way to populate with so many threads: its figures, by repeat, or why they are left out.
class population {
  public:
    population(session& it, populating how, int hands, cudaMemLocation where)
        : session_(it),
          how_(how),
          hands_(hands),
          where_(where),
          // A fault of the CPU may bring as little as 4 KiB: fewer bytes take as long.
          total_(it.pick(how == populating::writes ? 512 * mib : 2 * gib, 32 * mib)),
          pieces_(every(total_, it.pick(16 * mib, 2 * mib))) {}

    // Into a range of its own, as the extension places experts in host RAM: advice, then a prefetch that is waited for.
    // Nothing counts unless the GPU then reads the right bytes where they are.
    void managed(reader& read) {
        managed_range range(total_, session_.device);
        const double seconds =
            seconds_of_threads(session_, hands_, pieces_, [&](const piece& each, cudaStream_t stream) {
                char* const at = range.start + each.offset;
                advise(at, each.nbytes, cudaMemAdviseSetPreferredLocation, where_);
                if (how_ == populating::writes) return stamp_pages(range.start, each);
                prefetch(at, each.nbytes, where_, stream);
                CHECK(cudaStreamSynchronize(stream));
            });
        const double before = double(free_vram());
        read.clear();
        count_right<<<session_.sms * 8, threads, 0, session_.stream>>>(
            reinterpret_cast<const uint4*>(range.start), total_ / 16, how_ == populating::writes, read.result());
        CHECK(cudaGetLastError());
        const unsigned right = read.checksum();
        if (session_.computes) expect(right, total_ / 4, "words");
        const double rate = read.gb(range.start, total_);
        if (before - double(free_vram()) > double(total_) / 8) problem_ = "the GPU's reads brought the pages into VRAM";
        rates_.push_back(gb_per_s(total_, seconds));
        reads_.push_back(rate);
    }

    void plain() {
        const char* const rollup = "/proc/self/smaps_rollup";
        const double before = status_kib(rollup, "AnonHugePages:");
        anonymous_memory memory(total_);
        const double seconds = seconds_of_threads(
            session_, hands_, pieces_, [&](const piece& each, cudaStream_t) { stamp_pages(memory.start, each); });
        const double huge = status_kib(rollup, "AnonHugePages:") - before;
        size_t right = 0;
        for (size_t page = 0; page < total_ / cpu_page; page++) {
            right += static_cast<unsigned char>(memory.start[page * cpu_page]) == stamp_of(page);
        }
        expect(right, total_ / cpu_page, "pages");
        rates_.push_back(gb_per_s(total_, seconds));
        if (before >= 0) huge_.push_back(huge * kib / double(total_));
    }

    bool left_out() const { return !problem_.empty(); }

    void put() {
        if (left_out()) {
            row line = labelled("populate");
            session_.put(line.label("reason", problem_), "GB/s", {});
            return;
        }
        row rate = labelled("populate"), reads = labelled("populate_then_read"), huge = labelled("populate_huge_pages");
        if (!rates_.empty()) session_.put(rate, "GB/s", rates_);
        if (!reads_.empty()) session_.put(reads, "GB/s", reads_);
        if (!huge_.empty()) session_.put(huge, "share", huge_);
    }

  private:
    row labelled(const char* what) {
        row line(what);
        line.label("how", name_of(how_)).label("threads", hands_).label("mib", double(total_) / mib);
        if (how_ == populating::plain_writes) return line;
        const bool named = where_.type == cudaMemLocationTypeHostNuma;
        return line.label("prefers", named ? "node " + std::to_string(where_.id) : "host");
    }

    void expect(size_t right, size_t all, const char* what) const {
        if (right == all) return;
        fail(std::string("populate, ") + name_of(how_) + ", threads " + std::to_string(hands_) + ": " +
             std::to_string(all - right) + " of " + std::to_string(all) + " " + what + " are wrong");
    }

    session& session_;
    populating how_;
    int hands_;
    cudaMemLocation where_;
    size_t total_;
    std::vector<piece> pieces_;
    std::vector<double> rates_, reads_, huge_;
    std::string problem_;
};

inline void measure_populate(session& it) {
    const cudaMemLocation where = nearest_host(it);
    reader read(it);
    for (populating how : {populating::prefetch, populating::plain_writes, populating::writes}) {
        for (int hands : {1, 2, 4, 8}) {
            population found(it, how, hands, where);
            for (int i = 0; i < 3 && !found.left_out() && !it.late(); i++) {
                if (how == populating::plain_writes)
                    found.plain();
                else
                    found.managed(read);
            }
            found.put();
        }
    }
}
