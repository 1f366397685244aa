#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
#   scripts/check_changelog.sh BASE
#
# Fails when csrc/ or src/ differs between BASE and HEAD and CHANGELOG.md doesn't.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

base=$(git rev-parse --verify "${1:?usage: $0 BASE}^{commit}")
# --quiet: 0 without a difference, 1 with one; anything else is an error of git's.
differs() {
  local status=0
  git diff --quiet "$base" HEAD -- "$@" || status=$?
  [[ $status -le 1 ]] || exit "$status"
  [[ $status -eq 1 ]]
}

if differs csrc src && ! differs CHANGELOG.md; then
  echo "csrc/ or src/ changed and CHANGELOG.md did not: say there what users will notice," >&2
  echo "or give the pull request the label 'no changelog' when it is nothing." >&2
  exit 1
fi
