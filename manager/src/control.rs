//! A root's own directory: `root.json`, the writer's lock and the epoch.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use stepwell_core::format::manifest::Others;
use stepwell_core::format::sealed_text;
use stepwell_core::io::{Dir, Lock, LockKind, Owner};
use stepwell_core::limits::MAX_METADATA_BYTES;

use crate::directory_layout::{
    CONTROL, EPOCH, KNOWN_RUN, LOCK, MANIFEST, METRICS, ROOT_JSON, SINGLE, control,
};
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::step_name::StepName;

const FORMAT_VERSION: u32 = 1;
/// `root.json` holds the user's metadata and little else.
const MAX_ROOT_JSON_BYTES: u64 = MAX_METADATA_BYTES + (64 << 10);
const MAX_EPOCH_BYTES: u64 = 64 << 10;
const MAX_KNOWN_RUN_BYTES: u64 = 16 << 20;
/// The tries of the lock, and the pause in between: another manager of the same process may be
/// closing.
const LOCK_TRIES: usize = 20;
const LOCK_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The content of `root.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RootInfo {
    /// `stepwell-root`.
    format: String,
    /// Version of the root's format.
    format_version: u32,
    /// Random, 32 hex digits.
    pub root_id: String,
    /// The pattern of step names.
    pub step_name: StepName,
    /// The user's metadata of the root. The first writer's stays.
    #[serde(default)]
    pub metadata: serde_json::Value,
    /// Keys of later versions, which this version keeps.
    #[serde(flatten)]
    others: Others,
}

/// The content of the epoch file, which names the current writer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Epoch {
    /// Counts the writers of this root.
    pub epoch: u64,
    /// The writer's session.
    pub session: String,
    /// The writer, for messages.
    pub owner: String,
}

/// The kind of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathKind {
    /// No directory.
    Absent,
    /// A directory with a manifest: a checkpoint, perhaps damaged.
    Checkpoint,
    /// A directory with a root's own directory.
    Root,
    /// Another directory. It may be an incomplete copy of a root.
    Directory,
}

/// Returns the kind of a path. A disk error is an error, not absence: otherwise a caller would
/// start a new run over an existing one.
pub fn path_kind(environment: &Environment, path: &Path) -> Result<PathKind> {
    let directory = match environment.disk.open_dir(path) {
        Ok(directory) => directory,
        Err(error) if error.is_not_found() || error.is_no_directory() => return Ok(PathKind::Absent),
        Err(error) => return Err(error.into()),
    };
    if is_single(&*directory)? || directory.stat(MANIFEST)?.is_some() {
        return Ok(PathKind::Checkpoint);
    }
    Ok(if directory.stat(CONTROL)?.is_some() { PathKind::Root } else { PathKind::Directory })
}

/// True for the root in an object store that holds a single checkpoint.
pub(crate) fn is_single(directory: &dyn Dir) -> stepwell_core::Result<bool> {
    Ok(directory.fence().is_some() && directory.stat(SINGLE)?.is_some())
}

/// Reads `root.json`. `None` if it does not exist, as in a root that was copied step by step.
pub fn read_info(root: &dyn Dir) -> Result<Option<RootInfo>> {
    let name = control(ROOT_JSON);
    let bytes = match root.read_file(&name, MAX_ROOT_JSON_BYTES) {
        Ok(bytes) => bytes,
        Err(error) if error.is_not_found() => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let file = root.path().join(name);
    // A changed pattern would hide every step, and the run would begin again.
    let info: RootInfo = sealed_text::parse(&bytes).map_err(|error| {
        let what = format!(
            "{error}. The steps do not need it: where they have the default names (step_00000001), delete this file; else delete it and pass the pattern of the names when you open the root"
        );
        stepwell_core::Error::Format { file: file.clone(), what }
    })?;
    if info.format_version != FORMAT_VERSION {
        let what = format!("root format {}; this version reads {FORMAT_VERSION}", info.format_version);
        return Err(stepwell_core::Error::Format { file, what }.into());
    }
    Ok(Some(info))
}

/// Writes `root.json`, under the lock, if it is missing or has changed. The first writer's metadata
/// stays.
pub fn make_info(
    root: &dyn Dir,
    environment: &Environment,
    step_name: &StepName,
    metadata: &serde_json::Value,
) -> Result<RootInfo> {
    let found = read_info(root)?;
    let info = match found.clone() {
        Some(info) => RootInfo {
            step_name: step_name.clone(),
            metadata: if info.metadata.is_null() { metadata.clone() } else { info.metadata },
            ..info
        },
        None => RootInfo {
            format: "stepwell-root".to_owned(),
            format_version: FORMAT_VERSION,
            root_id: environment.hex_id(),
            step_name: step_name.clone(),
            metadata: metadata.clone(),
            others: Others::new(),
        },
    };
    if found.as_ref() != Some(&info) {
        replace_info(root, &info)?;
    }
    Ok(info)
}

/// Replaces `root.json`, under the lock.
pub(crate) fn replace_info(root: &dyn Dir, info: &RootInfo) -> Result<()> {
    write_sealed(root, ROOT_JSON, info)
}

/// Creates the root's own directory, durably.
pub fn make_control(root: &dyn Dir) -> Result<()> {
    let mut made = false;
    for name in [CONTROL.to_owned(), control(METRICS)] {
        match root.create_dir(&name) {
            Ok(_) => made = true,
            Err(error) if error.already_exists() => {}
            Err(error) => return Err(error.into()),
        }
    }
    if made {
        root.open_dir(CONTROL)?.sync()?;
        root.sync()?;
    }
    Ok(())
}

/// Takes the writer's lock. `None` if this file system has no locks and `take_over` is set: then
/// the caller waits for the silence of other writers ([`crate::writer_heartbeat`]).
pub fn lock(root: &dyn Dir, take_over: bool) -> Result<Option<Box<dyn Lock>>> {
    let mut tries = LOCK_TRIES;
    loop {
        tries -= 1;
        match root.try_lock(&control(LOCK), LockKind::Exclusive, true) {
            Ok(Some(lock)) => return Ok(Some(lock)),
            Ok(None) if tries > 0 => std::thread::sleep(LOCK_POLL_INTERVAL),
            Ok(None) => {
                let owner = read_epoch(root).ok().flatten().map(|epoch| epoch.owner);
                return Err(Error::Locked { root: root.path().to_owned(), owner });
            }
            // A fence is exact, so that no user has to allow what it does.
            Err(error) if error.is_without_locks() && (take_over || root.fence().is_some()) => {
                return Ok(None);
            }
            Err(error) if error.is_without_locks() => {
                let root = root.path().to_owned();
                return Err(Error::NoLocks { root, answer: error.to_string() });
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Reads the current writer from the epoch file, or asks the fence.
pub fn read_epoch(root: &dyn Dir) -> stepwell_core::Result<Option<Epoch>> {
    if let Some(fence) = root.fence() {
        let epoch = |Owner { epoch, session, owner }| Epoch { epoch, session, owner };
        return Ok(fence.owner()?.map(epoch));
    }
    match root.read_file(&control(EPOCH), MAX_EPOCH_BYTES) {
        // The file is replaced whole, so it is never torn. An invalid, edited one is ignored.
        Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns the other writer that has taken the root over from this session, if any. Called before
/// every rename. Without locks, only this check blocks an older writer.
pub fn other_writer(root: &dyn Dir, session: &str) -> stepwell_core::Result<Option<String>> {
    Ok(read_epoch(root)?.filter(|epoch| epoch.session != session).map(|epoch| epoch.owner))
}

/// Becomes the current writer. Older writers see it before their next rename.
pub fn take_epoch(root: &dyn Dir, session: &str) -> Result<()> {
    if let Some(fence) = root.fence() {
        return Ok(fence.take(session)?);
    }
    let last = read_epoch(root)?.map_or(0, |epoch| epoch.epoch);
    let epoch = Epoch { epoch: last.saturating_add(1), session: session.to_owned(), owner: owner() };
    write_json(root, EPOCH, &epoch)
}

/// What a near tier knows of its run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KnownRun {
    /// The sessions of the steps of this tier and of home.
    pub sessions: BTreeSet<String>,
    /// The rewinds of home that this tier has followed.
    pub rewinds: BTreeSet<String>,
}

impl KnownRun {
    /// Reads the record of a root. `None` if it has none.
    pub fn read(root: &dyn Dir) -> stepwell_core::Result<Option<Self>> {
        match root.read_file(&control(KNOWN_RUN), MAX_KNOWN_RUN_BYTES) {
            Ok(bytes) => Ok(Some(sealed_text::parse(&bytes).unwrap_or_else(|error| {
                tracing::warn!(root = %root.path().display(), %error, "the record of the run is damaged. Steps that only this tier has may be moved into a branch");
                // Then this tier has followed nothing.
                Self::default()
            }))),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Replaces the record of a root, if it has changed.
    pub fn write(&self, root: &dyn Dir) -> Result<()> {
        if Self::read(root)?.as_ref() == Some(self) {
            return Ok(());
        }
        write_sealed(root, KNOWN_RUN, self)
    }
}

/// Describes this process, for messages.
pub(crate) fn owner() -> String {
    format!("process {} on {}", std::process::id(), stepwell_core::sys::host_name())
}

/// Replaces a small file of the root's own directory, durably. It ends in a checksum.
pub(crate) fn write_sealed(root: &dyn Dir, name: &str, value: &impl Serialize) -> Result<()> {
    let mut bytes = pretty(value)?;
    sealed_text::seal(&mut bytes);
    Ok(replace(root, name, &bytes)?)
}

pub(crate) fn write_json(root: &dyn Dir, name: &str, value: &impl Serialize) -> Result<()> {
    Ok(replace_json(root, name, value)?)
}

/// Replaces a small file of the root's own directory, durably.
pub(crate) fn replace_json(root: &dyn Dir, name: &str, value: &impl Serialize) -> stepwell_core::Result<()> {
    let mut bytes = pretty(value)?;
    bytes.push(b'\n');
    replace(root, name, &bytes)
}

fn pretty(value: &impl Serialize) -> stepwell_core::Result<Vec<u8>> {
    serde_json::to_vec_pretty(value)
        .map_err(|error| stepwell_core::Error::internal("a value that JSON can hold", error.to_string()))
}

fn replace(root: &dyn Dir, name: &str, bytes: &[u8]) -> stepwell_core::Result<()> {
    let control = root.open_dir(CONTROL)?;
    control.replace_file(name, &format!(".{name}.new"), bytes)
}

/// Opens a root. With `create`, creates a missing one durably.
pub fn open(environment: &Environment, path: &Path, create: bool) -> Result<Arc<dyn Dir>> {
    Ok(if create { environment.disk.create_dir_all(path)? } else { environment.disk.open_dir(path)? })
}
