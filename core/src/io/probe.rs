//! The choice of an engine for a directory, with reasons.
//!
//! The probe assumes nothing. It writes and reads back a block with O_DIRECT, creates and uses a
//! ring, and registers a buffer, because the version of a kernel says little about what a
//! container, a limit or a file system allows. Each refusal leads to the next engine, and into
//! [`EngineChoice::reasons`] with its likely cause.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::{Errno, retry_on_intr};

use super::posix::{self, DirectIo, Settings};
use super::posix_disk::{Mover, PosixDisk};
use super::{Disk, EngineChoice, Purpose, STALL_TIMEOUT};
use crate::sys::{Buffer, Descriptor, Flight, Mapping, Ring};
use crate::{Error, Result};

/// The environment variable that chooses the engine for [`Engine::Auto`].
pub const ENGINE_VARIABLE: &str = "STEPWELL_ENGINE";

/// Offsets and lengths of the format are multiples of this, so coarser alignments do not work.
const FORMAT_ALIGNMENT: usize = 4096;

/// Timeout for the first block through a ring. A disk may be busy.
const PROBE_TIMEOUT: Duration = Duration::from_secs(30);

/// The requested engine. The probe replaces an unavailable one by the next best, with the reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Engine {
    /// The engine named by `STEPWELL_ENGINE`, else the best that works.
    #[default]
    Auto,
    /// io_uring with O_DIRECT.
    Uring,
    /// Threads with O_DIRECT.
    Threads,
    /// Threads and the page cache.
    Buffered,
}

impl FromStr for Engine {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "" | "auto" => Ok(Self::Auto),
            "uring" | "io_uring" => Ok(Self::Uring),
            "threads" => Ok(Self::Threads),
            "buffered" => Ok(Self::Buffered),
            _ => Err(Error::Misuse(format!(
                "there is no engine `{name}`; {ENGINE_VARIABLE} and the engine option take auto, uring, threads or buffered"
            ))),
        }
    }
}

/// Opens the file system of `path`. A missing path is judged by its nearest existing ancestor.
/// Leaves no files behind.
pub fn open_disk(path: &Path, wanted: Engine) -> Result<Arc<dyn Disk>> {
    let wanted = Wanted::find(path, wanted)?;
    wanted.refuse_bucket(wanted.device()?)?;
    Ok(Arc::new(wanted.probe(Purpose::Write)?.into_disk()))
}

/// A request for an engine, at an existing directory.
pub(super) struct Wanted {
    /// The engine, after the environment variable was consulted.
    pub(super) engine: Engine,
    /// A directory that exists.
    there: PathBuf,
    reasons: Vec<String>,
}

impl Wanted {
    pub(super) fn find(path: &Path, wanted: Engine) -> Result<Self> {
        let mut reasons = Vec::new();
        let engine = match (wanted, std::env::var(ENGINE_VARIABLE)) {
            (Engine::Auto, Ok(name)) => {
                let engine = name.parse()?;
                if engine != Engine::Auto {
                    reasons.push(format!("{ENGINE_VARIABLE}={name} was asked for."));
                }
                engine
            }
            (wanted, _) => wanted,
        };
        Ok(Self { engine, there: nearest_existing(path)?, reasons })
    }

    /// The device number of the file system.
    pub(super) fn device(&self) -> Result<u64> {
        let stat = rustix::fs::stat(&self.there).map_err(|errno| Error::io("stat", &self.there, errno))?;
        Ok(stat.st_dev)
    }

    /// Refuses a mounted bucket, on which no step can be committed.
    pub(super) fn refuse_bucket(&self, device: u64) -> Result<()> {
        super::mounts::refuse_bucket(&self.there, device)
    }

