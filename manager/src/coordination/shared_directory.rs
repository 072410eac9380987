//! A board for ranks that share only a file system. Each message is a small file that begins with
//! its length and checksum. An incomplete message does not exist yet.
//!
//! The directory of a job may hold messages of earlier runs, and of other managers of these
//! processes. So the ranks meet before they send any other message:
//!
//! ```text
//! each rank   hello-<rank>: a random number, and the meetings that its process still holds
//! leader      meeting: a random id, and the numbers of all ranks (again if a number changes: an earlier run wrote it)
//! each rank   seen-<id>-<rank>, if the meeting has its own number
//! leader      <id>/, once all ranks have seen the meeting
//! ```
//!
//! Leftovers of an earlier run name other ids. All later messages are in `<id>/`, which belongs to
//! this meeting alone. Each rank removes its messages of the meeting.
//!
//! A rank that ends writes `<id>/left-<rank>`, and the last one removes the directory. So a late
//! reader still finds the leader's last message, for example why it could not open. A killed rank
//! leaves no such file. The leader of the next meeting then deletes all of the job's leftovers that
//! no live rank holds.

use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use stepwell_core::deadline::deadline_after;
use stepwell_core::format::checksum::crc32c;
use stepwell_core::io::{Dir, EntryKind};

use super::{Coordinator, LEADER, Message};
use crate::delete_tree::{delete_tree, ignore_missing};
use crate::environment::Rng;
use crate::error::{Error, Result};

/// The largest message: a vote with the indexes of a large state.
const MAX_MESSAGE_BYTES: u64 = 1 << 30;
/// The length and CRC-32C that precede a message.
const HEAD_BYTES: usize = 12;
/// The poll interval grows from the first value to the second: most messages come soon, and a slow
/// one is polled rarely.
const MIN_POLL_INTERVAL: Duration = Duration::from_micros(500);
const MAX_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Retries of a creation that races with another rank: of the job's directory, which ranks remove
/// when it is empty, and of a message.
const TRIES: usize = 32;

/// The meetings that this process holds, once for each rank that is a thread of it.
static HELD: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// A rank's place in a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    /// The rank of this process.
    pub rank: u32,
    /// The number of ranks.
    pub world_size: u32,
    /// The job's id in the directory: letters, digits, `_`, `-` and `.`.
    pub job_id: String,
}

impl Membership {
    /// Refuses an impossible rank or job id.
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

    /// The directory of the job.
    fn directory(&self) -> String {
        format!("ranks-{}", self.job_id)
    }
}

/// The coordinator of one rank of a job.
pub struct SharedDirectory {
    parent: Arc<dyn Dir>,
    job: Arc<dyn Dir>,
    membership: Membership,
    meeting: String,
    /// The meeting's own directory.
    messages: Arc<dyn Dir>,
    namespaces: AtomicU64,
}

#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Arrival {
    number: String,
    holds: Vec<String>,
}

#[derive(Serialize, Deserialize)]
struct Meeting {
    id: String,
    numbers: Vec<String>,
}

impl SharedDirectory {
    /// Meets the other ranks of the job below `parent`. All of them must call this within the
    /// timeout.
    pub fn meet(
        parent: &Arc<dyn Dir>,
        membership: Membership,
        rng: &dyn Rng,
        timeout: Duration,
    ) -> Result<Self> {
        membership.check()?;
        let arrival = Arrival { number: hex(rng), holds: held().clone() };
        let joining = Joining::new(&**parent, &membership, &arrival, timeout)?;
        let (meeting, messages) = if membership.rank == LEADER {
            joining.convene(rng)?
        } else {
            joining.attend(&arrival.number)?
        };
        let job = Arc::clone(&joining.job);
        drop(joining);
        held().push(meeting.clone());
        let (parent, namespaces) = (Arc::clone(parent), AtomicU64::new(0));
        Ok(Self { parent, job, membership, meeting, messages, namespaces })
    }

    /// Leaves the meeting. The last rank removes its directory.
    fn leave(&self) -> Result<()> {
        let Membership { rank, world_size, .. } = self.membership;
        write(&*self.messages, &left(rank), b"")?;
        // Only ranks that leave after the leader count the others.
        if rank != LEADER && read(&*self.messages, &left(LEADER))?.is_none() {
            return Ok(());
        }
        let gone = self.messages.unsorted_entries()?;
        let gone = gone.iter().filter(|entry| entry.name.starts_with(LEFT)).count();
        if gone == world_size as usize {
            delete_tree(&*self.job, &self.meeting)?;
            remove_if_empty(&*self.parent, &self.membership);
        }
        Ok(())
    }
}

