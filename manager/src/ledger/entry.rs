//! An entry of the ledger, and changes.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use stepwell_core::format::sealed_text;
use stepwell_core::io::is_component;
use stepwell_core::limits::{MAX_LEDGER_ENTRY_BYTES, MAX_NAME_BYTES};

/// Tells an entry from all others. 128 random bits and a counter, in hexadecimal digits.
pub type Nonce = String;
/// The prefix in the store that has the files of one save. It is never written again.
pub type AttemptId = String;

/// The manifest that a name of the root stands for.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Named {
    /// The save that wrote it.
    pub attempt: AttemptId,
    /// The name of its manifest below the prefix.
    pub manifest: String,
    /// The length of the manifest in bytes.
    pub manifest_bytes: u64,
    /// The CRC-32C of the manifest.
    pub manifest_crc: u32,
}

/// The state of a root.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Entry {
    /// Its number. The first entry has 0.
    pub number: u64,
    /// The writer that the root belongs to. Empty if it is new.
    pub session: String,
    /// The number of take-overs.
    pub epoch: u64,
    /// Host and process of the writer, for people.
    pub owner: String,
    /// Tells it from another entry of its number.
    pub nonce: Nonce,
    /// The nonce of the entry below.
    pub previous: Option<Nonce>,
    /// True if it changes nothing. It takes the number of an entry whose outcome was unknown.
    pub void: bool,
    /// The steps of the root, and what is set aside, by name.
    pub names: BTreeMap<String, Named>,
    /// Attempts of this session that were given up, and will never have a name.
    pub given_up: BTreeSet<AttemptId>,
}

impl Entry {
    /// Returns the bytes of its object: JSON, and a last line with the checksum of the rest. The
    /// error is a sentence for the user.
    pub fn to_bytes(&self) -> Result<Vec<u8>, String> {
        let mut bytes = serde_json::to_vec(self).map_err(|error| error.to_string())?;
        sealed_text::seal(&mut bytes);
        within(bytes.len() as u64)?;
        Ok(bytes)
    }

    /// Reads the object of an entry. The error is a sentence for the user.
    pub fn of_bytes(number: u64, bytes: &[u8]) -> Result<Self, String> {
        within(bytes.len() as u64)?;
        let entry: Self = sealed_text::parse(bytes)?;
        if entry.number != number {
            return Err(format!("it says that it is entry {}", entry.number));
        }
        let attempts = entry.names.values().flat_map(|named| [&named.attempt, &named.manifest]);
        if let Some(name) = entry.names.keys().chain(attempts).find(|name| !is_plain(name)) {
            return Err(format!("{name:?} is no name of an object in the root"));
        }
        Ok(entry)
    }
}

fn within(bytes: u64) -> Result<(), String> {
    if bytes > MAX_LEDGER_ENTRY_BYTES {
        return Err(format!("it has {bytes} bytes, and {MAX_LEDGER_ENTRY_BYTES} are allowed"));
    }
    Ok(())
}

fn is_plain(name: &str) -> bool {
    is_component(name) && !name.contains('\\') && name.len() as u64 <= MAX_NAME_BYTES
}

/// A change of the root, as one entry.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Change {
    /// The root belongs to this session from now on.
    TakeOver {
        /// The session that it belonged to. Empty if the root is new.
        from: String,
    },
    /// Names are taken away and given, all at once.
    Names {
        /// Names to take away, with their attempts, so that nothing else is taken.
        remove: BTreeMap<String, AttemptId>,
        /// Names to give.
        add: BTreeMap<String, Named>,
    },
    /// An attempt will never have a name, unless it has one.
    GiveUp(AttemptId),
}

/// The effect of a change on an entry.
#[derive(Debug, PartialEq, Eq)]
pub enum Effect {
    /// The entry has it.
    Done,
    /// The root belongs to another session.
    Fenced,
    /// An attempt of the change was given up; or, for [`Change::GiveUp`], it has a name.
    TooLate,
    /// It leads to these names, and to these attempts that were given up.
    Leads(BTreeMap<String, Named>, BTreeSet<AttemptId>),
}

