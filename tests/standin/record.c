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

/* STANDIN_FAIL is CALL:N:ERROR, several separated by commas: the N-th CALL (from 1) of a process returns ERROR. */
int standin_injected(const char* call) {
    enum { MAX_RULES = 16 };
    static int seen[MAX_RULES];
    const char* rule = getenv("STANDIN_FAIL");
    size_t length = strlen(call);
    int result = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; rule && *rule && i < MAX_RULES; i++) {
        if (strncmp(rule, call, length) == 0 && rule[length] == ':') {
            char* end;
            long nth = strtol(rule + length + 1, &end, 10);
            if (++seen[i] == nth && *end == ':') result = atoi(end + 1);
        }
        rule = strchr(rule, ',');
        if (rule) rule++;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

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
