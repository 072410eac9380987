//! Tries a store: which of the properties that a root needs it has.

use super::store::{CreateOutcome, Listed, Store};
use crate::sys::{Buffer, each};
use crate::{Error, Result};

/// The length of a part. Stores refuse shorter ones, except the last.
const PART: usize = 5 << 20;
/// The creates of one key that race.
const RACERS: usize = 16;
/// The objects that are deleted together.
const DELETED: usize = 1000;

/// A property of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeFinding {
    /// Its name: `create_once`, `create_race`, `parts`, `ranges` or `listing`.
    pub name: &'static str,
    /// `None` if a request failed, so that it is unknown.
    pub holds: Option<bool>,
    /// The observation.
    pub detail: String,
}

/// Tries a store below a prefix that ends with `/`, and removes all objects there. Writers race for
/// `races` keys. Races that go well prove nothing; one that does not shows a store that cannot have
/// roots.
pub fn probe(store: &dyn Store, prefix: &str, races: u32) -> Result<Vec<ProbeFinding>> {
    let key = |name: &str| format!("{prefix}{name}");
    let finding = |name, found: Result<(bool, String)>| match found {
        Ok((holds, detail)) => ProbeFinding { name, holds: Some(holds), detail },
        Err(error) => ProbeFinding { name, holds: None, detail: error.to_string() },
    };
    let raced = create_races(store, &key("create_race"), races);
    let kept = if matches!(raced, Ok((true, _))) { races } else { 0 };
    let found = vec![
        finding("create_once", create_once(store, &key("create_once"))),
        finding("create_race", raced),
        finding("parts", parts(store, &key("parts"))),
        finding("ranges", ranges(store, &key("ranges"))),
        finding("listing", listing(store, &key("listing/"), &key("create_race/"), kept)),
    ];
    let keys: Vec<String> = store.list_below(prefix)?.into_iter().map(|(key, _)| key).collect();
    for keys in keys.chunks(DELETED) {
        store.delete(keys)?;
    }
    Ok(found)
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

/// True if one of many creates wins, for each of several keys.
fn create_races(store: &dyn Store, prefix: &str, races: u32) -> Result<(bool, String)> {
    for number in 0..races {
        let (holds, won) = create_race(store, &format!("{prefix}/{number}"))?;
        if !holds {
            return Ok((
                false,
                format!("{won} of {RACERS} creates of one key won, for key {number} of {races}"),
            ));
        }
    }
    let each = if races == 1 { String::new() } else { format!(", for each of {races} keys") };
    Ok((true, format!("1 of {RACERS} creates of one key won{each}")))
}

/// Returns the number of creates of one key that have won. True if that is right.
fn create_race(store: &dyn Store, key: &str) -> Result<(bool, usize)> {
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
    Ok((holds, winners.len()))
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

/// True if ranges have the right bytes, also at the end of an object and behind it.
fn ranges(store: &dyn Store, key: &str) -> Result<(bool, String)> {
    store.put(key, b"0123456789")?;
    let read = |offset, len| -> Result<Vec<u8>> {
        let mut range = vec![0; len];
        let read = store.read(key, offset, &mut range)?;
        range.truncate(read);
        Ok(range)
    };
    let found = [read(0, 4)?, read(3, 4)?, read(8, 4)?, read(10, 4)?, read(99, 4)?];
    let holds = found.iter().map(Vec::as_slice).eq([&b"0123"[..], b"3456", b"89", b"", b""]);
    let what = if holds { "have the right bytes" } else { "have wrong bytes" };
    Ok((holds, format!("ranges of an object {what}")))
}

/// True if listings have each object once, at once. `kept`: there are so many objects below
/// `raced`, or it is 0.
fn listing(store: &dyn Store, prefix: &str, raced: &str, kept: u32) -> Result<(bool, String)> {
    let keys = ["a", "b/c", "b/d"].map(|name| format!("{prefix}{name}"));
    for key in &keys {
        store.put(key, b"")?;
    }
    let below = |prefix: &str| -> Result<Vec<String>> {
        let mut keys: Vec<String> = store.list_below(prefix)?.into_iter().map(|(key, _)| key).collect();
        keys.sort_unstable();
        Ok(keys)
    };
    let name = |listed| match listed {
        Listed::Object(key, _) | Listed::Prefix(key) => key,
    };
    let mut level: Vec<String> = store.list(prefix)?.into_iter().map(name).collect();
    level.sort_unstable();
    let all = below(prefix)?;
    store.delete(&keys[1..2])?;
    let rest = below(prefix)?;
    let mut pages: Vec<String> = (0..kept).map(|number| format!("{raced}{number}")).collect();
    pages.sort_unstable();
    let holds = level == [keys[0].clone(), format!("{prefix}b/")]
        && all == keys
        && rest == [keys[0].clone(), keys[2].clone()]
        && (kept == 0 || below(raced)? == pages);
    let what = if holds { "have each object once" } else { "are wrong" };
    Ok((holds, format!("listings after writes and a deletion {what}")))
}

fn no_answer(store: &dyn Store, key: &str) -> Error {
    Error::io("create", store.url().join(key), std::io::Error::from_raw_os_error(libc::ETIMEDOUT))
}

#[cfg(test)]
mod tests {
    use super::super::simulated::{Fate, SimStore};
    use super::*;

    fn holding(store: &SimStore) -> Vec<Option<bool>> {
        let found = probe(store, "run/.probe/", 3).unwrap();
        assert_eq!(store.list_below("run/").unwrap(), []);
        found.into_iter().map(|one| one.holds).collect()
    }

    #[test]
    fn a_probe_finds_a_store_that_ignores_conditions() {
        let store = SimStore::new("s3://bucket");
        assert_eq!(holding(&store), [Some(true); 5]);
        store.script(|request| if request.call == "create" { Fate::Overwritten } else { Fate::Served });
        assert_eq!(holding(&store), [Some(false), Some(false), Some(true), Some(true), Some(true)]);
    }

    #[test]
    fn one_create_without_an_answer_does_not_spoil_a_race() {
        for fate in [Fate::Dropped, Fate::AnswerLost, Fate::SaidToExist] {
            let store = SimStore::new("s3://bucket");
            let mut is_first = true;
            store.script(move |request| {
                let races = request.call == "create" && request.key.contains("create_race/");
                if races && std::mem::take(&mut is_first) { fate } else { Fate::Served }
            });
            assert_eq!(holding(&store), [Some(true); 5], "{fate:?}");
        }
    }

    #[test]
    fn a_probe_without_an_answer_is_unknown() {
        let store = SimStore::new("s3://bucket");
        store.script(|request| if request.call == "create" { Fate::Dropped } else { Fate::Served });
        assert_eq!(holding(&store), [None, None, Some(true), Some(true), Some(true)]);
    }
}
