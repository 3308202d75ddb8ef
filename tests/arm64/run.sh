#!/bin/sh
# Builds the kernels and their tests for arm64 with the cross compiler, runs them under qemu on CPUs
# without the dot-product instructions, with them, and with i8mm too, and compares the digest with this machine's.
# run.sh SOURCE_DIR WORK_DIR NATIVE_TEST -- kernel sources...
set -eu
source=$1 work=$2 native=$(realpath "$3")
shift 4
cc=aarch64-linux-gnu-gcc qemu=qemu-aarch64-static
for tool in $cc $qemu; do
    if ! command -v $tool >/dev/null; then
        echo "SKIPPED: $tool is not installed (Debian: gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static)"
        [ -z "${CI:-}" ] || exit 1
        exit 77
    fi
done
mkdir -p "$work"
cd "$work"
flags="-std=c17 -D_GNU_SOURCE -O3 -Wall -Wextra -Wconversion -Wshadow -Wno-missing-field-initializers -Werror -ffp-contract=off -fno-math-errno"
flags="$flags -I$source/tests/arm64 -I$source"
neon_products=
objects=
for file in "$@" "$source/base/rng.c" "$source/base/clock_linux.c" "$source/base/err.c"; do
    object=$(basename "$file" .c).o
    $cc $flags -c "$file" -o "$object"
    objects="$objects $object"
    case $file in */neon_products.c) neon_products=$file ;; esac
done
$cc $flags -march=armv8.2-a+dotprod -DNEON_DOTPROD -c "$neon_products" -o dotprod.o
$cc $flags -march=armv8.2-a+dotprod+i8mm -DNEON_DOTPROD -DNEON_I8MM -c "$neon_products" -o i8mm.o
digest=$("$native" | sed -n 's/^# digest //p')
[ -n "$digest" ]
for test in kernels kernels_variants; do
    # shellcheck disable=SC2086
    $cc $flags -static "$source/tests/unit/test_$test.c" $objects dotprod.o i8mm.o -lm -lpthread -o $test
    for cpu in cortex-a57 neoverse-n1 max; do
        echo "== $test on $cpu"
        $qemu -cpu $cpu ./$test | tee out.txt
        [ $test = kernels_variants ] || continue
        case $cpu in
        max) have='neon neon_dotprod neon_i8mm' lack=none ;;
        neoverse-n1) have='neon neon_dotprod' lack=neon_i8mm ;;
        *) have=neon lack='neon_dotprod neon_i8mm' ;;
        esac
        for variant in $have; do
            grep -q "^# variants:.* $variant/" out.txt || { echo "$variant did not run"; exit 1; }
        done
        for variant in $lack; do
            ! grep -q "^# variants:.* $variant/" out.txt || { echo "$variant ran without its instructions"; exit 1; }
        done
        grep -qx "# digest $digest" out.txt || {
            echo "the digest differs from this machine's: $digest"
            exit 1
        }
    done
done
echo "all equal: $digest"
