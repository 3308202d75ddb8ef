# What a build, and what the tests need, as package names of Debian 12 and of Homebrew; and how to install them.
# shellcheck shell=sh disable=SC2034
# Sourced by run.sh and test.sh. Works in every POSIX shell.

debian_build="gcc libc6-dev meson ninja-build pkg-config python3 ca-certificates protobuf-c-compiler libprotobuf-c-dev
 libavahi-client-dev libavahi-core-dev libsodium-dev libnanomsg-dev libblis-dev libuv1-dev libmicrohttpd-dev
 libcurl4-openssl-dev libjansson-dev libpcre2-dev libutf8proc-dev libinih-dev procps"
debian_tests="libcmocka-dev clang libclang-rt-dev clang-format clang-tidy gcc-aarch64-linux-gnu libc6-dev-arm64-cross
 qemu-user-static avahi-daemon dbus iproute2 nftables python3-pip python3-venv git mandoc"
brew_build="meson ninja pkgconf python3 protobuf-c libsodium nanomsg libuv libmicrohttpd jansson pcre2 utf8proc inih"
brew_tests="cmocka"

# say LINE...
say() {
    printf '%s\n' "$@"
}

# fail SENTENCE...: says what went wrong and ends.
fail() {
    printf '%s\n' "$@" >&2
    exit 1
}

# as_root COMMAND...
as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null 2>&1; then
        sudo "$@"
    else
        fail "Packages have to be installed, and this user may not: run this as root, or install sudo."
    fi
}

# Prints those of the Debian packages that are not installed.
debian_missing() {
    for package in "$@"; do
        case $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) in
        installed) ;;
        *) printf '%s ' "$package" ;;
        esac
    done
}

# need_packages DEBIAN_LIST BREW_LIST: installs what is missing; asks for no password when nothing is.
need_packages() {
    if [ "$(uname -s)" = Darwin ]; then
        command -v brew >/dev/null 2>&1 ||
            fail "Homebrew is needed to install libraries: see https://brew.sh, then run this again."
        have=" $(brew list --formula -1 | tr '\n' ' ') "
        missing=
        for formula in $2; do
            case $have in
            *" $formula "*) ;;
            *) missing="$missing $formula" ;;
            esac
        done
        [ -z "$missing" ] && return 0
        say "Installing with Homebrew (this can take minutes):$missing"
        # shellcheck disable=SC2086
        brew install $missing || fail "Homebrew could not install these packages: see its message above."
    elif command -v apt-get >/dev/null 2>&1; then
        # shellcheck disable=SC2086
        missing=$(debian_missing $1)
        [ -z "$missing" ] && return 0
        say "Installing with apt (this can take minutes, and shows nothing): $missing"
        as_root apt-get update -qq </dev/null ||
            fail "apt cannot read its package lists: is this computer online?"
        # shellcheck disable=SC2086
        as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing \
            </dev/null >"${TMPDIR:-/tmp}/covey-apt.$$" 2>&1 || {
            tail -n 20 "${TMPDIR:-/tmp}/covey-apt.$$" >&2
            rm -f "${TMPDIR:-/tmp}/covey-apt.$$"
            fail "apt could not install these packages: see its message above."
        }
        rm -f "${TMPDIR:-/tmp}/covey-apt.$$"
    else
        say "This is neither Debian nor macOS: install the libraries that meson.build names yourself." \
            "(Going on with what is here.)"
    fi
}
