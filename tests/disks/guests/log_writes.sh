#!/bin/sh
# Lives a history on a disk of which every write, flush and mark is logged to another disk.
. "${0%/*}/prelude.sh"
load dm-mod dm-log-writes
dmsetup create logged --table "0 $(cat /sys/block/ubda/size) log-writes /dev/ubda /dev/ubdb" --noudevsync >&2 || fail "no log-writes device"
mknod /mnt/logged b $(tr : ' ' </sys/block/dm-0/dev)
mkdir /mnt/disk
mount -t "$KIND" /mnt/logged /mnt/disk || fail "the disk does not mount"
dmsetup message logged 0 mark start || fail "the device takes no marks"
case "$WRITER" in
chronicler) "$CHRONICLER" live /mnt/disk/run logged "$SEED" device=logged $(echo "$OPTIONS" | tr , " ") >&3 || fail "the history did not end well" ;;
orbax) HOME=/mnt JAX_PLATFORMS=cpu "$PYTHON" -B "${0%/*}/../orbax_writer.py" save /mnt/disk/run "$STEPS" logged >&3 || fail "Orbax did not end well" ;;
esac
dmsetup message logged 0 mark end
umount /mnt/disk || fail "the disk is busy"
dmsetup remove --noudevsync logged || fail "the log is busy"
finish
