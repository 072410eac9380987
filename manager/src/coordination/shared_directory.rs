//! Ranks that share nothing but a file system: each message is a small file, which begins with its length and checksum. One that is not whole is not there yet.
//!
//! A directory may hold what an earlier run of the same job id has left. So nothing is said before all ranks have met:
//!
//! ```text
//! each rank   hello-<rank>: a number that it has drawn
//! leader      meeting: an id that it has drawn, and everybody's numbers          (anew, where a number changes: it was an earlier run's)
//! each rank   seen-<id>-<rank>, where its own number is in it
//! leader      met-<id>, once all have seen it
//! ```
//!
//! What an earlier run has left names other ids. All later messages carry this one in their names.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use stepwell_core::deadline::deadline_after;
use stepwell_core::format::checksum::crc32c;
use stepwell_core::io::Dir;

use super::{Coordinator, LEADER, Message};
use crate::environment::Rng;
use crate::error::{Error, Result};
use crate::retire::delete_tree;

/// A message is at most so long: the index of a rank's part of a large state.
const MAX_MESSAGE_BYTES: u64 = 1 << 30;
/// Length and CRC-32C of a message, before it.
const HEAD_BYTES: usize = 12;
/// Between two looks for a file: a message that is on its way arrives within the first few, and nobody waits for one that takes long.
const FIRST_PAUSE: Duration = Duration::from_micros(500);
const LAST_PAUSE: Duration = Duration::from_millis(20);

/// Which of how many processes, of which job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    /// This process.
    pub rank: u32,
    /// All processes.
    pub world_size: u32,
    /// What tells this job from others in the same directory: letters, digits, `_`, `-` and `.`.
    pub job_id: String,
}

impl Membership {
    /// Refuses what cannot be.
    pub fn check(&self) -> Result<()> {
        let Self { rank, world_size, job_id } = self;
        if rank >= world_size {
            return Err(Error::Invalid(format!("rank {rank} of {world_size} ranks: ranks count from 0")));
        }
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
        if job_id.is_empty() || job_id.len() > 128 || !job_id.bytes().all(plain) {
            return Err(Error::Invalid(format!(
                "the job id {job_id:?} must be 1 to 128 letters, digits, `_`, `-` or `.`"
            )));
        }
        Ok(())
    }
}

/// One rank of a job.
pub struct SharedDirectory {
    parent: Arc<dyn Dir>,
    name: String,
    dir: Arc<dyn Dir>,
    membership: Membership,
    meeting: String,
    namespaces: AtomicU64,
}

#[derive(Serialize, Deserialize)]
struct Meeting {
    id: String,
    numbers: Vec<String>,
}

impl SharedDirectory {
    /// Meets the other ranks of the job below `parent`; all of them must call this, and the deadline is for them to come.
    pub fn meet(
        parent: &Arc<dyn Dir>,
        membership: Membership,
        rng: &dyn Rng,
        patience: Duration,
    ) -> Result<Self> {
        membership.check()?;
        let name = format!("ranks-{}", membership.job_id);
        let dir = match parent.create_dir(&name) {
            Err(error) if error.already_exists() => parent.open_dir(&name)?,
            made => made?,
        };
        let mut board = Self {
            parent: Arc::clone(parent),
            name,
            dir,
            membership,
            meeting: String::new(),
            namespaces: AtomicU64::new(0),
        };
        let number = hex(rng);
        let deadline = deadline_after(patience);
        board.write(&format!("hello-{}", board.membership.rank), number.as_bytes())?;
        board.meeting = if board.membership.rank == LEADER {
            board.convene(rng, deadline, patience)?
        } else {
            board.attend(&number, deadline, patience)?
        };
        Ok(board)
    }

    fn convene(&self, rng: &dyn Rng, deadline: Instant, patience: Duration) -> Result<String> {
        let size = self.membership.world_size;
        let mut known: Vec<Option<String>> = vec![None; size as usize];
        let mut id = None;
        loop {
            let mut changed = false;
            for (rank, known) in (0..size).zip(&mut known) {
                let found = self.read(&format!("hello-{rank}"))?.map(|bytes| text(&bytes));
                if found.is_some() && found != *known {
                    *known = found;
                    changed = true;
                }
            }
            if changed && known.iter().all(Option::is_some) {
                let new = hex(rng);
                let numbers = known.iter().flatten().cloned().collect();
                let meeting = serde_json::to_vec(&Meeting { id: new.clone(), numbers });
                self.write("meeting", &meeting.map_err(|error| Error::Invalid(error.to_string()))?)?;
                id = Some(new);
            }
            let missing: Vec<u32> = match &id {
                None => {
                    (0..size).filter(|&rank| known.get(rank as usize).is_none_or(Option::is_none)).collect()
                }
                Some(id) => {
                    let mut missing = Vec::new();
                    for rank in 1..size {
                        if self.read(&format!("seen-{id}-{rank}"))?.is_none() {
                            missing.push(rank);
                        }
                    }
                    missing
                }
            };
            if let (Some(id), true) = (&id, missing.is_empty()) {
                self.write(&format!("met-{id}"), b"")?;
                self.forget_earlier(id)?;
                return Ok(id.clone());
            }
            self.wait(deadline, patience, || missing.clone())?;
        }
    }

