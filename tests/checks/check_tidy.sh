#!/bin/sh
# clang-tidy with the allow-list of .clang-tidy over every production file and the unit tests that a build folder names.
# usage: check_tidy.sh BUILD_FOLDER [FILE...]      without files: all rooms
cd "$(dirname "$0")/../.." || exit 1
command -v clang-tidy >/dev/null || { echo "clang-tidy is not installed"; exit 77; }
build=$1
shift
[ $# -gt 0 ] || set -- $(git ls-files 'base/*.c' 'proto/*.c' 'discovery/*.c' 'transport/*.c' 'planner/*.c' 'runtime/*.c' 'agent/*.c' |
    grep -vE '_macos\.c$|neon|arm64')
printf '%s\n' "$@" | xargs -P "$(nproc 2>/dev/null || echo 2)" -n 4 clang-tidy -p "$build" --quiet \
    --extra-arg=-Wno-unknown-warning-option >"$build/tidy.txt" 2>"$build/tidy.err"
rc=$?
grep -E '(warning|error):' "$build/tidy.txt" | sort -u
echo "$# files looked at"
[ $rc = 0 ]
