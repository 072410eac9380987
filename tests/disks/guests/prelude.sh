# What every guest begins with; sourced. The serial line is the journal: nothing but lines of it may go there.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs run /run
mount -t tmpfs tmp /mnt
stty -F /dev/ttyS0 -opost -echo
exec 3>/dev/ttyS0

fail() {
    echo "error guest $*" >&3
    finish
}

finish() {
    echo "error none finished" >&3
    while :; do sleep 1000; done
}

load() {
    for module in "$@"; do
        insmod "$(find /usr/lib/uml/modules/*/kernel -name "$module.ko" | head -n 1)" || fail "no module $module"
    done
}
