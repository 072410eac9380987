"""A network file system: a kernel serves a disk over NFS to itself and saves through the mount,
until its power is cut or it is done; what the server's disk holds is judged."""

from __future__ import annotations

import random
import time

import images
import pytest
import uml
from conftest import need, need_nothing_of
from lab import CHRONICLER, Lab
from longer import LONG
from verdicts import Tally, judge_image, promises

CUTS = 4
#: The client's options, the server's, and the path that a client asks for.
VERSIONS = {
    "4.2": ("vers=4.2,soft,timeo=100,nosharecache", "-N3", "/"),
    "3, without locks": ("vers=3,soft,timeo=100,nosharecache,nolock", "-N4", "/mnt/disk"),
}


@pytest.mark.parametrize("version", VERSIONS)
def test_nfs_commits_survive_client_and_server_power_cuts(lab: Lab, version: str) -> None:
    if not LONG:
        pytest.skip("STEPWELL_LONG=1 runs it")
    need("mkfs.ext4", "modprobe", "rpc.nfsd", "rpc.mountd", "exportfs", "rpcbind", "mount.nfs")
    need_nothing_of(uml.unusable(lab, "nfsd", "nfsv4", "nfsv3"))
    client, server, export = VERSIONS[version]
    disk = images.make(lab.at / "disk.img", "ext4", "256M")
    drawn = random.Random(version)
    tally, journal = Tally(), ""
    for cut in range(CUTS + 1):
        last = cut == CUTS
        guest = uml.Guest(
            lab, "nfs.sh", [disk], KIND="ext4", NAME=f"cut{cut}", SEED=drawn.randrange(1 << 32), CHRONICLER=CHRONICLER,
            CLIENT=client, SERVER=server, EXPORT=export, OPTIONS="operations=12" if last else "",
        )  # fmt: skip
        if last:
            journal += promises(guest.finish(200))
        else:
            guest.wait_for("opened ")
            time.sleep(drawn.uniform(0, 4))
            guest.cut()
            journal += promises(guest.journal)
        copy = images.copy(disk, lab.at / "copy.img")
        tally.add(f"cut {cut}", judge_image(lab, copy, "ext4", journal))
    print(f"\nNFS {version}: {CUTS} power cuts, {journal.count('committed ')} acknowledged saves: {tally}")
    for line in journal.splitlines():
        what, _, words = line.partition(" none ")
        if what == "error" or not line.startswith("error "):
            continue
        # A network file system cannot swap two names, so a step is not replaced. Nothing else
        # fails.
        assert "cannot swap two directories" in words, line
    tally.assert_sound()
    # Another client sees what the first has written.
    assert "error none seen from afar " in journal
