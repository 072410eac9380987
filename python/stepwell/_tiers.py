"""Tiers: several places of one run's steps, with promises of their own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal, TypeAlias, final, get_args

from . import _core
from ._checks import flag, instance, one_of, shown, text, whole
from ._choice import compressed
from ._locations import Location, check_root, is_store, location
from ._opening import check_not_foreign
from ._options import Options, StepName, to_json
from ._policies import every_steps
from ._public import public
from ._restore.options import Globs
from ._retention import Retention, as_retention
from .errors import MisuseError, StepNotFound

#: A copy outlives its process, its machine, or its site. In this order.
Survives: TypeAlias = Literal["process", "node", "site"]
_SURVIVES = get_args(Survives)
#: File systems that other machines keep. They outlive this one.
_SHARED = frozenset(
    [
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "nfs",
        "nfs4",
        "ocfs2",
        "panfs",
        "pvfs2",
        "smb3",
        "virtiofs",
        "wekafs",
    ]
)
_MOST_EVERY = 2**63 - 1
_MOST_RATE = 2**62
_MOST_COPIES = 2**16


@public
@final
@dataclass(frozen=True, slots=True)
class Tier:
    """A place of a run's steps: ``CheckpointManager(tiers=[near, home])``. Saves go to the first
    one. A carrier copies steps from there to the others in the background.

    Args:
        location: its root, a path or a URL.
        name: its name in calls and reports. Default: ``"near"`` for the first tier, ``"home"`` for
            the last one.
        retention: the steps that stay there, as ``retention=`` of a manager.
        every: it gets the steps whose number this divides. The first tier gets all.
        all_due: ``False``: when a newer step is due, those that still wait are passed over.
            ``True``: it gets all of them, and the first tier keeps them until then.
        survives: what its copies outlive: ``"process"`` (of this machine), ``"node"`` (a loss of
            the machine) or ``"site"``. Default: ``"site"`` for an object store, ``"node"`` for a
            network file system, else ``"process"``.
        bytes_per_second: the most that a carrier writes there.
        compress: the tensors whose copies are compressed there: ``True`` for all of them, or globs
            over rendered leaf paths, such as ``["optimizer"]``. Reads decode them, and give the
            same values.
        per_machine: the first tier is a directory on the local disk of each machine of the job, in
            place of one that all processes share. Each process writes to its own machine, and reads
            what others have over the network. A machine is told by its host name.
        copies: with ``per_machine=True``, the number of machines that have each file. ``2``: each
            machine also copies the files of another one, in the background, so that the loss of a
            machine loses no copied step.
    """

    location: Location
    _: KW_ONLY
    name: str | None = None
    retention: Retention | int | None = None
    every: int = 1
    all_due: bool = False
    survives: Survives | None = None
    bytes_per_second: int | None = None
    compress: bool | Globs = False
    per_machine: bool = False
    copies: int = 1

    def __post_init__(self) -> None:
        if self.name is not None and not text(self.name, "the name of a Tier"):
            raise MisuseError("the name of a Tier is not empty")
        as_retention(self.retention)
        whole(self.every, "every= of a Tier", 1, _MOST_EVERY)
        flag(self.all_due, "all_due= of a Tier")
        flag(self.per_machine, "per_machine= of a Tier")
        if whole(self.copies, "copies= of a Tier", 1, _MOST_COPIES) > 1 and not self.per_machine:
            raise MisuseError(
                "copies= are on other machines: they are for a tier on the local disk of each, with per_machine=True"
            )
        if self.survives is not None:
            one_of(self.survives, "survives= of a Tier", _SURVIVES)
        if self.bytes_per_second is not None:
            whole(self.bytes_per_second, "bytes_per_second= of a Tier", 1, _MOST_RATE)
        # An iterator is read once.
        object.__setattr__(self, "compress", tuple(compressed(self.compress)))


@final
@dataclass(frozen=True, slots=True)
class TierStatus:
    """The state of a tier, as rank 0 knows it."""

    name: str
    location: str
    survives: Survives
    #: The steps that it has.
    steps: tuple[int, ...]
    #: The steps that it is still to get.
    due: tuple[int, ...]
    #: The step that is on its way, the bytes that have arrived, and all of its bytes.
    carried: int | None
    carried_bytes: int
    nbytes: int
    #: How many steps were passed over for newer ones.
    superseded: int
    #: The step that could not be carried, and why.
    failed: int | None
    failure: str | None


class Tiers:
    """The tiers of one manager."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.all = [instance(tier, Tier, "each of tiers=", "sw.Tier(…)") for tier in tiers]
        self.roots = [location(tier.location, "the location of a Tier") for tier in self.all]
        last = len(self.all) - 1
        defaults = ["near" if at == 0 else "home" if at == last else f"tier{at}" for at in range(last + 1)]
        self.names = [tier.name or default for tier, default in zip(self.all, defaults, strict=True)]
        places = [root if is_store(root) else os.path.realpath(root) for root in self.roots]
        for given, what in ((places, "location"), (self.names, "name")):
            if twice := {one for one in given if given.count(one) > 1}:
                raise MisuseError(f"two tiers have the {what} {min(twice)}; each has its own")
        first = self.all[0]
        if first.every != 1 or first.all_due or first.bytes_per_second is not None:
            raise MisuseError(
                "the first tier gets every step that is saved: every=, all_due= and bytes_per_second= are for the others"
            )
        if first.compress:
            raise MisuseError(
                "saves go to the first tier, and are not compressed: compress= is for the other tiers"
            )
        if spread := [
            name for name, tier in zip(self.names[1:], self.all[1:], strict=True) if tier.per_machine
        ]:
            raise MisuseError(
                f"per_machine= is for the first tier. All machines carry to {spread[0]}, so they share it"
            )
        #: True if the first tier is on the local disks of several machines.
        self.per_machine = bool(first.per_machine)
        #: The number of machines that have each file of it. 0: it is in one place.
        self.machine_copies = int(first.copies) if first.per_machine else 0
        if self.per_machine and is_store(self.roots[0]):
            raise MisuseError(f"all machines share {self.roots[0]}: leave per_machine= out")

    def further(
        self, options: Options, step_name: StepName | None, read_only: bool
    ) -> list[_core._TierArgument]:
        """Returns the tiers but the first one, as the engine takes them."""
        near = self.roots[0]
        if read_only and not (self.per_machine or is_store(near) or os.path.lexists(near)):
            raise StepNotFound(
                f"the first tier is not on this machine: there is no {near}. Readers on other machines open the tier behind it: CheckpointManager({self.roots[-1]!r}, read_only=True)"
            )
        found = []
        for name, root, tier in list(zip(self.names, self.roots, self.all, strict=True))[1:]:
            if not is_store(root):
                check_root(root)
                if not read_only:
                    check_not_foreign(root)
            rules = as_retention(tier.retention)
            written = to_json(options, every_steps(1), rules, step_name, "auto", 1, read_only, "raise")
            rate = None if tier.bytes_per_second is None else int(tier.bytes_per_second)
            globs = compressed(tier.compress)
            found.append((name, root, written, int(tier.every), bool(tier.all_due), rate, globs))
        return found

    def survives(self, at: int) -> Survives:
        """Returns what the copies of a tier outlive, without its copies on other machines."""
        tier, root = self.all[at], self.roots[at]
        return tier.survives or _guess(root)

    def status(self, core: _core.Manager) -> list[TierStatus]:
        """Returns the states of all tiers, nearest first."""
        found = []
        for name, root, steps, due, carried, superseded, failure in _core.tier_states(core):
            at = self._place(name)
            step, arrived, nbytes = carried or (None, 0, 0)
            failed, why = failure or (None, None)
            found.append(
                TierStatus(
                    name=self.names[at],
                    location=root,
                    survives=self.survives(at),
                    steps=tuple(steps),
                    due=tuple(due),
                    carried=step,
                    carried_bytes=arrived,
                    nbytes=nbytes,
                    superseded=superseded,
                    failed=failed,
                    failure=why,
                )
            )
        return found

    def _place(self, name: str) -> int:
        """Returns the place of a tier by its name in the engine. The first tier has none there."""
        return self.names.index(name) if name else 0

    def wait(self, core: _core.Manager, step: int, name: str, limit: float | None) -> None:
        """Waits until a tier has a committed step."""
        if name not in self.names:
            raise MisuseError(f"there is no tier {shown(name)}; the tiers are {', '.join(self.names)}")
        is_first = name == self.names[0]
        if not _core.wait_carried(core, step, "" if is_first else name, limit):
            what = "copies on other machines of" if is_first else f"the tier {name} to get"
            raise TimeoutError(f"waited {limit or 0.0:.1f} s for {what} step {step}; it is still on its way")

    def durability(self, core: _core.Manager, step: int) -> Survives | None:
        """Returns what the tiers that have a committed step outlive. ``None``: no tier has it any
        more."""
        have = [self.survives(self._place(name)) for name in _core.tiers_of(core, step)]
        if self.machine_copies > 1 and _core.is_copied(core, step):
            have.append("node")
        return max(have, key=_SURVIVES.index, default=None)


def _guess(root: str) -> Survives:
    """The end that a root outlives, by its file system; ``"process"`` if that is not known."""
    if is_store(root):
        return "site"
    with contextlib.suppress(OSError):
        if (_core.file_system(root) or "").removeprefix("fuse.") in _SHARED:
            return "node"
    return "process"
