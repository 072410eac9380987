//! The rewinds and deletions that users have asked for. A root records its own, since a tier that
//! is absent must follow them later: its steps would come back.

use std::collections::{BTreeSet, HashSet};

use serde::{Deserialize, Serialize};
use stepwell_core::format::manifest::Attempt;
use stepwell_core::format::sealed_text;
use stepwell_core::io::Dir;

use crate::control::write_sealed;
use crate::delete_tree::ignore_missing;
use crate::directory_layout::{CONTROL, REMOVALS, REWIND, control};
use crate::error::Result;

/// Bytes of a record.
const MAX_RECORD_BYTES: u64 = 64 << 20;
/// Of more deleted steps, the oldest are forgotten.
const MAX_DELETED: usize = 4096;

/// A rewind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Rewound {
    /// Random.
    pub id: String,
    /// The first step that it has removed.
    pub first: u64,
    /// The session of the manager that made it.
    pub session: String,
    /// The number of the next save of that session.
    pub next_save: u64,
}

impl Rewound {
    /// True if this save of a step was made before the rewind, and removed by it.
    pub fn removes(&self, step: u64, attempt: &Attempt) -> bool {
        let is_later = attempt.session == self.session && attempt.counter >= self.next_save;
        step >= self.first && !is_later
    }
}

/// The removals of a root.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Removals {
    /// Oldest first. Their first steps rise: a rewind covers earlier ones to the same or a later
    /// step.
    pub rewinds: Vec<Rewound>,
    /// The saves of deleted steps, oldest first.
    deleted: Vec<Attempt>,
}

impl Removals {
    /// Reads the record of a root.
    pub fn read(root: &dyn Dir) -> Result<Self> {
        let what = "Delete this file if the tiers of the run are all here";
        Ok(read_record(root, REMOVALS, what)?.unwrap_or_default())
    }

    /// Returns the rewinds that are not among these.
    pub fn missed(&self, known: &BTreeSet<String>) -> Vec<&Rewound> {
        self.rewinds.iter().filter(|one| !known.contains(&one.id)).collect()
    }

    /// The saves of deleted steps.
    pub fn deleted(&self) -> HashSet<&Attempt> {
        self.deleted.iter().collect()
    }

    /// Records a rewind, unless it is recorded.
    pub fn add_rewind(root: &dyn Dir, rewound: &Rewound) -> Result<()> {
        let mut all = Self::read(root)?;
        if all.rewinds.iter().any(|one| one.id == rewound.id) {
            return Ok(());
        }
        all.rewinds.retain(|one| one.first < rewound.first);
        all.rewinds.push(rewound.clone());
        write_sealed(root, REMOVALS, &all)
    }

    /// Records a deleted step.
    pub fn add_deleted(root: &dyn Dir, attempt: &Attempt) -> Result<()> {
        let mut all = Self::read(root)?;
        if all.deleted.contains(attempt) {
            return Ok(());
        }
        all.deleted.push(attempt.clone());
        let surplus = all.deleted.len().saturating_sub(MAX_DELETED);
        all.deleted.drain(..surplus);
        write_sealed(root, REMOVALS, &all)
    }
}

/// The record of a rewind of several tiers that is not ended.
#[derive(Serialize, Deserialize)]
pub(crate) struct UnfinishedRewind {
    pub rewound: Rewound,
    pub branch: String,
    /// The saves that it moves into the branch.
    pub moved: HashSet<Attempt>,
}

impl UnfinishedRewind {
    /// Reads the record in a root.
    pub fn read(root: &dyn Dir) -> Result<Option<Self>> {
        read_record(root, REWIND, "A rewind was interrupted: delete this file, and rewind again")
    }

    /// Writes the record.
    pub fn record(&self, root: &dyn Dir) -> Result<()> {
        write_sealed(root, REWIND, self)
    }

    /// Deletes the record.
    pub fn forget(root: &dyn Dir) -> Result<()> {
        let control = root.open_dir(CONTROL)?;
        ignore_missing(control.remove_file(REWIND))?;
        Ok(control.sync()?)
    }
}

fn read_record<T: for<'de> Deserialize<'de>>(root: &dyn Dir, name: &str, advice: &str) -> Result<Option<T>> {
    let name = control(name);
    match root.read_file(&name, MAX_RECORD_BYTES) {
        Ok(bytes) => sealed_text::parse(&bytes).map(Some).map_err(|error| {
            let file = root.path().join(&name);
            stepwell_core::Error::Format { file, what: format!("{error}. {advice}") }.into()
        }),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewound(id: &str, first: u64) -> Rewound {
        Rewound { id: id.to_owned(), first, session: "s".to_owned(), next_save: 7 }
    }

    #[test]
    fn a_rewind_covers_earlier_ones_to_later_steps() {
        let disk = stepwell_core::io::simulated::SimDisk::new();
        let root = stepwell_core::io::Disk::create_dir_all(&disk, std::path::Path::new("/root")).unwrap();
        crate::control::make_control(&*root).unwrap();
        for (id, first) in [("a", 3), ("b", 9), ("c", 5), ("d", 8), ("d", 1)] {
            Removals::add_rewind(&*root, &rewound(id, first)).unwrap();
        }
        let all = Removals::read(&*root).unwrap();
        let found: Vec<_> = all.rewinds.iter().map(|one| (one.id.as_str(), one.first)).collect();
        assert_eq!(found, [("a", 3), ("c", 5), ("d", 8)]);
        let known = ["a".to_owned(), "d".to_owned()].into();
        assert_eq!(all.missed(&known), [&rewound("c", 5)]);
    }

    #[test]
    fn later_saves_of_its_own_session_are_not_removed() {
        let attempt = |session: &str, counter| Attempt { session: session.to_owned(), counter };
        let one = rewound("a", 3);
        assert!(!one.removes(2, &attempt("s", 1)));
        assert!(one.removes(3, &attempt("s", 6)));
        assert!(!one.removes(3, &attempt("s", 7)));
        assert!(one.removes(3, &attempt("t", 7)));
    }
}
