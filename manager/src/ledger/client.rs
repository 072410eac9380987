//! Reads and appends entries of a ledger in a store.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use stepwell_core::limits::MAX_LEDGER_ENTRY_BYTES;
use stepwell_core::remote::{CreateOutcome, Listed, Store};
use stepwell_core::{Error, Result};

use super::append::{Append, AppendVerdict, Next, PutOutcome, Request, StoreAnswer};
use super::entry::{Change, Entry};
use crate::control::owner;
use crate::directory_layout::control;
use crate::environment::Rng;

/// The newest entries that are never deleted.
const KEPT_ENTRIES: usize = 128;
/// So many entries above those are deleted together.
const TRIMMED_ENTRIES: usize = 64;

/// The tries to read the highest entry while others add more and delete it.
const READ_TRIES: usize = 64;

/// How long a change waits for a store that does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LedgerPatience {
    /// Requests are repeated for so long.
    pub full: Duration,
    /// Then the outcome is looked for, for so long.
    pub ending: Duration,
    /// The longest pause between two tries.
    pub pause: Duration,
}

impl Default for LedgerPatience {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { full: seconds(120), ending: seconds(60), pause: seconds(1) }
    }
}

/// The ledger of one root.
pub(super) struct Ledger {
    store: Arc<dyn Store>,
    /// The prefix of its entries.
    prefix: String,
    patience: LedgerPatience,
    rng: Arc<dyn Rng>,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    highest: Option<Arc<Entry>>,
    /// True if the highest entry was read, although there may be none.
    is_read: bool,
    /// A change whose outcome is unknown may still land as this number.
    unsettled: Option<u64>,
}