impl Drop for SharedDirectory {
    fn drop(&mut self) {
        let mut held = held();
        if let Some(at) = held.iter().position(|id| *id == self.meeting) {
            held.swap_remove(at);
        }
        drop(held);
        if let Err(error) = self.leave() {
            tracing::debug!(%error, "removing the ranks' messages failed");
        }
    }
}

/// A rank on its way to a meeting. Its messages are removed when it is dropped.
struct Joining<'a> {
    parent: &'a dyn Dir,
    membership: &'a Membership,
    job: Arc<dyn Dir>,
    deadline: Instant,
    timeout: Duration,
    /// Names of the files that this rank has written.
    written: RefCell<Vec<String>>,
}

impl<'a> Joining<'a> {
    fn new(
        parent: &'a dyn Dir,
        membership: &'a Membership,
        arrival: &Arrival,
        timeout: Duration,
    ) -> Result<Self> {
        let mut tries = 0;
        loop {
            let joining = open(parent, &membership.directory()).and_then(|job| {
                let (deadline, written) = (deadline_after(timeout), RefCell::default());
                let joining = Self { parent, membership, job, deadline, timeout, written };
                joining.publish(&format!("hello-{}", membership.rank), arrival)?;
                Ok(joining)
            });
            match joining {
                // Once the directory holds a message, it stays.
                Err(Error::Core(error)) if error.is_gone() && tries < TRIES => tries += 1,
                joining => return joining,
            }
        }
    }

    fn convene(&self, rng: &dyn Rng) -> Result<(String, Arc<dyn Dir>)> {
        let size = self.membership.world_size;
        let mut known: Vec<Option<Arrival>> = vec![None; size as usize];
        let mut id = None;
        loop {
            let mut changed = false;
            for (rank, known) in (0..size).zip(&mut known) {
                let found = self.read_message(&format!("hello-{rank}"))?;
                if found.is_some() && found != *known {
                    *known = found;
                    changed = true;
                }
            }
            if changed && known.iter().all(Option::is_some) {
                let new = hex(rng);
                let numbers = known.iter().flatten().map(|arrival| arrival.number.clone()).collect();
                self.publish("meeting", &Meeting { id: new.clone(), numbers })?;
                id = Some(new);
            }
            let missing: Vec<u32> = match &id {
                None => {
                    (0..size).filter(|&rank| known.get(rank as usize).is_none_or(Option::is_none)).collect()
                }
                Some(id) => {
                    let mut missing = Vec::new();
                    for rank in 1..size {
                        if read(&*self.job, &seen(id, rank))?.is_none() {
                            missing.push(rank);
                        }
                    }
                    missing
                }
            };
            if let (Some(id), true) = (&id, missing.is_empty()) {
                let messages = self.job.create_dir(id)?;
                let holds = known.iter().flatten().flat_map(|arrival| &arrival.holds);
                self.forget_others(&holds.chain([id]).map(String::as_str).collect())?;
                return Ok((id.clone(), messages));
            }
            self.wait(|| missing.clone())?;
        }
    }

    fn attend(&self, number: &str) -> Result<(String, Arc<dyn Dir>)> {
        let Membership { rank, world_size, .. } = *self.membership;
        let mut last: Option<String> = None;
        loop {
            let meeting: Option<Meeting> = self.read_message("meeting")?;
            // Check this after the read: the message may be the leader's next meeting, begun after
            // this one.
            if let Some(id) = &last {
                match self.job.open_dir(id) {
                    Err(error) if error.is_gone() => {}
                    messages => return Ok((id.clone(), messages?)),
                }
            }
            if let Some(Meeting { id, numbers }) = meeting
                && numbers.len() == world_size as usize
                && numbers.get(rank as usize).is_some_and(|mine| mine == number)
                && last.as_ref() != Some(&id)
            {
                self.publish(&seen(&id, rank), &())?;
                last = Some(id);
            }
            self.wait(|| vec![LEADER])?;
        }
    }

    fn wait(&self, missing: impl Fn() -> Vec<u32>) -> Result<()> {
        if Instant::now() >= self.deadline {
            return Err(Error::CoordinationTimeout {
                missing: missing(),
                waited_for: format!("to come to {}", self.job.path().display()),
                seconds: self.timeout.as_secs_f64(),
            });
        }
        std::thread::sleep(MAX_POLL_INTERVAL / 4);
        Ok(())
    }

