#!/usr/bin/env bash
# base_image.sh TAR PYTHON SUITE: the root file system of an image like python:PYTHON-slim-SUITE, for a machine that
# reaches no registry: Debian's smallest system and this machine's own CPython under /usr/local. What the machine trusts
# and where its pip looks come along, so that the Dockerfiles know nothing of it.
set -euo pipefail
tar=$1 python=$2 suite=$3
fail() { echo "images: $*" >&2; exit 1; }

command -v "python$python" >/dev/null || fail "no registry can be reached, and there is no python$python to make a base image of"
prefix=$("python$python" -c 'import sys; print(sys.base_prefix)')
[[ $prefix != /usr ]] || fail "no registry can be reached, and python$python is the system's own: a base image is made of one with a prefix of its own, such as pyenv's"
# shellcheck disable=SC2016  # apt's own $(...)
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Component: main' "Codename: $suite" | sed -n 1p)
[[ -n $mirror ]] || fail "apt knows no mirror of Debian's $suite"

work=$(mktemp -d "$tar.XXXXXX")
trap 'rm -rf "$work"' EXIT
root=$work/root
inside() { chroot "$root" /usr/bin/env -i PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$@"; }
libraries=libssl3,libffi8,zlib1g,libbz2-1.0,liblzma5,libsqlite3-0,libreadline8,libncursesw6,libuuid1,libexpat1
debootstrap --variant=minbase --include="ca-certificates,netbase,tzdata,$libraries" "$suite" "$root" "$mirror" >"$work/log" ||
  { cat "$work/log" >&2; fail 'debootstrap failed'; }
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale}/* "$root"/var/log/*.log

tar -C "$prefix" -cf - --exclude=__pycache__ --exclude='lib/python*/test' --exclude='lib/python*/site-packages/*' \
  --exclude='*.a' bin include lib | tar -C "$root/usr/local" --no-same-owner -xf -
find "$root/usr/local/bin" -type f -exec grep -Iq '^#!' {} \; -delete   # they name the old prefix
ln -sf "python$python" "$root/usr/local/bin/python3"
ln -sf python3 "$root/usr/local/bin/python"
echo /usr/local/lib >"$root/etc/ld.so.conf.d/python.conf"
inside ldconfig
inside python -m ensurepip --upgrade >"$work/log" 2>&1 || { cat "$work/log" >&2; fail 'no pip'; }
ln -sf pip3 "$root/usr/local/bin/pip"

certificates=/etc/ssl/certs/ca-certificates.crt
cp --dereference "$("python$python" -c 'import ssl; print(ssl.get_default_verify_paths().cafile)')" "$root$certificates"
{
  printf '[global]\ncert = %s\n' "$certificates"
  "python$python" -m pip config list | awk -F= '
    match($1, /\.(index-url|extra-index-url|trusted-host)$/) {
      key = substr($1, RSTART + 1); value = substr($0, length($1) + 3); sub(/.$/, "", value)
      if (!(key in settings) || $1 ~ /^:env:/) settings[key] = value   # pip takes the environment before its files
    }
    END {for (key in settings) print key " = " settings[key]}'
} >"$root/etc/pip.conf"

inside python -c 'import bz2, ctypes, lzma, pip, readline, sqlite3, ssl, zlib'
tar -C "$root" --numeric-owner -cf "$tar" .
