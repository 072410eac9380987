//! Opening names beneath a directory, never through a symlink.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use rustix::fs::{Mode, OFlags, ResolveFlags, openat, openat2};
use rustix::io::{Errno, Result, retry_on_intr};

use crate::io::is_relative;

/// Opens `name` (a relative path of plain components, else EINVAL) beneath `dir`.
pub fn open_beneath(dir: BorrowedFd<'_>, name: &str, flags: OFlags, mode: Mode) -> Result<OwnedFd> {
    if !is_relative(name) {
        return Err(Errno::INVAL);
    }
    if !have_openat2(dir) {
        return open_by_component(dir, name, flags, mode);
    }
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    // The kernel returns EAGAIN if it cannot distinguish a concurrent rename from an escape.
    for _ in 0..16 {
        match retry_on_intr(|| openat2(dir, name, flags | OFlags::CLOEXEC, mode, resolve)) {
            Err(Errno::AGAIN) => {}
            answer => return answer,
        }
    }
    open_by_component(dir, name, flags, mode)
}

/// Runs `act` on the directory of the last component of `name`, and on that component.
pub fn in_parent<T>(
    dir: BorrowedFd<'_>,
    name: &str,
    act: impl FnOnce(BorrowedFd<'_>, &str) -> Result<T>,
) -> Result<T> {
    if !is_relative(name) {
        return Err(Errno::INVAL);
    }
    match name.rsplit_once('/') {
        None => act(dir, name),
        Some((parent, last)) => {
            let parent = open_beneath(dir, parent, OFlags::PATH | OFlags::DIRECTORY, Mode::empty())?;
            act(parent.as_fd(), last)
        }
    }
}

/// True if `openat2` works in this process. It does not before Linux 5.6 (ENOSYS), nor under
/// seccomp filters that do not know it (EPERM).
fn have_openat2(dir: BorrowedFd<'_>) -> bool {
    static HAVE: OnceLock<bool> = OnceLock::new();
    *HAVE.get_or_init(|| {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let answer = retry_on_intr(|| openat2(dir, ".", flags, Mode::empty(), resolve));
        !matches!(answer, Err(Errno::NOSYS | Errno::PERM | Errno::INVAL))
    })
}

/// Opens the name with plain `openat`. No component is `..` and no symlink is followed, so the path
/// cannot leave the directory.
fn open_by_component(dir: BorrowedFd<'_>, name: &str, flags: OFlags, mode: Mode) -> Result<OwnedFd> {
    let (parents, last) = name.rsplit_once('/').unwrap_or(("", name));
    let step = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut held: Option<OwnedFd> = None;
    for part in parents.split('/').filter(|part| !part.is_empty()) {
        let from = held.as_ref().map_or(dir, AsFd::as_fd);
        let next = retry_on_intr(|| openat(from, part, step, Mode::empty()))?;
        held = Some(next);
    }
    let from = held.as_ref().map_or(dir, AsFd::as_fd);
    retry_on_intr(|| openat(from, last, flags | OFlags::NOFOLLOW | OFlags::CLOEXEC, mode))
}

#[cfg(test)]
mod tests {
    use super::*;

    type Open = fn(BorrowedFd<'_>, &str, OFlags, Mode) -> Result<OwnedFd>;

    #[test]
    fn both_ways_of_opening_stay_beneath_and_follow_no_symlink() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("in/side")).unwrap();
        std::fs::write(root.path().join("in/side/file"), "x").unwrap();
        std::fs::write(root.path().join("outside"), "x").unwrap();
        for (link, target) in [("dir", "side"), ("file", "side/file"), ("up", ".."), ("abs", "/")] {
            std::os::unix::fs::symlink(target, root.path().join("in").join(link)).unwrap();
        }
        let dir = std::fs::File::open(root.path().join("in")).unwrap();
        for open in [open_beneath as Open, open_by_component as Open] {
            let read = |name| open(dir.as_fd(), name, OFlags::RDONLY, Mode::empty());
            read("side").unwrap();
            read("side/file").unwrap();
            for refused in ["dir/file", "file", "up/outside", "abs/etc", "dir"] {
                let errno = read(refused).unwrap_err();
                assert!(matches!(errno, Errno::LOOP | Errno::NOTDIR | Errno::XDEV), "{refused}: {errno}");
            }
            assert_eq!(read("side/none").unwrap_err(), Errno::NOENT);
        }
        for bad in ["", ".", "..", "side/..", "/etc", "side//file", "side/", "a\0b"] {
            let errno = open_beneath(dir.as_fd(), bad, OFlags::RDONLY, Mode::empty()).unwrap_err();
            assert_eq!(errno, Errno::INVAL, "{bad:?}");
        }
    }
}
