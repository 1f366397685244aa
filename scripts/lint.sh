#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
#   scripts/lint.sh [--fix] [CHECK ...]
#
# Runs the named checks, or all of them, over every file that git doesn't ignore. With --fix, ruff,
# clang-format and gersemi rewrite what they can instead of complaining.
#
# The tools are those of requirements/lint.txt, in an environment of this script's own under
# build/lint; nothing comes from PATH but PYTHON (python3) and git.

set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "${BASH_SOURCE[0]}")/.."

all=(
  whitespace ruff format mypy cython cython-hints clang-format clang-tidy cmake spelling shell
  pyproject schemas actionlint zizmor sdist
)
not_run=77 # a check's status where its tool can't be had

fix=
if [[ ${1:-} == --fix ]]; then
  fix=1
  shift
fi

prepare() {
  local python=${PYTHON:-python3} key
  key=$({ cat requirements/lint.txt && "$python" -VV; } | sha256sum | cut -c1-12)
  env=$PWD/build/lint/$key
  if [[ ! -e $env/complete ]]; then
    echo "lint: installing requirements/lint.txt into build/lint/$key" >&2
    "$python" -m venv --clear "$env"
    "$env/bin/python" -m pip install --quiet --disable-pip-version-check -r requirements/lint.txt >&2
    touch "$env/complete"
  fi
  PATH=$env/bin:$PATH
}

# The files that match the patterns, into the array `files`. That there are none is an error: the
# check would pass whatever the tree holds.
match() {
  local file
  files=()
  while IFS= read -r -d '' file; do
    [[ ! -f $file ]] || files+=("$file")
  done < <(git ls-files --cached --others --exclude-standard --deduplicate -z -- "$@")
  if [[ ${#files[@]} -eq 0 ]]; then
    echo "no file matches: $*"
    return 1
  fi
}

check_whitespace() {
  # Against the empty tree, so that every tracked line counts as new.
  git diff --check "$(git hash-object -t tree /dev/null)" --
}

check_ruff() {
  ruff check ${fix:+--fix} .
}

check_format() {
  if [[ -n $fix ]]; then
    ruff format .
  else
    ruff format --diff .
  fi
}

check_mypy() {
  mypy
}

check_cython() {
  match '*.pyx' '*.pxd' '*.pxi'
  cython-lint "${files[@]}"
}

check_cython-hints() {
  match 'src/*.pyx'
  local source
  for source in "${files[@]}"; do
    python cmake/cythonize.py -3 -Werror -I src -o "$env/hints.c" "$source"
  done
}

check_clang-format() {
  match '*.c' '*.h' '*.cpp' '*.cu' '*.cuh'
  if [[ -n $fix ]]; then
    clang-format -i "${files[@]}"
  else
    clang-format --dry-run --Werror "${files[@]}"
  fi
}

check_clang-tidy() {
  match 'csrc/*.cpp'
  local dlpack
  dlpack=$(python -c 'import importlib.util as u; print(*u.find_spec("tvm_ffi").submodule_search_locations)')/include
  # As a build without CUDA compiles them: that takes no toolkit.
  printf '%s\0' "${files[@]}" | xargs -0 -P "$(nproc)" -I '{}' clang-tidy --quiet '{}' -- \
    -std=c++20 -Icsrc -Icsrc/include -isystem "$dlpack" -DBARACUDA_WITH_CUDA=0 '-DBARACUDA_VERSION="0"'
}

check_cmake() {
  match CMakeLists.txt '*/CMakeLists.txt' '*.cmake'
  if [[ -n $fix ]]; then
    gersemi --in-place --quiet "${files[@]}"
  else
    gersemi --diff --check --warnings-as-errors "${files[@]}"
  fi
}

check_spelling() {
  match .
  codespell "${files[@]}"
}

check_shell() {
  match '*.sh' .ci/run
  shellcheck "${files[@]}"
}

check_pyproject() {
  validate-pyproject pyproject.toml
}

check_schemas() {
  check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
  check-jsonschema --builtin-schema custom.github-workflows-require-timeout .github/workflows/*.yml
  check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
  check-jsonschema --builtin-schema vendor.citation-file-format --default-filetype yaml CITATION.cff
}

check_actionlint() {
  # Its package downloads the program from GitHub, where the workflows run anyway.
  if [[ -n ${GITHUB_ACTIONS:-} ]]; then
    python -m pip install --quiet --disable-pip-version-check -r requirements/actionlint.txt
  elif ! command -v actionlint >/dev/null; then
    echo "install requirements/actionlint.txt to have it"
    return "$not_run"
  fi
  actionlint
}

check_zizmor() {
  zizmor --offline --quiet --persona pedantic .github
}

check_sdist() {
  check-sdist --no-isolation
}

main() {
  local checks=("$@") check output status
  local failed=()
  [[ ${#checks[@]} -gt 0 ]] || checks=("${all[@]}")
  for check in "${checks[@]}"; do
    if ! declare -F "check_$check" >/dev/null; then
      echo "lint: no check named $check; there are: ${all[*]}" >&2
      exit 2
    fi
  done
  prepare
  for check in "${checks[@]}"; do
    set +e # without a condition around it, so that -e holds within
    output=$(set -e && "check_$check" 2>&1)
    status=$?
    set -e
    case $status in
      0) echo "lint: $check: ok" ;;
      "$not_run") echo "lint: $check: not run, $output" ;;
      *)
        echo "lint: $check: failed"
        printf '%s\n' "$output" | sed 's/^/    /'
        failed+=("$check")
        ;;
    esac
  done
  if [[ ${#failed[@]} -gt 0 ]]; then
    echo "lint: failed: ${failed[*]}"
    exit 1
  fi
}

main "$@"