impl Ledger {
    /// The ledger of the root at a prefix, which is empty or ends with `/`.
    pub(super) fn new(
        store: &Arc<dyn Store>,
        root: &str,
        patience: LedgerPatience,
        rng: &Arc<dyn Rng>,
    ) -> Self {
        let prefix = format!("{root}{}/", control("ledger"));
        let known = Mutex::default();
        Self { store: Arc::clone(store), prefix, patience, rng: Arc::clone(rng), known }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn key(&self, number: u64) -> String {
        format!("{}{number:020}.json", self.prefix)
    }

    fn path(&self) -> PathBuf {
        self.store.url().join(&self.prefix)
    }

    /// The numbers of all entries, in their order.
    fn numbers(&self) -> Result<Vec<u64>> {
        let number = |listed| match listed {
            Listed::Object(key, _) => {
                let name: String = key.strip_prefix(&self.prefix)?.strip_suffix(".json")?.to_owned();
                (name.len() == 20).then(|| name.parse().ok()).flatten()
            }
            Listed::Prefix(_) => None,
        };
        let mut numbers: Vec<u64> = self.store.list(&self.prefix)?.into_iter().filter_map(number).collect();
        numbers.sort_unstable();
        Ok(numbers)
    }

    fn entry(&self, number: u64) -> Result<Option<Arc<Entry>>> {
        if let Some(known) = self.known().highest.clone().filter(|known| known.number == number) {
            return Ok(Some(known));
        }
        let key = self.key(number);
        match self.store.get(&key, MAX_LEDGER_ENTRY_BYTES) {
            Ok(bytes) => match Entry::of_bytes(number, &bytes) {
                Ok(entry) => Ok(Some(Arc::new(entry))),
                Err(what) => Err(Error::Format { file: self.store.url().join(key), what }),
            },
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// True if there are entries.
    pub(super) fn has_entries(&self) -> Result<bool> {
        Ok(!self.numbers()?.is_empty())
    }

    /// Reads the highest entry. Fails while the outcome of a change is unknown.
    pub(super) fn highest(&self) -> Result<Option<Arc<Entry>>> {
        for _ in 0..READ_TRIES {
            let number = self.numbers()?.pop();
            let entry = match number {
                Some(number) => match self.entry(number)? {
                    None => continue, // It was trimmed, because there are many above it.
                    entry => entry,
                },
                None => None,
            };
            let mut known = self.known();
            if let Some(unsettled) = known.unsettled {
                if number.is_none_or(|number| number < unsettled) {
                    return Err(self.uncertain(unsettled));
                }
                known.unsettled = None;
            }
            let number = |entry: &Option<Arc<Entry>>| entry.as_ref().map(|entry| entry.number);
            if number(&known.highest) > number(&entry) {
                // Another thread has added one since the listing.
                return Ok(known.highest.clone());
            }
            known.highest.clone_from(&entry);
            known.is_read = true;
            return Ok(entry);
        }
        let what = format!("the store lists entries that it does not have, {READ_TRIES} times in a row");
        Err(Error::io("read", self.path(), std::io::Error::other(what)))
    }

    /// Finds out the outcome of a change, if one is unknown. Fails while it stays unknown.
    pub(super) fn settle(&self) -> Result<()> {
        let is_settled = self.known().unsettled.is_none();
        if is_settled { Ok(()) } else { self.highest().map(drop) }
    }

    /// Returns the entry that was read or added last. Reads the highest one if none was, or
    /// while the outcome of a change is unknown.
    pub(super) fn last_read(&self) -> Result<Option<Arc<Entry>>> {
        let known = self.known();
        if known.is_read && known.unsettled.is_none() {
            return Ok(known.highest.clone());
        }
        drop(known);
        self.highest()
    }

    /// Fails if the store creates an object that exists: two writers would overwrite the entries of
    /// each other. A new root asks once. A lost answer proves nothing, so it is asked again.
    pub(super) fn check_conditions(&self) -> Result<()> {
        let begun = Instant::now();
        let mut pause = self.patience.pause / 64;
        loop {
            let key = format!("{}.probe-{:032x}", self.prefix, self.rng.next_u128());
            let found = self.refuses_second(&key);
            // It may also land later. No reader looks at its name.
            if let Err(error) = self.store.delete(std::slice::from_ref(&key)) {
                tracing::debug!(key, %error, "deleting an object that tried the store failed");
            }
            let what = match found? {
                Some(true) => return Ok(()),
                Some(false) => {
                    let what = "this store creates an object that exists, so it must not have a root. Use another store";
                    std::io::Error::new(std::io::ErrorKind::Unsupported, what)
                }
                None if begun.elapsed() < self.patience.full => {
                    std::thread::sleep(self.jittered(pause));
                    pause = (pause * 2).min(self.patience.pause);
                    continue;
                }
                None => {
                    let what = "the store did not answer, so it is unknown whether it refuses to create an object that exists. Try again later";
                    std::io::Error::new(std::io::ErrorKind::TimedOut, what)
                }
            };
            return Err(Error::io("create", self.path(), what));
        }
    }

    /// Creates an object twice: true if the store has refused the second one. `None` if the answers
    /// do not say so.
    fn refuses_second(&self, key: &str) -> Result<Option<bool>> {
        const FIRST: &[u8] = b"first";
        const SECOND: &[u8] = b"second";
        let stored = || match self.store.get(key, 64) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        };
        // Whatever the answer was, the object must be there before the second create.
        if self.store.create(key, FIRST)? != CreateOutcome::Stored && stored()?.as_deref() != Some(FIRST) {
            return Ok(None);
        }
        let second = self.store.create(key, SECOND)?;
        let bytes = stored()?;
        Ok(match second {
            CreateOutcome::Stored => Some(false),
            _ if bytes.as_deref() == Some(SECOND) => Some(false),
            CreateOutcome::Exists if bytes.as_deref() == Some(FIRST) => Some(true),
            // The second one may never have arrived.
            _ => None,
        })
    }

    fn uncertain(&self, number: u64) -> Error {
        let error = format!(
            "the store did not answer, so it is unknown whether entry {number} of the ledger has the change. The next writer finds out"
        );
        Error::io("commit", self.path(), std::io::Error::new(std::io::ErrorKind::TimedOut, error))
    }

    /// Makes a change.
    pub(super) fn append(&self, session: &str, change: Change) -> Result<()> {
        // With any outcome, the entry that was read before is old.
        let known = std::mem::take(&mut self.known().is_read);
        let (verdict, seen) = self.drive(session, change, known)?;
        let refuse = |kind, what: &str| {
            Err(Error::io("commit", self.path(), std::io::Error::new(kind, what.to_owned())))
        };
        match verdict {
            AppendVerdict::Done(number) => {
                if let Some(entry) = seen.filter(|entry| entry.number == number) {
                    let mut known = self.known();
                    known.highest = Some(entry);
                    known.is_read = true;
                }
                self.trim(number);
                Ok(())
            }
            AppendVerdict::Never => refuse(
                std::io::ErrorKind::TimedOut,
                "the store did not answer in time. The change is not there, and never will be",
            ),
            AppendVerdict::TooLate => {
                refuse(std::io::ErrorKind::NotFound, "this save was given up, or is committed")
            }
            AppendVerdict::Fenced => {
                refuse(std::io::ErrorKind::PermissionDenied, "the root belongs to another writer now")
            }
            AppendVerdict::Deleted => {
                refuse(std::io::ErrorKind::NotFound, "the ledger is empty: somebody has deleted the root")
            }
            AppendVerdict::Uncertain(number) => {
                let number = number.unwrap_or_default();
                self.known().unsettled = Some(number);
                Err(self.uncertain(number))
            }
        }
    }

    /// Runs the append machine to its end. Also returns the highest entry that it has read or
    /// stored. A store that refuses the first entry, for the want of rights or of a bucket, ends it
    /// with that error: nothing was sent.
    ///
    /// `is_known`: the entry that was read last is taken for the highest one at first. If it is
    /// not, the store refuses the next number, or a higher one is found afterwards.
    fn drive(
        &self,
        session: &str,
        change: Change,
        is_known: bool,
    ) -> Result<(AppendVerdict, Option<Arc<Entry>>)> {
        let nonce = format!("{:032x}", self.rng.next_u128());
        let (mut append, mut request) = Append::new(session, &owner(), change, nonce);
        let begun = Instant::now();
        let (mut hurried, mut pause, mut is_sent) = (0, self.patience.pause / 64, false);
        let mut seen: Option<Arc<Entry>> = None;
        let known = self.known().highest.clone();
        if is_known
            && let Next::Ask(next) = append.answered(StoreAnswer::Highest(known.map(|one| one.number)))
        {
            request = next;
        }
        loop {
            let answer = match self.answer(&request) {
                Err(error) if matches!(request, Request::Create(_)) && !is_sent => return Err(error),
                Err(error) => {
                    tracing::debug!(ledger = %self.path().display(), %error, "a request to the ledger failed");
                    match request {
                        Request::Create(_) => StoreAnswer::Put(PutOutcome::Unknown),
                        _ => StoreAnswer::Failed,
                    }
                }
                Ok(answer) => answer,
            };
            is_sent |= matches!(request, Request::Create(_));
            let found = match (&request, &answer) {
                (_, StoreAnswer::Entry(Some(entry)))
                | (Request::Create(entry), StoreAnswer::Put(PutOutcome::Stored)) => Some(entry),
                _ => None,
            };
            if let Some(found) = found
                && seen.as_ref().is_none_or(|seen| seen.number <= found.number)
            {
                seen = Some(Arc::clone(found));
            }
            let is_certain = !matches!(answer, StoreAnswer::Failed | StoreAnswer::Put(PutOutcome::Unknown));
            let limits = [self.patience.full, self.patience.full + self.patience.ending];
            while limits.get(hurried).is_some_and(|&limit| begun.elapsed() >= limit) {
                append.hurry();
                hurried += 1;
            }
            match append.answered(answer) {
                Next::End(verdict) => return Ok((verdict, seen)),
                Next::Ask(next) => request = next,
            }
            if !is_certain {
                std::thread::sleep(self.jittered(pause));
                pause = (pause * 2).min(self.patience.pause);
            }
        }
    }

    /// Between a half and all of a pause.
    fn jittered(&self, pause: Duration) -> Duration {
        pause / 2 + pause / 2 * ((self.rng.next_u128() % 1000) as u32) / 1000
    }

    fn answer(&self, request: &Request) -> Result<StoreAnswer> {
        Ok(match request {
            Request::Highest => StoreAnswer::Highest(self.numbers()?.pop()),
            Request::Get(number) => StoreAnswer::Entry(self.entry(*number)?),
            Request::Create(entry) => {
                let bytes = entry.to_bytes().map_err(Error::Misuse)?;
                StoreAnswer::Put(match self.store.create(&self.key(entry.number), &bytes)? {
                    CreateOutcome::Stored => PutOutcome::Stored,
                    CreateOutcome::Exists => PutOutcome::Exists,
                    CreateOutcome::Unknown => PutOutcome::Unknown,
                })
            }
        })
    }

    /// Deletes entries far below the highest one. A failure is no error: the next change tries
    /// again.
    fn trim(&self, highest: u64) {
        if !highest.is_multiple_of(TRIMMED_ENTRIES as u64) {
            return;
        }
        let Ok(mut numbers) = self.numbers() else { return };
        numbers.truncate(numbers.len().saturating_sub(KEPT_ENTRIES));
        let keys: Vec<String> = numbers.into_iter().map(|number| self.key(number)).collect();
        if keys.is_empty() {
            return;
        }
        if let Err(error) = self.store.delete(&keys) {
            tracing::debug!(%error, "deleting old entries of the ledger failed");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use stepwell_core::remote::simulated::{Fate, SimStore};

    use super::super::entry::Named;
    use super::*;
    use crate::environment::SystemRng;

    #[test]
    fn a_change_stays_unsettled_until_its_outcome_is_known() {
        let store = SimStore::new("s3://bucket");
        let milliseconds = Duration::from_millis;
        let patience =
            LedgerPatience { full: milliseconds(5), ending: milliseconds(5), pause: milliseconds(1) };
        let rng: Arc<dyn Rng> = Arc::new(SystemRng);
        let ledger = Ledger::new(&(Arc::clone(&store) as _), "run/", patience, &rng);
        ledger.append("a", Change::TakeOver { from: String::new() }).unwrap();
        ledger.settle().unwrap();

        let is_silent = AtomicBool::new(false);
        store.script(move |request| {
            is_silent.fetch_or(request.call == "create", Ordering::SeqCst);
            if is_silent.load(Ordering::SeqCst) { Fate::Late } else { Fate::Served }
        });
        let named = Named { attempt: "1".into(), manifest: "m".into(), manifest_bytes: 0, manifest_crc: 0 };
        let add = [("step_1".to_owned(), named)].into();
        ledger.append("a", Change::Names { remove: [].into(), add }).unwrap_err();

        store.script(|_| Fate::Served);
        let error = ledger.settle().unwrap_err();
        assert!(error.to_string().contains("it is unknown whether entry 1"), "{error}");
        store.land_late();
        ledger.settle().unwrap();
        assert!(ledger.highest().unwrap().unwrap().names.contains_key("step_1"));
    }

    #[test]
    fn a_lost_answer_says_nothing_about_conditions() {
        let milliseconds = Duration::from_millis;
        let patience =
            LedgerPatience { full: milliseconds(500), ending: milliseconds(5), pause: milliseconds(1) };
        let rng: Arc<dyn Rng> = Arc::new(SystemRng);
        // The fates of the first creates; of all others; whether the store is fit.
        let lost = [Fate::AnswerLost, Fate::Dropped, Fate::Late, Fate::SaidToExist];
        let alone = lost.iter().flat_map(|&fate| [vec![fate], vec![Fate::Served, fate], vec![fate, fate]]);
        let fit = alone.map(|fates| (fates, Fate::Served, Ok(())));
        let unfit = [vec![], vec![Fate::AnswerLost], vec![Fate::Served, Fate::Dropped]]
            .map(|fates| (fates, Fate::Overwritten, Err("must not have a root")));
        let silent = [Fate::Dropped, Fate::Late].map(|fate| (vec![], fate, Err("did not answer")));
        for (fates, others, expected) in fit.chain(unfit).chain(silent) {
            let store = SimStore::new("s3://bucket");
            let ledger = Ledger::new(&(Arc::clone(&store) as _), "run/", patience, &rng);
            let mut next = fates.clone().into_iter();
            store.script(move |request| match request.call {
                "create" => next.next().unwrap_or(others),
                _ => Fate::Served,
            });
            let found = ledger.check_conditions().map_err(|error| error.to_string());
            match expected {
                Ok(()) => assert_eq!(found, Ok(()), "{fates:?}, {others:?}"),
                Err(text) => assert!(found.unwrap_err().contains(text), "{fates:?}, {others:?}"),
            }
            assert_eq!(store.keys(), [""; 0], "{fates:?}, {others:?}");
        }
    }
}