    pub(super) fn probe(self, purpose: Purpose) -> Result<Facts> {
        let Self { engine, there, mut reasons } = self;
        let probe = probe_directory(&there, engine, purpose, &mut reasons)?;
        let engine = match (probe.direct, probe.mover) {
            (None, _) => "buffered",
            (Some(_), Mover::Threads) => "threads",
            (Some(_), Mover::Uring) => "io_uring",
        };
        let choice = EngineChoice {
            engine,
            direct: probe.direct.is_some(),
            alignment: probe.direct.unwrap_or(1).max(1),
            registered: probe.registered,
            reasons,
        };
        tracing::debug!(path = %there.display(), ?choice, "engine chosen");
        Ok(Facts {
            choice,
            direct: probe.direct,
            sync_dirs: probe.sync_dirs,
            mover: probe.mover,
            written: probe.written,
        })
    }
}

/// The findings of a probe.
#[derive(Clone)]
pub(super) struct Facts {
    choice: EngineChoice,
    direct: Option<usize>,
    sync_dirs: bool,
    mover: Mover,
    /// True if the probe created and wrote a file.
    pub(super) written: bool,
}

impl Facts {
    pub(super) fn into_disk(self) -> PosixDisk {
        PosixDisk::new(self.choice, Settings::new(self.direct, self.sync_dirs), self.mover)
    }
}

fn nearest_existing(path: &Path) -> Result<PathBuf> {
    for ancestor in path.ancestors() {
        let named = if ancestor.as_os_str().is_empty() { Path::new(".") } else { ancestor };
        match rustix::fs::stat(named) {
            Ok(stat) if rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir() => {
                return Ok(named.to_path_buf());
            }
            Ok(_) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(Error::io("open", named, errno)),
        }
    }
    Err(Error::io("open", path, Errno::NOENT))
}

struct Probe {
    direct: Option<usize>,
    mover: Mover,
    registered: bool,
    sync_dirs: bool,
    written: bool,
}

fn probe_directory(dir: &Path, wanted: Engine, purpose: Purpose, reasons: &mut Vec<String>) -> Result<Probe> {
    let opened = posix::open_dir(&Settings::new(None, true), dir)?;
    let mut probe =
        Probe { direct: None, mover: Mover::Threads, registered: false, sync_dirs: true, written: false };
    let made = match purpose {
        Purpose::Write => scratch_file(opened.fd()?).map(Some),
        Purpose::Read => Ok(None),
    };
    let file = match made {
        Ok(Some(file)) => Some(file),
        Ok(None) => {
            reasons.push("Opened for reading only, so nothing was written to try it.".into());
            None
        }
        Err(errno) => {
            reasons.push(format!(
                "No file could be created in {} ({errno}), so it counts as read-only and nothing was written to try it.",
                dir.display()
            ));
            None
        }
    };
    probe.written = file.is_some();
    // Other errors concern the next caller of sync.
    if file.is_some()
        && let Err(errno @ (Errno::INVAL | Errno::OPNOTSUPP | Errno::BADF)) = rustix::fs::fsync(opened.fd()?)
    {
        probe.sync_dirs = false;
        reasons.push(format!(
            "Directories cannot be fsynced here ({errno}): after a power cut, files may be missing that were reported as durable."
        ));
    }
    if wanted == Engine::Buffered {
        reasons.push("Data goes through the page cache, as requested.".into());
        return Ok(probe);
    }
    match file.as_ref().map(try_direct) {
        Some(Ok((alignment, how))) => {
            probe.direct = Some(alignment);
            reasons.push(format!(
                "O_DIRECT works: a block of {FORMAT_ALIGNMENT} bytes was written and read back (alignment {alignment}, {how})."
            ));
        }
        Some(Err(reason)) => {
            reasons.push(format!(
                "{reason} Data goes through the page cache, moved by threads: slower, and at more CPU time."
            ));
            return Ok(probe);
        }
        None => {
            probe.direct = Some(FORMAT_ALIGNMENT);
            reasons.push(format!(
                "Files are opened with O_DIRECT if they allow it, in blocks of {FORMAT_ALIGNMENT} bytes."
            ));
        }
    }
    if wanted == Engine::Threads {
        reasons.push("Threads move the data, as requested.".into());
        return Ok(probe);
    }
    // In a read-only directory, the ring is tried on memory.
    let tried = match file.map_or_else(memory_file, Ok) {
        Ok(file) => try_ring(&file),
        Err(errno) => Err(("memfd_create", errno.into())),
    };
    match tried {
        Ok(()) => {
            probe.mover = Mover::Uring;
            reasons.push("io_uring works: a block was written through a ring.".into());
        }
        Err((op, error)) => {
            let cause = ring_cause(op, &error);
            reasons.push(format!("{op} answered {error}: {cause}. Threads move the data instead, about as fast at a little more CPU time."));
            return Ok(probe);
        }
    }
    match try_registration() {
        Ok(()) => {
            probe.registered = true;
            reasons.push("Memory can be registered with io_uring.".into());
        }
        Err(error) => {
            let cause = ring_cause("io_uring_register", &error);
            reasons.push(format!("io_uring_register answered {error}: {cause}. Transfers pin their memory one by one, which costs some CPU time."));
        }
    }
    Ok(probe)
}

