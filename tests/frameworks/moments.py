"""Looks into a directory while a training runs there, and after one is killed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def there_from_the_first(look: Callable[[], Sized], pause: float = 0.0) -> Iterator[None]:
    """Looks all the time, and fails if something was there once and nothing later. A training of
    several processes needs the cores: then there is a pause between two looks."""
    found: list[bool] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            # A second look: all that the first one listed may be deleted while it lists.
            found.append(bool(look()) or bool(look()))
            if pause:
                ended.wait(pause)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    assert all(found[found.index(True) :])


def killed_in_a_save(
    folder: Path, train: Callable[[Path], object], is_committed: Callable[[Path], object]
) -> Path:
    """Has trainings kill themselves right after a save has returned, each in a directory of its
    own, until one is killed before that save has committed. Returns its directory."""
    for number in range(10):
        place = folder / f"killed-{number}"
        train(place)
        if not is_committed(place):
            return place
    raise AssertionError("each save had committed before the kill")
