cp -n "$1/usr/share/base-passwd/passwd.master" "$1/etc/passwd"
cp -n "$1/usr/share/base-passwd/group.master" "$1/etc/group"
[ -e "$1/bin/sh" ] || ln -s dash "$1/bin/sh"
[ -e "$1/usr/bin/awk" ] || [ ! -e "$1/usr/bin/gawk" ] || ln -s gawk "$1/usr/bin/awk"
[ -e "$1/usr/bin/cc" ] || [ ! -e "$1/usr/bin/gcc" ] || ln -s gcc "$1/usr/bin/cc"
[ -e "$1/usr/bin/pager" ] || ln -s less "$1/usr/bin/pager"
[ -e "$1/usr/bin/which" ] || [ ! -e "$1/usr/bin/which.debianutils" ] || ln -s which.debianutils "$1/usr/bin/which"
if [ -d "$1/usr/share/ca-certificates" ]; then
    mkdir -p "$1/etc/ssl/certs" "$1/usr/lib/ssl"
    find "$1/usr/share/ca-certificates" -name '*.crt' -exec sed -s '$a\' {} + >"$1/etc/ssl/certs/ca-certificates.crt"
    ln -sf /etc/ssl/certs/ca-certificates.crt "$1/usr/lib/ssl/cert.pem"
fi
rm -rf "$1/usr/share/doc" "$1/usr/share/man" "$1/usr/share/locale" "$1/usr/share/info" "$1/var/cache/apt"
