#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
#   scripts/gpu_lane.sh WHEEL OUTDIR [STEP[=SECONDS] ...]
#
# Tests and times a wheel on a machine with a GPU, without network: `python3` there has a framework or
# two, and what else it lacks (pytest, xdist, hypothesis) lies as wheels beside WHEEL. Runs from a checkout.
#
#   probe        the card, the driver, the frameworks; fails without a GPU
#   suite        the whole test suite, with a GPU required
#   memcheck, racecheck, initcheck, synccheck
#                the tests marked `sanitizer` under that tool of compute-sanitizer
#   accuracy     errors of the scans beside PyTorch's
#   bench        every family of benchmarks/
#   bench:FAMILY that one
#
# By default all of them run, each within its limit of SECONDS, even if an earlier one failed. The
# status says whether any did. Probe and benchmarks have the card to themselves; then the suite, the
# sanitizers and accuracy run side by side. OUTDIR gets lane.json (each step's status and seconds, and what
# the probe found), lane.log, accuracy.json and FAMILY.json for each family.

set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
if [[ $# -lt 2 ]]; then
  sed -n 's/^#   \(scripts.*\)/usage: \1/p' "$0" >&2
  exit 2
fi
wheel=$(realpath "$1")
mkdir -p "$2"
out=$(realpath "$2")
shift 2
[[ $# -gt 0 ]] || set -- probe suite memcheck racecheck initcheck synccheck accuracy bench

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
declare -A limits=([probe]=60 [suite]=400 [memcheck]=200 [racecheck]=200 [initcheck]=200 [synccheck]=200 [accuracy]=300 [bench]=400)

# Beside the machine's own packages, so that its frameworks are seen and nothing of it changes.
install() {
  local file wheels=("$wheel")
  for file in "$(dirname "$wheel")"/*.whl; do
    [[ $(basename "$file") == baracuda-* ]] || wheels+=("$file")
  done
  python3 -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$scratch/site" "${wheels[@]}" &&
    PYTHONPATH="$scratch/site" python3 - <<'PY'
import importlib.metadata, re, sys

missing = []
for requirement in importlib.metadata.requires("baracuda"):
    if "extra ==" not in requirement:
        name = re.match(r"[\w.-]+", requirement).group()
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
if missing:
    sys.exit(f"this machine lacks {', '.join(missing)}: put wheels beside the package's")
PY
}

probe() {
  nvidia-smi &&
    python3 - "$scratch/probe.json" <<'PY'
import importlib.metadata, importlib.util, json, platform, subprocess, sys
import baracuda as bc

fields = ["name", "driver_version", "memory.total", "compute_cap", "clocks.max.sm", "clocks.max.mem"]
query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
rows = subprocess.run(query, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
packages = ["baracuda", "numpy", "torch", "jax", "cupy-cuda13x", "triton", "cuda-core", "cuda-bindings", "pytest", "hypothesis"]
versions = {}
for package in packages:
    try:
        versions[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        versions[package] = None
probe = {
    "gpus": [dict(zip(fields, map(str.strip, row.split(",")))) for row in rows],
    "devices_seen_by_baracuda": bc.cuda_device_count(),
    "python": platform.python_version(),
    "versions": versions,
}
json.dump(probe, open(sys.argv[1], "w"), indent=1)
print(json.dumps(probe, indent=1))
sys.exit(probe["devices_seen_by_baracuda"] == 0)
PY
}

# Several processes: the host is what a test waits for.
suite() {
  python3 -m pytest tests -p no:cacheprovider -p no:benchmark -q --require-gpu -n "$(($(nproc) / 2))" --dist worksteal --durations=25
}

# compute-sanitizer is no proof where it can't attach to the card: it must find a planted error first.
sanitizer_works() {
  cat >"$scratch/planted.cu" <<'CU'
#include <cstdio>
__global__ void write_past_the_end(int *data) { data[threadIdx.x] = 1; }
int main(int argc, char **) {
  int *data = nullptr;
  if (cudaMalloc(&data, 32 * sizeof(int)) != cudaSuccess) return 3;
  write_past_the_end<<<1, argc > 1 ? 33 : 32>>>(data);
  const cudaError_t error = cudaDeviceSynchronize();
  std::printf("%s\n", cudaGetErrorString(error));
  return error == cudaSuccess ? 0 : 4;
}
CU
  nvcc -arch=native -o "$scratch/planted" "$scratch/planted.cu" || return
  if ! compute-sanitizer --error-exitcode=1 "$scratch/planted"; then
    echo "compute-sanitizer can't run on this card"
    return 1
  fi
  if compute-sanitizer --error-exitcode=1 "$scratch/planted" error >"$scratch/planted.log" 2>&1; then
    echo "compute-sanitizer missed a planted error:"
    cat "$scratch/planted.log"
    return 1
  fi
}

# In several parts: what a tool does to one launch takes the host most of the time.
sanitizer() {
  local part status=0 parts=3 parts_running=()
  # Without torch's pool, every tensor is an allocation whose ends the tool knows.
  export PYTORCH_NO_CUDA_MEMORY_CACHING=1
  # Stopped at its limit, it still tells what was found.
  trap 'tail -n 200 "$scratch/$1"-*.log; exit 143' TERM
  for part in $(seq "$parts"); do
    compute-sanitizer --tool "$1" --error-exitcode=1 \
      python3 -m pytest tests -p no:cacheprovider -q -m sanitizer --require-gpu --part "$part/$parts" \
      >"$scratch/$1-$part.log" 2>&1 &
    parts_running+=($!)
  done
  for part in $(seq "$parts"); do
    wait "${parts_running[$((part - 1))]}" || status=1
    printf -- '-- part %s of %s\n' "$part" "$parts"
    tail -n 400 "$scratch/$1-$part.log"
  done
  return "$status"
}
memcheck() { sanitizer memcheck; }
racecheck() { sanitizer racecheck; }
initcheck() { sanitizer initcheck; }
synccheck() { sanitizer synccheck; }

accuracy() { python3 -m benchmarks.accuracy --device cuda --json "$out/accuracy.json"; }

# One family after another, so that one that fails doesn't take the others' times with it.
bench() {
  local families family status=0
  families=${*:-$(python3 -m benchmarks --list)} || return
  for family in $families; do
    echo "== $family"
    python3 -m benchmarks "$family" --device cuda --json "$out/$family.json" || status=1
  done
  return "$status"
}

# Runs a step with its limit in a process group of its own; records its status and seconds.
run() {
  local step=$1 limit=$2 start=$EPOCHREALTIME status
  (
    set -m
    # bench:FAMILY is the function bench with an argument.
    ${step/:/ } &
    child=$!
    { sleep "$limit" && echo "$step: stopped at its limit of $limit s" && kill -TERM -- "-$child" && sleep 10 &&
      kill -KILL -- "-$child"; } &
    watch=$!
    wait "$child"
    status=$?
    kill -- "-$watch" 2>/dev/null
    exit "$status"
  ) >"$scratch/$step.log" 2>&1
  status=$?
  {
    printf '\n==== %s (limit %s s)\n' "$step" "$limit"
    cat "$scratch/$step.log"
  } | tee -a "$out/lane.log"
  printf '%s %s %s\n' "$step" "$status" "$(python3 -c "print(round($EPOCHREALTIME - $start, 1))")" >>"$scratch/steps"
  return "$status"
}

summarise() {
  python3 - "$scratch" "$out" <<'PY'
import json, pathlib, sys

scratch, out = map(pathlib.Path, sys.argv[1:])
steps = [line.split() for line in (scratch / "steps").read_text().splitlines()]
lane = {step: {"rc": int(rc), "seconds": float(seconds)} for step, rc, seconds in steps}
if (scratch / "probe.json").exists():
    lane["probe"] |= json.loads((scratch / "probe.json").read_text())
(out / "lane.json").write_text(json.dumps(lane, indent=1) + "\n")
PY
}

for step in "$@"; do
  if [[ -z ${limits[${step%%[:=]*}]-} ]]; then
    echo "gpu_lane: no step named ${step%%[:=]*}; there are: ${!limits[*]}" >&2
    exit 2
  fi
done
export PYTHONPATH=$scratch/site PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
rm -f "$out"/lane.{log,json}
failed=()
declare -A together=()
run install 120 || failed+=(install)
for step in "$@"; do
  limit=${limits[${step%%[:=]*}]}
  [[ $step != *=* ]] || limit=${step#*=}
  step=${step%%=*}
  case $step in
    suite | accuracy | *check) together[$step]=$limit ;;
    *) run "$step" "$limit" || failed+=("$step") ;;
  esac
done
case ${!together[*]} in
  *check*) run sanitizer_works 60 || failed+=(sanitizer_works) ;;
esac
declare -A running=()
for step in "${!together[@]}"; do
  run "$step" "${together[$step]}" &
  running[$step]=$!
done
for step in "${!running[@]}"; do
  wait "${running[$step]}" || failed+=("$step")
done
summarise || failed+=(summary)
if [[ ${#failed[@]} -gt 0 ]]; then
  echo "gpu_lane: failed: ${failed[*]}"
  exit 1
fi
echo "gpu_lane: passed: $*"
