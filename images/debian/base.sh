# Makes a tar of the base of an image from Debian's packages, as this machine's own apt gets them.
# usage: base.sh TAR HOOK PACKAGE,PACKAGE...
#
# Packages are only unpacked: their own scripts need privileges and time. The hook does what they would have done.
set -eu

fail() {
    echo "$1" >&2
    exit 1
}

command -v mmdebstrap >/dev/null || fail "there is no mmdebstrap on this machine"
codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
[ -n "$codename" ] || fail "/etc/os-release names no release: this is not Debian or a child of it"
for sources in sources.list.d/ubuntu.sources sources.list.d/debian.sources sources.list; do
    if grep -qs '[^[:space:]]' "/etc/apt/$sources"; then
        exec mmdebstrap --variant=extract "--include=$3" "--extract-hook=$2" "$codename" "$1" - <"/etc/apt/$sources"
    fi
done
fail "apt has no sources on this machine"
