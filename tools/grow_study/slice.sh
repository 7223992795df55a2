#!/usr/bin/env bash
# One slice of the study: as many cells as end in the minutes given. What is done is skipped, so the same line again goes on.
#
#   bash tools/grow_study/slice.sh TEXTS [MINUTES] [options of `python -m tools.grow_study run`]
#
# TEXTS: a folder with {stories,novels,law,code,dialogue,math,tales}_{train,valid,test}.jsonl.gz, plays.txt and sums.jsonl.
# Texts laid out, bases and branches stay in build/grow; results lie in results/grow (RESULTS), and in one file,
# $OUT/grow.tar.gz, which is made again every 20 seconds: whoever stops the slice loses little.
set -uo pipefail
texts=$1 minutes=${2:-8.5}
shift $(($# < 2 ? $# : 2))
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 SOME_CACHE=${SOME_CACHE:-build/grow/cache}
mkdir -p build/grow
if command -v nvidia-cuda-mps-control >/dev/null; then  # processes share the chip, and do not take turns
  export CUDA_MPS_PIPE_DIRECTORY=$PWD/build/grow/mps CUDA_MPS_LOG_DIRECTORY=$PWD/build/grow/mps-log
  mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
  nvidia-cuda-mps-control -d || echo "no MPS: cells take turns on the chip"
fi
results=${RESULTS:-results/grow}
pack() {
  tar -czf build/grow/packed.tar.gz "$results" && mv build/grow/packed.tar.gz "${OUT:-build/grow}/grow.tar.gz"
}
mkdir -p "$results"
while sleep 20; do pack; done >/dev/null 2>&1 &
packing=$!
domains=()
for name in law code dialogue math tales; do domains+=("$name=$texts/${name}_*.jsonl.gz"); done
"${PYTHON:-python}" -m tools.grow_study run --work build/grow --out "$results" --minutes "$minutes" --processes 16 \
  --base stories="$texts/stories_*.jsonl.gz" novels="$texts/novels_*.jsonl.gz" \
  --domain "${domains[@]}" plays="$texts/plays.txt" --unseen sums="$texts/sums.jsonl" "$@"
code=$?
kill "$packing"
wait "$packing" 2>/dev/null
pack
size=()
for word in "$@"; do [[ ${last:-} == --size ]] && size=(--size "$word"); last=$word; done
"${PYTHON:-python}" -m tools.grow_study plan --out "$results" "${size[@]}"
exit $code
