//! Tries a store: which of the properties that a root needs it has.

use super::store::{CreateOutcome, Store};
use crate::sys::{Buffer, each};
use crate::{Error, Result};

/// The length of a part. Stores refuse shorter ones, except the last.
const PART: usize = 5 << 20;
/// The creates of one key that race.
const RACERS: usize = 16;

/// A property of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeFinding {
    /// Its name: `create_once`, `create_race` or `parts`.
    pub name: &'static str,
    /// `None` if a request failed, so that it is unknown.
    pub holds: Option<bool>,
    /// The observation.
    pub detail: String,
}

/// One try of a store, with a key of its own: the answer and the observation.
type Try = fn(&dyn Store, &str) -> Result<(bool, String)>;

/// Tries a store below a prefix that ends with `/`, and removes all objects there. A race that goes
/// well proves nothing; one that does not shows a store that cannot have roots.
pub fn probe(store: &dyn Store, prefix: &str) -> Result<Vec<ProbeFinding>> {
    let probes: [(&str, Try); 3] =
        [("create_once", create_once), ("create_race", create_race), ("parts", parts)];
    let found = probes.map(|(name, run)| match run(store, &format!("{prefix}{name}")) {
        Ok((holds, detail)) => ProbeFinding { name, holds: Some(holds), detail },
        Err(error) => ProbeFinding { name, holds: None, detail: error.to_string() },
    });
    let keys: Vec<String> = store.list_below(prefix)?.into_iter().map(|(key, _)| key).collect();
    if !keys.is_empty() {
        store.delete(&keys)?;
    }
    Ok(found.to_vec())
}

/// True if a store refuses to create an object that exists.
fn create_once(store: &dyn Store, key: &str) -> Result<(bool, String)> {
    let (first, second) = (store.create(key, b"first")?, store.create(key, b"second")?);
    if first == CreateOutcome::Unknown || second == CreateOutcome::Unknown {
        return Err(no_answer(store, key));
    }
    let holds = second == CreateOutcome::Exists && store.get(key, 16)? == b"first";
    let what = if holds { "refused" } else { "accepted: this store must not have a root" };
    Ok((holds, format!("a second create of one key is {what}")))
}

/// True if one of many creates wins.
fn create_race(store: &dyn Store, key: &str) -> Result<(bool, String)> {
    let racers: Vec<String> = (0..RACERS).map(|number| format!("racer {number}")).collect();
    let outcomes = each("stepwell-probe", RACERS, &racers, |racer| store.create(key, racer.as_bytes()));
    let (mut winners, mut unanswered) = (Vec::new(), 0);
    for (racer, outcome) in racers.iter().zip(outcomes) {
        match outcome? {
            CreateOutcome::Stored => winners.push(racer.as_bytes()),
            CreateOutcome::Exists => {}
            CreateOutcome::Unknown => unanswered += 1,
        }
    }
    if unanswered == RACERS {
        return Err(no_answer(store, key));
    }
    // The answer to the winner may be lost, also to a client that tried again and heard "exists".
    let stored = store.get(key, 64)?;
    let is_one = racers.iter().any(|racer| racer.as_bytes() == stored);
    let holds = is_one && winners.len() <= 1 && winners.iter().all(|winner| *winner == stored);
    let won = if holds { 1 } else { winners.len() };
    Ok((holds, format!("{won} of {RACERS} creates of one key won")))
}

/// True if parts in any order make an object, and a range of it has the right bytes.
fn parts(store: &dyn Store, key: &str) -> Result<(bool, String)> {
    let upload = store.start_upload(key)?;
    let mut tags = Vec::new();
    for number in [2, 1] {
        let mut part = Buffer::alone(PART)?;
        part.fill(number);
        let (_, tag) = store.put_part(key, &upload, number.into(), part, PART);
        tags.push(tag?);
    }
    tags.reverse();
    store.complete_upload(key, &upload, &tags)?;
    let mut range = [0; 8];
    let read = store.read(key, PART as u64 - 4, &mut range)?;
    let holds = (read, range) == (8, [1, 1, 1, 1, 2, 2, 2, 2]);
    let what = if holds { "are" } else { "are not" };
    Ok((holds, format!("two parts of 5 MiB, sent in the wrong order, {what} one object")))
}

fn no_answer(store: &dyn Store, key: &str) -> Error {
    Error::io("create", store.url().join(key), std::io::Error::from_raw_os_error(libc::ETIMEDOUT))
}

#[cfg(test)]
mod tests {
    use super::super::simulated::{Fate, SimStore};
    use super::*;

    fn holding(store: &SimStore) -> Vec<Option<bool>> {
        let found = probe(store, "run/.probe/").unwrap();
        assert_eq!(store.list_below("run/").unwrap(), []);
        found.into_iter().map(|one| one.holds).collect()
    }

    #[test]
    fn a_probe_finds_a_store_that_ignores_conditions() {
        let store = SimStore::new("s3://bucket");
        assert_eq!(holding(&store), [Some(true); 3]);
        store.script(|request| if request.call == "create" { Fate::Overwritten } else { Fate::Served });
        assert_eq!(holding(&store), [Some(false), Some(false), Some(true)]);
    }

    #[test]
    fn one_create_without_an_answer_does_not_spoil_a_race() {
        for fate in [Fate::Dropped, Fate::AnswerLost, Fate::SaidToExist] {
            let store = SimStore::new("s3://bucket");
            let mut is_first = true;
            store.script(move |request| {
                let races = request.call == "create" && request.key.ends_with("create_race");
                if races && std::mem::take(&mut is_first) { fate } else { Fate::Served }
            });
            assert_eq!(holding(&store), [Some(true); 3], "{fate:?}");
        }
    }

    #[test]
    fn a_probe_without_an_answer_is_unknown() {
        let store = SimStore::new("s3://bucket");
        store.script(|request| if request.call == "create" { Fate::Dropped } else { Fate::Served });
        assert_eq!(holding(&store), [None, None, Some(true)]);
    }
}
