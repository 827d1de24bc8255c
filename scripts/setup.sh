#!/usr/bin/env bash
# Installs what is missing for building (always), for `test` and for `demo` (when named). Quick when nothing is.
source "$(dirname "$0")/common.sh"

packages=(g++ make pkg-config python3 python3-venv python3-dev python3-pip)
# bindgen needs libclang; LIBCLANG_PATH says that it is somewhere else.
[ -n "${LIBCLANG_PATH:-}" ] || packages+=(libclang-dev)
for purpose in "$@"; do
    case "$purpose" in
        # xfsprogs: cutting the power of a disk (only root can).
        test) packages+=(python3-numpy python3-torch xfsprogs) ;;
        bench) packages+=(python3-numpy python3-torch) ;;
        demo) packages+=(python3-numpy python3-torch python3-matplotlib) ;;
        build) packages+=(python3-numpy) ;;
        *) fail "setup.sh knows build, test, bench and demo, not '$purpose'" ;;
    esac
done

if command -v dpkg-query > /dev/null && command -v apt-get > /dev/null; then
    missing=()
    for package in $(printf '%s\n' "${packages[@]}" | sort -u); do
        status="$(dpkg-query -W -f='${db:Status-Status}' "$package" 2> /dev/null || true)"
        [ "$status" = installed ] || missing+=("$package")
    done
    if [ "${#missing[@]}" -gt 0 ]; then
        say "installing ${missing[*]} (python3-torch is a download of 150 MB; 1-5 minutes)"
        as_root=()
        if [ "$(id -u)" -ne 0 ]; then
            command -v sudo > /dev/null || fail "please install, as root: apt-get install ${missing[*]}"
            as_root=(sudo)
        fi
        "${as_root[@]}" apt-get update -qq
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" > /dev/null
    fi
else
    # Not a Debian-like system: nothing is installed behind anybody's back.
    absent=()
    command -v g++ > /dev/null || absent+=("a C++20 compiler (g++)")
    command -v flock > /dev/null || absent+=("flock (util-linux)")
    "$SYSTEM_PYTHON" -c 'import venv, ensurepip' 2> /dev/null || absent+=("Python 3.9 or newer with venv and pip at $SYSTEM_PYTHON (or set PYTHON)")
    for module in $(printf '%s\n' "${packages[@]}" | sed -n 's/^python3-\(numpy\|torch\|matplotlib\)$/\1/p' | sort -u); do
        "$SYSTEM_PYTHON" -c "import $module" 2> /dev/null || absent+=("the Python package $module")
    done
    if [ -z "${LIBCLANG_PATH:-}" ] && ! ldconfig -p 2> /dev/null | grep -q libclang; then
        absent+=("libclang (or set LIBCLANG_PATH)")
    fi
    if [ "${#absent[@]}" -gt 0 ]; then
        say "this is not a Debian-like system, so nothing is installed for you. Please install:"
        printf '  - %s\n' "${absent[@]}" >&2
        exit 1
    fi
fi

command -v cargo > /dev/null || fail "Rust is missing: install Rust 1.95 or newer with rustup (https://rustup.rs), then run this again"
needed="$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml | head -1)"
have="$(rustc --version | awk '{print $2}')"
[ "$(printf '%s\n%s\n' "$needed" "$have" | sort -V | head -1)" = "$needed" ] ||
    fail "Rust $have is too old, $needed or newer is needed: rustup update"
[ "$(uname -m)" = x86_64 ] ||
    say "note: only x86-64 is tested; on $(uname -m) RocksDB is built for TARGET_CPU of scripts/rocksdb.sh, which you may have to change"

for purpose in "$@"; do
    if [ "$purpose" = test ] && ! command -v cargo-nextest > /dev/null; then
        say "installing cargo-nextest (5-10 minutes on 2 cores, once)"
        cargo install cargo-nextest --version 0.9.143 --locked --quiet
    fi
done

if [ ! -x "$VENV/bin/python" ]; then
    say "creating $VENV"
    "$SYSTEM_PYTHON" -m venv --system-site-packages "$VENV"
fi
tools=()
[ -x "$VENV/bin/maturin" ] || tools+=("maturin>=1.7,<2")
for purpose in "$@"; do
    if [ "$purpose" = test ] && [ ! -x "$VENV/bin/pytest" ]; then tools+=("pytest>=8,<10"); fi
done
if [ "${#tools[@]}" -gt 0 ]; then
    say "installing ${tools[*]} in $VENV"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "${tools[@]}"
fi
