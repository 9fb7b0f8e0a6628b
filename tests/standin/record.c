/* The log of calls, one JSON object a line, and failures on demand. */
#define _GNU_SOURCE
#include "standin.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

long long standin_setting(const char* name, long long otherwise) {
    const char* value = getenv(name);
    return value && *value ? strtoll(value, NULL, 0) : otherwise;
}

/* STANDIN_FAIL is CALL:N:ERROR, several separated by commas: the N-th CALL (from 1) of a process returns ERROR. ERROR!
 * is sticky, as the errors that ruin a context are: every later call returns it too. ERROR `hang`: the call never
 * returns. Calls count from the moment that the variable names them. */
enum { MAX_RULES = 32, HANG = -1 };
static int seen[MAX_RULES];
static int failures, sticky;

int standin_injected(const char* call) {
    const char* rule = getenv("STANDIN_FAIL");
    size_t length = strlen(call);
    pthread_mutex_lock(&lock);
    int result = sticky;
    for (int i = 0; rule && *rule && i < MAX_RULES; i++) {
        if (strncmp(rule, call, length) == 0 && rule[length] == ':') {
            char* end;
            long nth = strtol(rule + length + 1, &end, 10);
            if (++seen[i] == nth && *end == ':') {
                result = strncmp(end + 1, "hang", 4) == 0 ? HANG : (int)strtol(end + 1, &end, 10);
                if (result > 0 && *end == '!') sticky = result;
            }
        }
        rule = strchr(rule, ',');
        if (rule) rule++;
    }
    failures += result != 0;
    pthread_mutex_unlock(&lock);
    while (result == HANG) pause();
    return result;
}

/* How many calls STANDIN_FAIL made fail or hang, and how many its rule at `index` has matched. */
EXPORT int standin_failures(void) { return failures; }
EXPORT int standin_seen(int index) { return seen[index]; }

bool standin_logs_order(void) { return standin_setting("STANDIN_LOG_ORDER", 0); }

void standin_log(const char* call, int result, const char* fields, ...) {
    const char* path = getenv("STANDIN_LOG");
    if (!path) return;
    char line[2048];
    int used = snprintf(line, sizeof line, "{\"pid\": %d, \"call\": \"%s\", \"result\": %d", getpid(), call, result);
    if (fields && *fields) {
        va_list arguments;
        va_start(arguments, fields);
        used += snprintf(line + used, sizeof line - used, ", ");
        used += vsnprintf(line + used, sizeof line - used, fields, arguments);
        va_end(arguments);
    }
    if (standin_logs_order() && used < (int)sizeof line)
        used += snprintf(line + used, sizeof line - used, ", \"thread\": %d", gettid());
    if (used > (int)sizeof line - 3) used = sizeof line - 3;
    used += snprintf(line + used, 3, "}\n");
    static int file = -1;
    pthread_mutex_lock(&lock);
    if (file < 0) file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    if (file >= 0 && write(file, line, used) != used) abort();
    pthread_mutex_unlock(&lock);
}