/// Writes a block through a ring. Creating a ring does not prove that it may be used.
fn try_ring(file: &OwnedFd) -> Result<(), (&'static str, io::Error)> {
    let mut ring = Ring::new(1, STALL_TIMEOUT).map_err(|error| ("io_uring_setup", error))?;
    let (op, invalid) = ("io_uring_enter", || io::Error::from(io::ErrorKind::InvalidData));
    let enter = |error| (op, error);
    let descriptor = file.try_clone().map_err(enter)?;
    let descriptor = Arc::new(Descriptor::new(descriptor, "file"));
    let mut buffer = Buffer::alone(FORMAT_ALIGNMENT).map_err(|_| (op, invalid()))?;
    buffer.fill(0xA5);
    let flight = Flight { buffer, descriptor, note: () };
    ring.push(true, 0, 0..FORMAT_ALIGNMENT, flight).map_err(|(_, error)| enter(error))?;
    let deadline = Instant::now() + PROBE_TIMEOUT;
    loop {
        ring.enter(Some(Duration::from_secs(1))).map_err(enter)?;
        match ring.take_finished() {
            Some((_, moved)) if usize::try_from(moved) == Ok(FORMAT_ALIGNMENT) => break,
            Some((_, moved)) if moved < 0 => return Err(enter(io::Error::from_raw_os_error(-moved))),
            Some(_) => return Err((op, invalid())),
            None if Instant::now() > deadline => return Err((op, io::ErrorKind::TimedOut.into())),
            None => {}
        }
    }
    let mut found = Buffer::alone(FORMAT_ALIGNMENT).map_err(|_| (op, invalid()))?;
    match retry_on_intr(|| rustix::io::pread(file, &mut *found, 0)) {
        Ok(FORMAT_ALIGNMENT) if found.iter().all(|&byte| byte == 0xA5) => Ok(()),
        _ => Err((op, invalid())),
    }
}

/// Registers one huge page. A limit may still refuse more later.
fn try_registration() -> io::Result<()> {
    let memory = Mapping::new(1).map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
    Ring::<()>::new(1, STALL_TIMEOUT)?.register(vec![memory])
}

/// The likely cause, with what an operator can do.
fn ring_cause(op: &str, error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM) => {
            match std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").as_deref().map(str::trim) {
                Ok("1" | "2") => "the sysctl kernel.io_uring_disabled forbids it",
                _ => {
                    "forbidden, most likely by a seccomp profile (Docker's and containerd's default profiles leave io_uring out)"
                }
            }
        }
        Some(libc::EACCES) => "forbidden, most likely by a security module such as SELinux",
        Some(libc::ENOSYS) => {
            "the kernel is older than 5.11 or built without io_uring, or a sandbox such as gVisor hides it"
        }
        Some(libc::ENOMEM) if op == "io_uring_register" => {
            "the limit on locked memory is too small (`ulimit -l`)"
        }
        Some(libc::ENOMEM) => {
            "no memory for it, most likely because the limit on locked memory is used up (`ulimit -l`)"
        }
        Some(libc::EMFILE | libc::ENFILE) => "too many open files (`ulimit -n`)",
        Some(libc::EOPNOTSUPP) => "the kernel does not do this with such memory or files",
        Some(libc::EINVAL) => "the kernel does not know this form of the call",
        _ => "unexpected",
    }
}

