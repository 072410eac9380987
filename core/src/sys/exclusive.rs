//! Exclusive use of a file through a write lease (`fcntl(2)`, `F_SETLEASE`). The kernel grants the
//! lease only if nobody else has the file open.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::fs::fstatfs;

/// Local file systems: the kernel knows of every open of their files. ext2 to ext4, XFS, Btrfs,
/// F2FS, bcachefs, ZFS, tmpfs.
const LOCAL: [u64; 7] =
    [0xef53, 0x5846_5342, 0x9123_683e, 0xf2f5_2010, 0xca45_1a4e, 0x2fc1_2fc1, 0x0102_1994];

/// The outcome of [`with_exclusive_file`].
#[derive(Debug, PartialEq, Eq)]
pub enum Exclusive<T> {
    /// The action did not run: another process has the file open, or the kernel cannot tell.
    Unavailable,
    /// The action ran, and nobody tried to open the file.
    Undisturbed(T),
    /// The action ran. Meanwhile another process tried to open the file under its former name. Its
    /// open now succeeds.
    Interrupted(T),
}

/// Runs `act` if nobody else has the file open, and blocks every open meanwhile. A blocked open
/// gets the file that its name meant before. `fd` is open for reading and writing.
pub fn with_exclusive_file<T>(fd: BorrowedFd<'_>, act: impl FnOnce() -> T) -> Exclusive<T> {
    if !is_local(fd) {
        return Exclusive::Unavailable;
    }
    let set = |what: libc::c_int, value: libc::c_int| {
        // SAFETY: both commands take one number and touch no memory of ours.
        unsafe { libc::fcntl(fd.as_raw_fd(), what, value) == 0 }
    };
    // The kernel signals this process when another one opens the file. The default signal would end
    // this process; SIGURG is ignored unless it has a handler.
    if !set(F_SETSIG, libc::SIGURG) || !set(libc::F_SETLEASE, libc::F_WRLCK) {
        return Exclusive::Unavailable;
    }
    let done = act();
    let nobody_waits = is_leased(fd);
    set(libc::F_SETLEASE, libc::F_UNLCK);
    if nobody_waits { Exclusive::Undisturbed(done) } else { Exclusive::Interrupted(done) }
}

/// True if the lease is unbroken. When another process waits for its end, the kernel returns the
/// type that the lease must change to.
fn is_leased(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: the command takes no argument and touches no memory of ours.
    unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETLEASE) == libc::F_WRLCK }
}

fn is_local(fd: BorrowedFd<'_>) -> bool {
    fstatfs(fd).is_ok_and(|found| u64::try_from(found.f_type).is_ok_and(|kind| LOCAL.contains(&kind)))
}

/// A constant of Linux' `fcntl.h` that the libc crate lacks.
const F_SETSIG: libc::c_int = 10;

#[cfg(test)]
mod tests {
    use super::super::testing::absent;
    use std::fs::{File, OpenOptions};
    use std::os::fd::AsFd;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn an_open_file_is_not_exclusive() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("f");
        std::fs::write(&path, [1; 4096]).unwrap();
        let open = || OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let run = || with_exclusive_file(open().as_fd(), || 7);
        if !is_local(open().as_fd()) {
            return absent(
                "leases",
                &format!("the file system of {} is not known to be local", path.display()),
            );
        }
        assert_eq!(run(), Exclusive::Undisturbed(7));
        let reader = File::open(&path).unwrap();
        assert_eq!(run(), Exclusive::Unavailable);
        drop(reader);
        let writer = open();
        assert_eq!(run(), Exclusive::Unavailable);
        drop(writer);
        assert_eq!(run(), Exclusive::Undisturbed(7));
    }

    #[test]
    fn who_comes_to_open_it_meanwhile_is_noticed_and_waits() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("f");
        std::fs::write(&path, "old").unwrap();
        let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        if !is_local(file.as_fd()) {
            return absent(
                "leases",
                &format!("the file system of {} is not known to be local", path.display()),
            );
        }
        let (told, tells) = std::sync::mpsc::channel();
        let mut reader = None;
        let done = with_exclusive_file(file.as_fd(), || {
            let path = path.clone();
            reader = Some(std::thread::spawn(move || {
                let opened = File::open(path);
                told.send(()).unwrap();
                opened.and_then(std::io::read_to_string).unwrap()
            }));
            let until = Instant::now() + Duration::from_secs(60);
            while is_leased(file.as_fd()) {
                assert!(Instant::now() < until, "nobody has come");
                std::thread::sleep(Duration::from_millis(1));
            }
            // The other open waits while the action runs.
            assert!(tells.recv_timeout(Duration::from_millis(100)).is_err());
        });
        assert_eq!(done, Exclusive::Interrupted(()));
        assert_eq!(reader.unwrap().join().unwrap(), "old");
    }
}
