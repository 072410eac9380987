#!/bin/sh
# Serves a disk over NFS to itself, and lives a history on the mount until the power goes.
. "${0%/*}/prelude.sh"
modules=$(ls -d /usr/lib/uml/modules/* | head -n 1)
mkdir -p /mnt/modules/lib/modules /mnt/disk /mnt/near /mnt/far
ln -s "$modules" "/mnt/modules/lib/modules/${modules##*/}"
for module in nfsd nfsv4 nfsv3; do modprobe -d /mnt/modules "$module" || fail "no module $module"; done
ip link set lo up || fail "no loopback"
mount -t ext4 /dev/ubda /mnt/disk || fail "the disk does not mount"
mkdir -p /mnt/disk/run
chmod 777 /mnt/disk
mount -t tmpfs state /var/lib/nfs || fail "no place for the state of the server"
mkdir -p /var/lib/nfs/rpc_pipefs /var/lib/nfs/v4recovery /var/lib/nfs/sm
touch /var/lib/nfs/etab /var/lib/nfs/rmtab /var/lib/nfs/state
mount -t rpc_pipefs rpc_pipefs /var/lib/nfs/rpc_pipefs
mount -t nfsd nfsd /proc/fs/nfsd || fail "no nfsd"
rpcbind -w
exportfs -i -o rw,no_root_squash,fsid=0,insecure,sync,no_subtree_check 127.0.0.1:/mnt/disk || fail "not exported"
rpc.nfsd $SERVER 2 || fail "the server does not start"
rpc.mountd $SERVER || fail "the mount daemon does not start"
sleep 1
mount -t nfs -o "$CLIENT" "127.0.0.1:$EXPORT" /mnt/near || fail "the client does not mount"
mount -t nfs -o "$CLIENT" "127.0.0.1:$EXPORT" /mnt/far || fail "the second client does not mount"
"$CHRONICLER" live /mnt/near/run "$NAME" "$SEED" $(echo "$OPTIONS" | tr , " ") >&3 || fail "the history did not end well"
echo "error none lived" >&3
"$CHRONICLER" repeat /mnt/near/repeated | sed "s/^/error none /" >&3
# Another client sees the same bytes.
(cd /mnt/far/repeated && find . -type f ! -path ./.stepwell/epoch -exec sha256sum {} + | sort -k 2 | sha256sum | sed "s/^/error none seen from afar /") >&3
finish
