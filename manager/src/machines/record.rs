//! The record of a machine: `machine.json` in its root.
//!
//! All machines of a job write the same list of sessions when they meet. So the machine whose list
//! contains the others' took part last. A mark shows which of those with that list was main.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use stepwell_core::io::Dir;

use crate::control::write_json;
use crate::directory_layout::{MACHINE, control};
use crate::environment::Environment;
use crate::error::Result;

const MAX_BYTES: u64 = 16 << 20;

/// The content of `machine.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct MachineRecord {
    /// Tells this directory from those of other machines.
    pub(super) id: String,
    /// The sessions of the run, until the last meeting of this machine.
    pub(super) sessions: BTreeSet<String>,
    /// True if it was the main machine of the last of them.
    pub(super) led: bool,
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
pub(super) fn read(root: &dyn Dir) -> Result<Option<MachineRecord>> {
    match root.read_file(&control(MACHINE), MAX_BYTES) {
        Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error.into()),
    }
}

pub(super) fn write(root: &dyn Dir, record: &MachineRecord) -> Result<()> {
    if read(root)?.as_ref() == Some(record) {
        return Ok(());
    }
    write_json(root, MACHINE, record)
}

/// Reads the record of this machine, which owns the root. Makes a missing one.
pub(super) fn read_or_make(root: &dyn Dir, environment: &Environment) -> Result<MachineRecord> {
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
    let sessions = list.map(|one| one.sessions.clone()).unwrap_or_default();
    let mut with_list =
        newest.iter().filter(|(_, one)| one.sessions == sessions).map(|(&machine, _)| machine);
    let main = if sessions.is_empty() {
        let others = records.keys().copied();
        Some(std::iter::once(own).chain(others).find(|&machine| has_steps(machine)).unwrap_or(own))
    } else {
        with_list.find(|machine| newest.get(machine).is_some_and(|one| one.led))
    };
    NewestState { main, sessions }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(sessions: &[&str], led: bool) -> MachineRecord {
        let sessions = sessions.iter().map(|&session| session.to_owned()).collect();
        MachineRecord { sessions, led, ..MachineRecord::default() }
    }

    /// The machine that was main last, if `own` leads now.
    fn main(own: u32, records: &[MachineRecord]) -> Option<u32> {
        let records = (0..).zip(records).collect();
        newest_state(own, &records, |machine| machine == 2).main
    }

    #[test]
    fn the_longest_of_lists_that_contain_each_other_is_the_newest() {
        let many = record(&["1", "2", "3", "4"], true);
        assert_eq!(main(0, &[many.clone(), record(&["1", "2", "3", "4"], false)]), Some(0));
        assert_eq!(main(1, &[many.clone(), record(&["1", "2", "3", "4"], false)]), Some(0));
        // Machine 1 has led since, and knew all before.
        let later = record(&["1", "2", "3", "4", "5"], true);
        assert_eq!(main(0, &[many.clone(), later.clone()]), Some(1));
        // It took part later, and the main machine is absent.
        let part = record(&["1", "2", "3", "4", "5"], false);
        assert_eq!(main(0, &[many.clone(), part.clone()]), None);
        assert_eq!(main(1, &[many, part, later]), Some(2));
    }

    #[test]
    fn machines_that_went_on_apart_follow_the_one_that_leads() {
        let (one, other) = (record(&["1", "2"], true), record(&["1", "3"], true));
        assert_eq!(main(0, &[one.clone(), other.clone()]), Some(0));
        assert_eq!(main(1, &[one.clone(), other.clone()]), Some(1));
        assert_eq!(main(2, &[one, other, record(&[], false)]), Some(0));
    }

    #[test]
    fn machines_that_have_never_met_follow_the_one_with_steps() {
        let new = record(&[], false);
        assert_eq!(main(0, &[new.clone(), new.clone(), new.clone()]), Some(2));
        assert_eq!(main(1, &[new.clone(), new]), Some(1));
    }
}
