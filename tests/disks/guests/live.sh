#!/bin/sh
# Lives a history on the disk until the power goes.
. "${0%/*}/prelude.sh"
mkdir /mnt/disk
mount -t "$KIND" /dev/ubda /mnt/disk || fail "the disk does not mount"
"$CHRONICLER" live /mnt/disk/run "$NAME" "$SEED" $(echo "$OPTIONS" | tr , " ") >&3
fail "the history has ended"
