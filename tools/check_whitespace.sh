#!/usr/bin/env bash
# Trailing whitespace, space before tab, blank lines at the end and conflict markers in all tracked files.
# Usage: tools/check_whitespace.sh [--cached]   (--cached: what is staged instead of what is on disk)
set -euo pipefail
cd "$(dirname "$0")/.."
if ! git rev-parse --git-dir >/dev/null 2>&1; then
    echo "check_whitespace: not a git checkout, nothing to check"
    exit 0
fi
git diff --check "$@" "$(git hash-object -t tree /dev/null)"
