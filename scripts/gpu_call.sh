#!/usr/bin/env bash
# Measures on a GPU what no log shows yet, most important first, and ends within SECONDS. Call it again with the same RESULTS on the
# same machine to resume; it skips what failed. Once a log is committed, remove what it shows from this list.
# usage: scripts/gpu_call.sh RESULTS [SECONDS]     default: 570 seconds; install SGLang as benchmarks/gpu/README.md says
# environment: OUT=DIR receives RESULTS as results.tar.gz
set -euo pipefail
results=$(mkdir -p "${1:?usage: scripts/gpu_call.sh RESULTS [SECONDS]}" && realpath "$1")
end=$((SECONDS + ${2:-570} - 10))
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export SERVER_LOGS="$results/servers"
failed=0
measure() { # FOLDER SECTION[:PART]...     FOLDER is in RESULTS; its log has the failures
  if [ $((end - SECONDS)) -lt 45 ]; then echo "no time left for ${*:2}" && return 1; fi
  scripts/gpu_session.sh --once --out "$results/$1" --seconds $((end - SECONDS)) "${@:2}"
}
beside() { # SECTION:PART...     runs parts that measure no time, all at once
  local part pids=()
  for part; do measure "${part/:/-}" "$part" >"$results/${part/:/-}.txt" 2>&1 & pids+=($!); done
  for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
}

beside server:fp8 server:bf16 &    # on the CPU
measure . ops:contract ops:canary ops:load || failed=1    # writes to pages that are being populated; a capture during moves
wait
measure . server:decode server:link || failed=1    # timed by streamed answers: all resident, paged experts, this plugin, slots, no buffers
measure . slots runners:link runners:triton || failed=1    # microseconds to resolve; rates and bytes of copied rows; FP8 from slots
measure . ops:link ops:reach ops:populate ops:writes ops:sustained || failed=1    # scattered experts; reads that populate; writes of loaded weights; constant moves
beside modes:gptq modes:ngrams modes:cache modes:tma modes:sleep    # equal answers
measure . eviction:noticing || failed=1    # checks while the link is full, where two servers reported too much
measure . server:most || failed=1    # 78 % resident; long prompts that stream; loading while pages are populated
beside modes:compiled
measure . server:no_resident || failed=1    # no expert resident
measure . server:cpu_offload_gb || failed=1
measure . server:deepseek server:offloader_v2 || failed=1
[ -z "${OUT:-}" ] || tar -C "$results" -czf "$OUT/results.tar.gz" .
exit $failed