impl Change {
    /// Applies the change, by `session`, to the highest entry. `None`: the ledger is empty.
    pub fn apply(&self, highest: Option<&Entry>, session: &str) -> Effect {
        let Some(entry) = highest else {
            return match self {
                Self::TakeOver { from } if from.is_empty() => Effect::Leads(BTreeMap::new(), BTreeSet::new()),
                _ => Effect::Fenced,
            };
        };
        if self.is_in(entry, session) {
            return Effect::Done;
        }
        match self {
            Self::TakeOver { from } if *from != entry.session => Effect::Fenced,
            // Attempts of an earlier session cannot commit, so nobody asks about them.
            Self::TakeOver { .. } => Effect::Leads(entry.names.clone(), BTreeSet::new()),
            _ if entry.session != session => Effect::Fenced,
            Self::GiveUp(attempt) => {
                if entry.names.values().any(|named| named.attempt == *attempt) {
                    return Effect::TooLate;
                }
                let mut given_up = entry.given_up.clone();
                given_up.insert(attempt.clone());
                Effect::Leads(entry.names.clone(), given_up)
            }
            Self::Names { remove, add } => {
                if add.values().any(|named| entry.given_up.contains(&named.attempt)) {
                    return Effect::TooLate;
                }
                let mut names = entry.names.clone();
                names.retain(|name, named| remove.get(name) != Some(&named.attempt));
                names.extend(add.clone());
                Effect::Leads(names, entry.given_up.clone())
            }
        }
    }

    /// True if an entry has this change of `session`.
    fn is_in(&self, entry: &Entry, session: &str) -> bool {
        match self {
            Self::TakeOver { .. } => entry.session == session,
            Self::Names { remove, add } => {
                add.iter().all(|(name, named)| entry.names.get(name) == Some(named))
                    && remove.iter().all(|(name, attempt)| {
                        entry.names.get(name).is_none_or(|found| found.attempt != *attempt)
                    })
            }
            Self::GiveUp(attempt) => entry.session == session && entry.given_up.contains(attempt),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry() -> Entry {
        let named = Named { attempt: "a".into(), manifest: "m".into(), manifest_bytes: 1, manifest_crc: 2 };
        Entry {
            number: 7,
            session: "s".into(),
            epoch: 1,
            owner: "host:1".into(),
            nonce: "n".into(),
            previous: Some("p".into()),
            void: false,
            names: [("step_1".to_owned(), named)].into(),
            given_up: ["b".to_owned()].into(),
        }
    }

    #[test]
    fn an_entry_is_read_as_it_was_written() {
        let bytes = entry().to_bytes().unwrap();
        assert_eq!(Entry::of_bytes(7, &bytes), Ok(entry()));
        assert!(Entry::of_bytes(8, &bytes).unwrap_err().contains("it is entry 7"));
    }

    #[test]
    fn a_damaged_entry_is_refused() {
        let bytes = entry().to_bytes().unwrap();
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut damaged = bytes.clone();
                damaged[at] ^= 1 << bit;
                Entry::of_bytes(7, &damaged).unwrap_err();
            }
            Entry::of_bytes(7, &bytes[..at]).unwrap_err();
        }
    }

    #[test]
    fn names_are_plain_and_entries_are_small() {
        for name in ["", ".", "..", "a/b", "a\\b", "a\0b"] {
            let mut hostile = entry();
            hostile.names.first_entry().unwrap().get_mut().attempt = name.to_owned();
            let error = Entry::of_bytes(7, &hostile.to_bytes().unwrap()).unwrap_err();
            assert!(error.contains("no name of an object"), "{error}");
        }
        let mut large = entry();
        large.owner = "x".repeat(MAX_LEDGER_ENTRY_BYTES as usize);
        assert!(large.to_bytes().unwrap_err().contains("are allowed"));
        assert!(Entry::of_bytes(7, large.owner.as_bytes()).unwrap_err().contains("its last line"));
    }
}
