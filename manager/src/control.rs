//! A root's own directory: `root.json`, the writer's lock and the epoch.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use stepwell_core::format::manifest::Others;
use stepwell_core::io::{Dir, Lock, LockKind};
use stepwell_core::limits::MAX_METADATA_BYTES;

use crate::commit::aside::replace_file;
use crate::directory_layout::{CONTROL, EPOCH, LOCK, MANIFEST, METRICS, ROOT_JSON, control};
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::step_name::StepName;

const FORMAT_VERSION: u32 = 1;
/// `root.json` holds the user's metadata and little else.
const MAX_ROOT_JSON_BYTES: u64 = MAX_METADATA_BYTES + (64 << 10);
const MAX_EPOCH_BYTES: u64 = 64 << 10;
/// How often the lock is tried, and the pause in between: another manager of the same process may
/// be just closing.
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
    /// How steps are named.
    pub step_name: StepName,
    /// The user's metadata of the root; the first writer's stays.
    #[serde(default)]
    pub metadata: serde_json::Value,
    /// Keys that this version does not know; what a later one has noted survives a writer of this
    /// one.
    #[serde(flatten)]
    others: Others,
}

/// The content of the epoch file: the current writer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Epoch {
    /// Counts the writers of this root.
    pub epoch: u64,
    /// The writer's session.
    pub session: String,
    /// The writer, for messages.
    pub owner: String,
}

/// The content of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathKind {
    /// No directory.
    Absent,
    /// A directory with a manifest: a checkpoint, whole or not.
    Checkpoint,
    /// A directory that says that it is a root.
    Root,
    /// Some other directory; it may be the copy of a root that has lost what says so.
    Directory,
}

/// Inspects a path. A disk error is an error, not absence: a caller that takes it for absence would
/// start a new run over an existing one.
pub fn path_kind(environment: &Environment, path: &Path) -> Result<PathKind> {
    let directory = match environment.disk.open_dir(path) {
        Ok(directory) => directory,
        Err(error) if error.is_not_found() || error.is_no_directory() => return Ok(PathKind::Absent),
        Err(error) => return Err(error.into()),
    };
    if directory.stat(MANIFEST)?.is_some() {
        return Ok(PathKind::Checkpoint);
    }
    Ok(if directory.stat(CONTROL)?.is_some() { PathKind::Root } else { PathKind::Directory })
}

/// Reads `root.json`. `None` if it does not exist (a root copied step by step, or a foreign
/// directory).
pub fn read_info(root: &dyn Dir) -> Result<Option<RootInfo>> {
    let name = control(ROOT_JSON);
    let bytes = match root.read_file(&name, MAX_ROOT_JSON_BYTES) {
        Ok(bytes) => bytes,
        Err(error) if error.is_not_found() => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let file = root.path().join(name);
    let info: RootInfo = serde_json::from_slice(&bytes)
        .map_err(|error| {
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

/// Makes what is missing of the root's own directory, under the lock. The first writer's metadata
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
        write_json(root, ROOT_JSON, &info)?;
    }
    Ok(info)
}

/// Makes the directory itself, durably.
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

/// Takes the writer's lock. `None`: this file system has none, and the caller may take the root
/// over once the last writer has been silent ([`crate::writer_heartbeat`]).
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
            Err(error) if error.is_without_locks() && take_over => return Ok(None),
            Err(error) if error.is_without_locks() => {
                let root = root.path().to_owned();
                return Err(Error::NoLocks { root, answer: error.to_string() });
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// The current writer, from the epoch file.
pub fn read_epoch(root: &dyn Dir) -> stepwell_core::Result<Option<Epoch>> {
    match root.read_file(&control(EPOCH), MAX_EPOCH_BYTES) {
        // A torn epoch cannot be: it is replaced whole. One that people have edited counts as none.
        Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}

/// The other writer that has taken the root over from this session, if any. Checked before every
/// rename: without locks, this fence keeps an older writer out.
pub fn other_writer(root: &dyn Dir, session: &str) -> stepwell_core::Result<Option<String>> {
    Ok(read_epoch(root)?.filter(|epoch| epoch.session != session).map(|epoch| epoch.owner))
}

/// Becomes the current writer: older ones see it before their next rename.
pub fn take_epoch(root: &dyn Dir, session: &str) -> Result<Epoch> {
    let last = read_epoch(root)?.map_or(0, |epoch| epoch.epoch);
    let epoch = Epoch { epoch: last.saturating_add(1), session: session.to_owned(), owner: owner() };
    write_json(root, EPOCH, &epoch)?;
    Ok(epoch)
}

/// This process, for people.
pub(crate) fn owner() -> String {
    format!("process {} on {}", std::process::id(), stepwell_core::sys::host_name())
}

fn write_json(root: &dyn Dir, name: &str, value: &impl Serialize) -> Result<()> {
    let mut bytes = serde_json::to_vec_pretty(value).map_err(|error| crate::error::unencodable(&error))?;
    bytes.push(b'\n');
    let control = root.open_dir(CONTROL)?;
    replace_file(&*control, name, &format!(".{name}.new"), &bytes)?;
    Ok(())
}

/// Opens a root: made durably where it is missing and `create` says so.
pub fn open(environment: &Environment, path: &Path, create: bool) -> Result<Arc<dyn Dir>> {
    Ok(if create { environment.disk.create_dir_all(path)? } else { environment.disk.open_dir(path)? })
}
