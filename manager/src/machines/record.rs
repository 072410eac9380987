//! The record of a machine: `machine.json` in its root.
//!
//! All machines of a job write the same list of sessions, and the id of the main machine. So the
//! machine whose list contains the others' took part last, and names the machine that was main. A
//! session is added when the machines meet. If the machine that was main last is absent then, it is
//! added before the first step is committed: until then, the run has not gone on.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use stepwell_core::io::Dir;

use crate::control::replace_json;
use crate::directory_layout::{MACHINE, control};
use crate::environment::Environment;

const MAX_BYTES: u64 = 16 << 20;

/// The content of `machine.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct MachineRecord {
    /// Tells this directory from those of other machines.
    pub(super) id: String,
    /// The sessions of the run, until the last meeting of this machine.
    pub(super) sessions: BTreeSet<String>,
    /// The id of the main machine, as of this list.
    pub(super) main: String,
    /// The number of machines at the last meeting.
    pub(super) machines: u32,
    /// On the main machine: sessions whose steps may be on a machine that was absent.
    pub(super) absent: BTreeSet<String>,
}

impl MachineRecord {
    /// True if the main machine would have the step of a part of this session, if there were one.
    pub(super) fn knows_steps_of(&self, session: &str) -> bool {
        self.sessions.contains(session) && !self.absent.contains(session)
    }
}

/// Reads the record of a root. An invalid one was edited: nothing is known then.
pub(super) fn read(root: &dyn Dir) -> stepwell_core::Result<Option<MachineRecord>> {
    match root.read_file(&control(MACHINE), MAX_BYTES) {
        Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}

/// True if a root is on several machines, and this is one of them.
pub(crate) fn is_spread(root: &dyn Dir) -> stepwell_core::Result<bool> {
    Ok(read(root)?.is_some_and(|record| record.machines > 1))
}

pub(super) fn write(root: &dyn Dir, record: &MachineRecord) -> stepwell_core::Result<()> {
    if read(root)?.as_ref() == Some(record) {
        return Ok(());
    }
    replace_json(root, MACHINE, record)
}

/// Reads the record of this machine, which owns the root. Makes a missing one.
pub(super) fn read_or_make(
    root: &dyn Dir,
    environment: &Environment,
) -> stepwell_core::Result<MachineRecord> {
    if let Some(record) = read(root)? {
        return Ok(record);
    }
    let record = MachineRecord { id: environment.hex_id(), ..MachineRecord::default() };
    write(root, &record)?;
    Ok(record)
}

/// The newest state of the run, as the machines that are here know it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NewestState {
    /// The machine that was main last. `None`: it is absent.
    pub(super) main: Option<u32>,
    /// Its id.
    pub(super) main_id: String,
    pub(super) sessions: BTreeSet<String>,
}

/// Finds the machine that was main last. `own` is the one that leads now. `has_steps` is asked if
/// the machines have never met.
pub(super) fn newest_state(
    own: u32,
    records: &BTreeMap<u32, &MachineRecord>,
    has_steps: impl Fn(u32) -> bool,
) -> NewestState {
    let is_outdated = |one: &MachineRecord| {
        let is_more = |other: &MachineRecord| {
            other.sessions.len() > one.sessions.len() && other.sessions.is_superset(&one.sessions)
        };
        records.values().any(|other| is_more(other))
    };
    let newest: BTreeMap<u32, &MachineRecord> =
        records.iter().filter(|(_, one)| !is_outdated(one)).map(|(&machine, &one)| (machine, one)).collect();
    // Several lists: the machines have gone on apart. The one that leads now decides.
    let list = newest.get(&own).or_else(|| newest.values().next());
    let (sessions, main_id) = list.map(|one| (one.sessions.clone(), one.main.clone())).unwrap_or_default();
    let main = if sessions.is_empty() {
        let others = records.keys().copied();
        Some(std::iter::once(own).chain(others).find(|&machine| has_steps(machine)).unwrap_or(own))
    } else {
        records.iter().find(|(_, one)| one.id == main_id).map(|(&machine, _)| machine)
    };
    NewestState { main, main_id, sessions }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The record of a machine with this id.
    fn record(id: &str, sessions: &[&str], main: &str) -> MachineRecord {
        let sessions = sessions.iter().map(|&session| session.to_owned()).collect();
        MachineRecord { id: id.to_owned(), sessions, main: main.to_owned(), ..MachineRecord::default() }
    }

    /// The machine that was main last, if `own` leads now.
    fn main(own: u32, records: &[MachineRecord]) -> Option<u32> {
        let records = (0..).zip(records).collect();
        newest_state(own, &records, |machine| machine == 2).main
    }

    #[test]
    fn the_longest_of_lists_that_contain_each_other_is_the_newest() {
        let (a, b) = (record("a", &["1", "2", "3"], "a"), record("b", &["1", "2", "3"], "a"));
        assert_eq!(main(0, &[a.clone(), b.clone()]), Some(0));
        assert_eq!(main(1, &[a.clone(), b]), Some(0));
        // Machine b has led since.
        let b = record("b", &["1", "2", "3", "4"], "b");
        assert_eq!(main(0, &[a.clone(), b.clone()]), Some(1));
        // It took part since, and the main machine is absent.
        let c = record("c", &["1", "2", "3", "4"], "b");
        assert_eq!(main(0, &[a.clone(), c.clone()]), None);
        assert_eq!(main(1, &[a, c, b]), Some(2));
    }

    #[test]
    fn a_main_machine_that_died_early_is_named_by_others() {
        let (a, b) = (record("a", &["1"], "a"), record("b", &["1", "2"], "a"));
        assert_eq!(main(1, &[a, b]), Some(0));
    }

    #[test]
    fn machines_that_went_on_apart_follow_the_one_that_leads() {
        let (a, b) = (record("a", &["1", "2"], "a"), record("b", &["1", "3"], "b"));
        assert_eq!(main(0, &[a.clone(), b.clone()]), Some(0));
        assert_eq!(main(1, &[a.clone(), b.clone()]), Some(1));
        assert_eq!(main(2, &[a, b, record("c", &[], "")]), Some(0));
    }

    #[test]
    fn machines_that_have_never_met_follow_the_one_with_steps() {
        let new = |id| record(id, &[], "");
        assert_eq!(main(0, &[new("a"), new("b"), new("c")]), Some(2));
        assert_eq!(main(1, &[new("a"), new("b")]), Some(1));
    }
}
