#!/usr/bin/env bash
# Measures on a GPU what no log shows yet, in order of what it decides, and ends within SECONDS. Call it again with the same RESULTS on
# the same machine: it goes on where it ended, and leaves out what failed. Once a log is committed, what it shows leaves this list.
# usage: scripts/gpu_call.sh RESULTS [SECONDS]     570 seconds if not given; SGLang and DeepGEMM as benchmarks/gpu/README.md says
# environment: OUT=DIR receives RESULTS as results.tar.gz; MACHINE is set by scripts/gpu_machine.sh
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

compile_probe() {
  local arch
  arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader --id=0 | tr -d .)
  PYTHONPATH="$PWD:${PYTHONPATH:-}" "${PYTHON:-python3}" -m benchmarks.gpu.probe_build "sm_$arch"
}

compile_probe >"$results/probe_build.txt" 2>&1 &
beside server:checkpoint &    # by the CPU
measure . ops:contract ops:canary || failed=1    # bytes that are written while their pages are populated; a capture beside moves; what a launch asks
wait
beside modes:gptq other_modes:ngrams other_modes:cache other_modes:tma other_modes:sleep    # equal answers
measure . slots:layer || failed=1    # in FP8
measure . eviction:noticing || failed=1    # looks beside a full link, of which two servers said too much
measure . default:continuous default:link || failed=1    # residents that follow traffic that changes; loading, populated meanwhile
measure . stream:rates stream:steps || failed=1
measure . probe:reach probe:sustained || failed=1    # experts that lie far apart; moves all the time
measure . server:most server:link || failed=1    # 78 % resident
beside other_modes:compiled
measure . bounds:bounds || failed=1    # no expert resident
measure . cpu_offload || failed=1
measure . offloader || failed=1    # writes a checkpoint of its own
measure . serving_slots || failed=1    # again, for the prompt of slots alone
[ -z "${OUT:-}" ] || tar -C "$results" -czf "$OUT/results.tar.gz" .
exit $failed