/// A file for trials without a name, or one that loses its name at once.
fn scratch_file(dir: impl AsFd) -> Result<OwnedFd, Errno> {
    let mode = Mode::from_raw_mode(0o600);
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    if let Ok(fd) = retry_on_intr(|| rustix::fs::openat(&dir, ".", flags | OFlags::TMPFILE, mode)) {
        return Ok(fd);
    }
    // Some file systems have no nameless files.
    let name = format!(".stepwell-probe-{}-{:x}", std::process::id(), unique());
    let named = flags | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
    let fd = retry_on_intr(|| rustix::fs::openat(&dir, name.as_str(), named, mode))?;
    rustix::fs::unlinkat(&dir, name.as_str(), AtFlags::empty())?;
    Ok(fd)
}

fn memory_file() -> Result<OwnedFd, Errno> {
    rustix::fs::memfd_create("stepwell-probe", rustix::fs::MemfdFlags::CLOEXEC)
}

/// A number that differs between the calls of a process. The process id is added to it.
fn unique() -> u128 {
    use std::sync::atomic::{AtomicU32, Ordering};
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    (now.as_nanos() << 16) | u128::from(COUNT.fetch_add(1, Ordering::Relaxed))
}

/// The alignment for direct I/O and its source, or a sentence why direct I/O does not work.
fn try_direct(file: &OwnedFd) -> Result<(usize, &'static str), String> {
    let (alignment, how) = match posix::direct_io(file.as_fd()) {
        DirectIo::Unsupported => {
            return Err("The file system has no O_DIRECT (statx answers alignment 0).".into());
        }
        DirectIo::Aligned(wanted) if wanted > FORMAT_ALIGNMENT => {
            return Err(format!(
                "O_DIRECT needs an alignment of {wanted} bytes here, and files are made of blocks of {FORMAT_ALIGNMENT}."
            ));
        }
        DirectIo::Aligned(wanted) => (wanted, "from statx"),
        DirectIo::Unknown => (FORMAT_ALIGNMENT, "assumed, since the kernel does not say"),
    };
    rustix::fs::fcntl_setfl(file, OFlags::DIRECT)
        .map_err(|errno| format!("The file system refuses O_DIRECT ({errno})."))?;
    let mut buffer = Buffer::alone(FORMAT_ALIGNMENT)
        .map_err(|error| format!("No memory to try O_DIRECT with: {error}."))?;
    let pattern = |i: usize| (i % 251) as u8;
    buffer.iter_mut().enumerate().for_each(|(i, byte)| *byte = pattern(i));
    let moved = retry_on_intr(|| rustix::io::pwrite(file, &buffer, 0)).and_then(|written| {
        buffer.fill(0);
        let read = retry_on_intr(|| rustix::io::pread(file, &mut *buffer, 0))?;
        Ok((written, read))
    });
    match moved {
        Ok((FORMAT_ALIGNMENT, FORMAT_ALIGNMENT))
            if buffer.iter().enumerate().all(|(i, &byte)| byte == pattern(i)) =>
        {
            Ok((alignment, how))
        }
        Ok(_) => Err("A block written with O_DIRECT came back changed.".into()),
        Err(errno) => Err(format!(
            "O_DIRECT was allowed at the opening of a file, but then a block of {FORMAT_ALIGNMENT} bytes was refused ({errno})."
        )),
    }
}
