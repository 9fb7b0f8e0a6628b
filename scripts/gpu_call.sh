#!/usr/bin/env bash
# Measures on a GPU what no log shows yet, in order of what it decides, and ends within SECONDS. Call it again with the same RESULTS on
# the same machine: it goes on where it ended, and leaves out what failed. Once a log is committed, what it shows leaves this list.
# usage: scripts/gpu_call.sh RESULTS [SECONDS]     570 seconds if not given; SGLang as benchmarks/gpu/README.md says
# environment: OUT=DIR receives RESULTS as results.tar.gz
set -euo pipefail
results=$(mkdir -p "${1:?usage: scripts/gpu_call.sh RESULTS [SECONDS]}" && realpath "$1")
end=$((SECONDS + ${2:-570} - 10))
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export SERVER_LOGS="$results/servers"
failed=0
measure() { # FOLDER SECTION[:PART]...     the folder lies in RESULTS; what failed is in its log
  if [ $((end - SECONDS)) -lt 45 ]; then echo "no time left for ${*:2}" && return 1; fi
  scripts/gpu_session.sh --once --out "$results/$1" --seconds $((end - SECONDS)) "${@:2}"
}
beside() { # SECTION:PART...     in which no time is measured: all at once
  local part pids=()
  for part; do measure "${part/:/-}" "$part" >"$results/${part/:/-}.txt" 2>&1 & pids+=($!); done
  for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
}

beside server:fp8 server:bf16 &    # by the CPU
measure . ops:contract ops:canary ops:load || failed=1    # bytes that are written while their pages are populated; a capture beside moves
wait
measure . server:decode server:link || failed=1    # the timer by streamed answers: all resident, paged experts, this plugin, slots, no buffers
measure . slots runners:link runners:triton || failed=1    # microseconds of resolving; rates and bytes of copied rows; FP8 out of slots
measure . ops:link ops:reach ops:populate ops:writes ops:sustained || failed=1    # experts that lie far apart; reads that populate; writes of loaded weights; moves all the time
beside modes:gptq modes:ngrams modes:cache modes:tma modes:sleep    # equal answers
measure . eviction:noticing || failed=1    # looks beside a full link, of which two servers said too much
measure . server:most || failed=1    # 78 % resident; long prompts that stream; loading, populated meanwhile
beside modes:compiled
measure . server:no_resident || failed=1    # no expert resident
measure . server:cpu_offload_gb || failed=1
measure . server:deepseek server:offloader_v2 || failed=1
[ -z "${OUT:-}" ] || tar -C "$results" -czf "$OUT/results.tar.gz" .
exit $failed
