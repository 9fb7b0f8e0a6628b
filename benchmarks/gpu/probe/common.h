// What every measurement of the probe shares: checked CUDA calls, clocks, and rows of the result file.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

static_assert(CUDART_VERSION >= 13000, "the probe is written against CUDA 13: cudaMemLocation and batched prefetch");

#define CHECK(call) check((call), #call, __FILE__, __LINE__)

inline void check(cudaError_t error, const char* call, const char* file, int line) {
    if (error == cudaSuccess) return;
    fprintf(stderr, "%s:%d: %s: %s: %s\n", file, line, call, cudaGetErrorName(error), cudaGetErrorString(error));
    exit(1);
}

constexpr size_t kib = 1 << 10, mib = 1 << 20, gib = 1 << 30;
constexpr size_t block_bytes = 2 * mib;  // what the driver maps and evicts as a whole

inline double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Seconds that a call takes on the calling thread.
template <typename Work>
double host_seconds(Work&& work) {
    double start = now();
    work();
    return now() - start;
}

inline double median(std::vector<double> values) {
    if (values.empty()) return 0;
    std::sort(values.begin(), values.end());
    size_t half = values.size() / 2;
    return values.size() % 2 ? values[half] : (values[half - 1] + values[half]) / 2;
}

// One line of the result file: labels, and every repeat of one figure.
class row {
  public:
    explicit row(const char* what) { text_ = "{\"row\": \"" + std::string(what) + "\""; }

    row& label(const char* name, const std::string& value) {
        text_ += ", \"" + std::string(name) + "\": \"" + value + "\"";
        return *this;
    }
    row& label(const char* name, const char* value) { return label(name, std::string(value)); }
    row& label(const char* name, double value) {
        char number[48];
        snprintf(number, sizeof number, "%.10g", value);
        text_ += ", \"" + std::string(name) + "\": " + number;
        return *this;
    }
    std::string with(const char* unit, const std::vector<double>& values) {
        std::string line = text_ + ", \"unit\": \"" + unit + "\", \"values\": [";
        for (size_t i = 0; i < values.size(); i++) {
            char number[48];
            snprintf(number, sizeof number, "%s%.7g", i ? ", " : "", values[i]);
            line += number;
        }
        return line + "]}\n";
    }

  private:
    std::string text_;
};

// What one run of the probe knows about itself. `small` plays all measurements at sizes that a stand-in driver bears.
struct session {
    FILE* rows = nullptr;
    bool small = false;
    bool computes = false;  // a kernel gave a known answer; where not, nothing it says is a measurement
    int device = 0;
    int sms = 0;
    double deadline = 0;
    cudaStream_t stream = nullptr;

    void write(const std::string& line) {
        if (fputs(line.c_str(), rows) < 0 || fflush(rows) != 0) {
            perror("the result file");
            exit(1);
        }
    }
    void put(row& line, const char* unit, const std::vector<double>& values) { write(line.with(unit, values)); }
    size_t pick(size_t real, size_t toy) const { return small ? toy : real; }
    bool late() const { return now() > deadline; }
};

inline void fail(const std::string& message) {
    fprintf(stderr, "%s\n", message.c_str());
    exit(1);
}

// Milliseconds that the stream takes from before `work` to after it, by events.
class stopwatch {
  public:
    stopwatch() {
        CHECK(cudaEventCreate(&start_));
        CHECK(cudaEventCreate(&end_));
    }
    ~stopwatch() {
        CHECK(cudaEventDestroy(start_));
        CHECK(cudaEventDestroy(end_));
    }
    stopwatch(const stopwatch&) = delete;
    stopwatch& operator=(const stopwatch&) = delete;

    template <typename Work>
    double ms(cudaStream_t stream, Work&& work) {
        launch(stream, work);
        return wait();
    }
    template <typename Work>
    void launch(cudaStream_t stream, Work&& work) {
        CHECK(cudaEventRecord(start_, stream));
        work();
        CHECK(cudaEventRecord(end_, stream));
    }
    double wait() {
        CHECK(cudaEventSynchronize(end_));
        float elapsed = 0;
        CHECK(cudaEventElapsedTime(&elapsed, start_, end_));
        return elapsed;
    }

  private:
    cudaEvent_t start_ = nullptr, end_ = nullptr;
};

inline double gb_per_s(size_t nbytes, double seconds) { return seconds > 0 ? nbytes / seconds / 1e9 : 0; }
