#!/bin/sh
# clang-tidy with the allow-list of .clang-tidy over every production file (not the tests: that would double the time).
# Findings that stand all the same are in tidy_known.txt, one "FILE CHECK" a line, each with its reason. A finding that is
# not there fails, and so does a line there without a finding (when all files are looked at).
# usage: check_tidy.sh BUILD_FOLDER [FILE...]      without files: all rooms
cd "$(dirname "$0")/../.." || exit 1
command -v clang-tidy >/dev/null || { echo "clang-tidy is not installed"; exit 77; }
build=$1
shift
all=$#
[ $# -gt 0 ] || set -- $(git ls-files 'base/*.c' 'proto/*.c' 'discovery/*.c' 'transport/*.c' 'planner/*.c' 'runtime/*.c' 'agent/*.c' |
    grep -vE '_macos\.c$|neon|arm64')
[ $# -gt 0 ] || { echo "no files to look at"; exit 1; }
printf '%s\n' "$@" | xargs -P "$(nproc 2>/dev/null || echo 2)" -n 4 clang-tidy -p "$build" --quiet \
    --extra-arg=-Wno-unknown-warning-option >"$build/tidy.txt" 2>"$build/tidy.err"
if grep -q 'clang-diagnostic-error\|Error while processing.*not found' "$build/tidy.txt" "$build/tidy.err"; then
    grep -h 'clang-diagnostic-error' "$build/tidy.txt"
    echo "clang-tidy could not read some files"
    exit 1
fi
rooms='base|proto|discovery|transport|planner|runtime|agent'
sed -nE "s#^([^:]*/)?(($rooms)/[a-z0-9_/]+\.[ch]):[0-9]+:[0-9]+: (warning|error): .*\[([a-zA-Z0-9.-]+)[],].*#\2 \5#p" "$build/tidy.txt" |
    sort -u >"$build/tidy_found.txt"
# Every finding must be one that the line above understands, else it would pass unseen.
if [ "$(grep -cE ': (warning|error): ' "$build/tidy.txt")" != "$(grep -cE "($rooms)/[a-z0-9_/]+\.[ch]:[0-9]+:[0-9]+: (warning|error): .*\[" "$build/tidy.txt")" ]; then
    grep -E ': (warning|error): ' "$build/tidy.txt" | grep -vE "($rooms)/[a-z0-9_/]+\.[ch]:[0-9]+:[0-9]+: "
    echo "findings that this check does not understand"
    exit 1
fi
sed -E 's/ *#.*//; /^$/d' tests/checks/tidy_known.txt | sort -u >"$build/tidy_known.txt"
new=$(comm -23 "$build/tidy_found.txt" "$build/tidy_known.txt")
if [ -n "$new" ]; then
    printf '%s\n' "$new" | while read -r file what; do
        grep -E "$file:[0-9]+:.*\[$what" "$build/tidy.txt" | sort -u
    done
    exit 1
fi
stale=$(comm -13 "$build/tidy_found.txt" "$build/tidy_known.txt")
if [ "$all" = 0 ] && [ -n "$stale" ]; then
    printf 'no longer found, take it out of tidy_known.txt: %s\n' "$stale"
    exit 1
fi
echo "$# files looked at, $(wc -l <"$build/tidy_found.txt") findings, all of them known"