    fn attend(&self, number: &str, deadline: Instant, patience: Duration) -> Result<String> {
        let mut seen = String::new();
        loop {
            let meeting =
                self.read("meeting")?.and_then(|bytes| serde_json::from_slice::<Meeting>(&bytes).ok());
            if let Some(Meeting { id, numbers }) = meeting
                && numbers.len() == self.membership.world_size as usize
                && numbers.get(self.membership.rank as usize).is_some_and(|mine| mine == number)
            {
                if id != seen {
                    self.write(&format!("seen-{id}-{}", self.membership.rank), b"")?;
                    seen = id;
                }
                if self.read(&format!("met-{seen}"))?.is_some() {
                    return Ok(seen);
                }
            }
            self.wait(deadline, patience, || vec![LEADER])?;
        }
    }

    fn wait(&self, deadline: Instant, patience: Duration, missing: impl Fn() -> Vec<u32>) -> Result<()> {
        if Instant::now() >= deadline {
            return Err(Error::CoordinationTimeout {
                missing: missing(),
                waited_for: format!("to come to {}", self.dir.path().display()),
                seconds: patience.as_secs_f64(),
            });
        }
        std::thread::sleep(LAST_PAUSE / 4);
        Ok(())
    }

    /// What earlier runs of this job have left.
    fn forget_earlier(&self, id: &str) -> Result<()> {
        for entry in self.dir.entries()? {
            let is_new =
                entry.name.contains(id) || entry.name.starts_with("hello-") || entry.name == "meeting";
            if !is_new {
                self.delete(&entry.name)?;
            }
        }
        Ok(())
    }

    fn write(&self, name: &str, message: &[u8]) -> Result<()> {
        let mut bytes = Vec::with_capacity(HEAD_BYTES + message.len());
        bytes.extend_from_slice(&(message.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&crc32c(message).to_le_bytes());
        bytes.extend_from_slice(message);
        // A message of an earlier run, or an older sign of life.
        self.delete(name)?;
        self.dir.write_file(name, &bytes)?;
        Ok(())
    }

    fn read(&self, name: &str) -> Result<Option<Message>> {
        match self.dir.read_file(name, MAX_MESSAGE_BYTES) {
            Ok(bytes) => Ok(whole(&bytes)),
            Err(error) if error.is_not_found() || error.is_gone() => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn delete(&self, name: &str) -> Result<()> {
        match self.dir.remove_file(name) {
            Err(error) if !error.is_not_found() => Err(error.into()),
            _ => Ok(()),
        }
    }

    fn file(&self, key: &str) -> String {
        format!("{}-{}", self.meeting, key.replace('/', "-"))
    }
}

impl Drop for SharedDirectory {
    fn drop(&mut self) {
        // The leader's manager is closed when all others are.
        if self.membership.rank == LEADER
            && let Err(error) = delete_tree(&*self.parent, &self.name)
        {
            tracing::debug!(%error, "the ranks' messages stay for now");
        }
    }
}

impl Coordinator for SharedDirectory {
    fn rank(&self) -> u32 {
        self.membership.rank
    }

    fn world_size(&self) -> u32 {
        self.membership.world_size
    }

    fn namespace(&self) -> String {
        self.namespaces.fetch_add(1, Ordering::Relaxed).to_string()
    }

    fn put(&self, key: &str, message: &[u8]) -> Result<()> {
        self.write(&self.file(key), message)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Message>> {
        let (name, deadline) = (self.file(key), deadline_after(timeout));
        let mut pause = FIRST_PAUSE;
        loop {
            if let Some(message) = self.read(&name)? {
                return Ok(Some(message));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            std::thread::sleep(pause.min(left));
            pause = (pause * 3 / 2).min(LAST_PAUSE);
        }
    }

    fn remove(&self, key: &str) -> Result<()> {
        self.delete(&self.file(key))
    }
}

/// The message of a file, if all of it is there.
fn whole(bytes: &[u8]) -> Option<Message> {
    let (length, rest) = bytes.split_first_chunk::<8>()?;
    let (crc, message) = rest.split_first_chunk::<4>()?;
    let is_whole =
        message.len() as u64 == u64::from_le_bytes(*length) && crc32c(message) == u32::from_le_bytes(*crc);
    is_whole.then(|| message.to_vec())
}

fn hex(rng: &dyn Rng) -> String {
    format!("{:032x}", rng.next_u128())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
