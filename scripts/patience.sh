# Sourced: sets TEST_PATIENCE, unless it is set.
# Limits for hangs suit an idle machine (scripts/harness/patience.py). The suite itself keeps this one busy, and others may.
read -r load _ < /proc/loadavg
export TEST_PATIENCE="${TEST_PATIENCE:-$((2 + (${load%.*} + 1) / $(nproc)))}"