    /// Deletes leftovers of earlier runs of this job, but not these meetings.
    fn forget_others(&self, meetings: &HashSet<&str>) -> Result<()> {
        let hellos: HashSet<String> =
            (0..self.membership.world_size).map(|rank| format!("hello-{rank}")).collect();
        for entry in self.job.unsorted_entries()? {
            // Keep the introductions: they may be for the next meeting, and each rank removes its
            // own.
            if meetings.contains(&*entry.name) || hellos.contains(&entry.name) {
                continue;
            }
            let deleted = match entry.kind {
                EntryKind::Dir => delete_tree(&*self.job, &entry.name).map_err(Error::from),
                _ => delete(&*self.job, &entry.name),
            };
            if let Err(error) = deleted {
                tracing::debug!(%error, "removing messages of an earlier run failed");
            }
        }
        Ok(())
    }

    fn publish(&self, name: &str, message: &impl Serialize) -> Result<()> {
        let message = serde_json::to_vec(message).map_err(|error| crate::error::unencodable(&error))?;
        self.written.borrow_mut().push(name.to_owned());
        write(&*self.job, name, &message)
    }

    fn read_message<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        Ok(read(&*self.job, name)?.and_then(|bytes| serde_json::from_slice(&bytes).ok()))
    }
}

impl Drop for Joining<'_> {
    fn drop(&mut self) {
        for name in self.written.take() {
            if let Err(error) = delete(&*self.job, &name) {
                tracing::debug!(%error, "removing this rank's messages of the meeting failed");
            }
        }
        // It is empty if no other rank has come.
        remove_if_empty(self.parent, self.membership);
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
        write(&*self.messages, &file(key), message)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Option<Message>> {
        let (name, deadline) = (file(key), deadline_after(timeout));
        let mut pause = MIN_POLL_INTERVAL;
        loop {
            if let Some(message) = read(&*self.messages, &name)? {
                return Ok(Some(message));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            std::thread::sleep(pause.min(left));
            pause = (pause * 3 / 2).min(MAX_POLL_INTERVAL);
        }
    }

    fn remove(&self, key: &str) -> Result<()> {
        delete(&*self.messages, &file(key))
    }
}

fn held() -> MutexGuard<'static, Vec<String>> {
    HELD.lock().unwrap_or_else(PoisonError::into_inner)
}

const LEFT: &str = "left-";

fn left(rank: u32) -> String {
    format!("{LEFT}{rank}")
}

fn seen(id: &str, rank: u32) -> String {
    format!("seen-{id}-{rank}")
}

/// The file of a message.
fn file(key: &str) -> String {
    key.replace('/', "-")
}

fn open(parent: &dyn Dir, name: &str) -> Result<Arc<dyn Dir>> {
    match parent.create_dir(name) {
        Err(error) if error.already_exists() => Ok(parent.open_dir(name)?),
        made => Ok(made?),
    }
}

/// Removes the job's directory, unless another meeting uses it.
fn remove_if_empty(parent: &dyn Dir, membership: &Membership) {
    let _ = parent.remove_dir(&membership.directory());
}

fn write(dir: &dyn Dir, name: &str, message: &[u8]) -> Result<()> {
    let mut bytes = Vec::with_capacity(HEAD_BYTES + message.len());
    bytes.extend_from_slice(&(message.len() as u64).to_le_bytes());
    bytes.extend_from_slice(&crc32c(message).to_le_bytes());
    bytes.extend_from_slice(message);
    let mut tries = 0;
    loop {
        // There may be a message of an earlier run, or an older heartbeat.
        delete(dir, name)?;
        match dir.write_file(name, &bytes) {
            // Several ranks may announce preemption at once.
            Err(error) if error.already_exists() && tries < TRIES => tries += 1,
            written => return Ok(written?),
        }
    }
}

fn read(dir: &dyn Dir, name: &str) -> Result<Option<Message>> {
    match dir.read_file(name, MAX_MESSAGE_BYTES) {
        Ok(bytes) => Ok(whole(&bytes)),
        Err(error) if error.is_gone() => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn delete(dir: &dyn Dir, name: &str) -> Result<()> {
    Ok(ignore_missing(dir.remove_file(name))?)
}

/// Returns the message in a file, if it is complete.
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
