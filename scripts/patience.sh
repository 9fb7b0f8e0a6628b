# Source this to set TEST_PATIENCE, unless it is set.
# Limits for hangs suit an idle machine (scripts/harness/patience.py), but the suite and other programs keep this one busy.
read -r load _ < /proc/loadavg
export TEST_PATIENCE="${TEST_PATIENCE:-$((2 + (${load%.*} + 1) / $(nproc)))}"
