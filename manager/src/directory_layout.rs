//! Every name in a root, in one place. Pure.
//!
//! Temporary, trash, quarantine and branch names are siblings of the steps. So commit, retirement,
//! quarantine and rewind are each one rename inside **one** directory. (After a crash, a rename
//! between two directories may leave an inode under both parents, or under neither.) All of them
//! start with a dot, so none can be a step's name.

/// The commit record of a step.
pub const MANIFEST: &str = "manifest.json";
/// The temporary name of a thinned step's new manifest.
pub const MANIFEST_NEW: &str = ".manifest.json.new";
/// The name of a single checkpoint in an object store, in the root that its URL stands for.
pub const SINGLE: &str = "checkpoint";
/// The file of a step on which readers hold a shared lock.
pub const LEASE: &str = ".lease";
/// The file of an export that names its root and step. Written in Python.
pub const EXPORT_RECORD: &str = "stepwell_export.json";
/// The index of an item, below the item's directory.
pub const INDEX: &str = "index";
/// The file of a copy that names the ranks all of whose files are there ([`crate::machines`]).
pub const WHOLE: &str = ".whole.json";
/// The mark of a part that was in a branch when its machine was main ([`crate::machines`]).
pub const ASIDE: &str = ".aside";
/// The directory for files of the root itself.
pub const CONTROL: &str = ".stepwell";
/// The file with format version, root id, step-name pattern, and the user's root metadata.
pub const ROOT_JSON: &str = "root.json";
/// The writer's lock.
pub const LOCK: &str = "lock";
/// The file that names the current writer. Every writer reads it before a rename.
pub const EPOCH: &str = "epoch";
/// The prefix of the heartbeat file of a writer without locks. The session follows it.
pub const HEARTBEAT_PREFIX: &str = "beat-";
/// The record of a rewind of several tiers, while it is carried out.
pub const REWIND: &str = "rewind.json";
/// What a near tier knows of its run.
pub const KNOWN_RUN: &str = "known_run.json";
/// The rewinds and deletions of a root, for tiers that are absent.
pub const REMOVALS: &str = "removals.json";
/// Branches of steps without which the run has gone on begin with this.
pub const STALE: &str = "stale-";
/// The record of a machine, in the control directory ([`crate::machines`]).
pub const MACHINE: &str = "machine.json";
/// The orders of the main machine to those that keep copies of others' files.
pub const COPY_ORDERS: &str = "copying.json";
/// The report of a machine on these orders.
pub const COPY_REPORT: &str = "copied.json";
/// The prefix of the orders of the main machine to those that carry their files to a tier, and of
/// the reports on them. The number of the tier follows.
const CARRY_ORDERS: &str = "carrying-";
const CARRY_REPORT: &str = "carried-";
/// The directory of later metrics, keyed by attempt.
pub const METRICS: &str = "metrics";
/// The directory of traces, keyed by attempt. Made with the first trace.
pub const TRACES: &str = "traces";

const TEMPORARY_PREFIX: &str = ".tmp-";
const GIVEN_UP_PREFIX: &str = ".given-up-";
const PART_PREFIX: &str = ".part-";
const COPY_PREFIX: &str = ".copy-";
const TRASH_PREFIX: &str = ".trash-";
const QUARANTINE_PREFIX: &str = ".quarantine-";
const BRANCH_PREFIX: &str = ".branch-";
/// The longest label in a generated name, in bytes. Such a name always stays below 255.
const MAX_LABEL_BYTES: usize = 128;

/// A generated name, parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OwnName {
    /// The temporary of a save in progress, or of a crashed one.
    Temporary {
        /// The step's padded number, or the name of a singular checkpoint.
        label: String,
        /// The session of the save: 32 hex digits.
        session: String,
        /// The save's number within its session.
        counter: u64,
    },
    /// The files of a step that are on another machine than the step ([`crate::machines`]).
    Part {
        /// The step's padded number.
        label: String,
        /// The session of the save.
        session: String,
        /// The save's number within its session.
        counter: u64,
    },
    /// Copies of files that other machines have of a step ([`crate::machines`]).
    Copy {
        /// The step's padded number.
        label: String,
        /// The session of the save.
        session: String,
        /// The save's number within its session.
        counter: u64,
    },
    /// The mark that a rank gave up on a silent leader in a save.
    GivenUp {
        /// The step's padded number, or the name of a singular checkpoint.
        label: String,
        /// The session of that save.
        session: String,
    },
    /// A retired directory, to be deleted.
    Trash {
        /// The step's padded number, or the (perhaps shortened) name of a singular checkpoint.
        label: String,
    },
    /// An invalid directory that had a step's name.
    Quarantine {
        /// That name, perhaps shortened.
        label: String,
    },
    /// A step that `rewind` set aside.
    Branch {
        /// The branch.
        branch: String,
        /// The step's name.
        step_name: String,
    },
    /// The root's own directory.
    Control,
}

/// Returns the label of a step in generated names.
pub fn label(step: u64) -> String {
    format!("{step:08}")
}

/// Returns the label of a singular checkpoint in generated names. It differs from all labels of
/// steps: a root's new writer removes temporaries of steps, but a save to a path may still be
/// alive.
pub fn label_of_path(name: &str) -> String {
    if is_step_label(name) { format!("_{name}") } else { name.to_owned() }
}

/// True if a label is a step's, whose save the root's lock protects.
pub fn is_step_label(text: &str) -> bool {
    text.parse().is_ok_and(|step| label(step) == text)
}

/// Returns the temporary name of a save. Every rank derives the same name.
pub fn temporary(label: &str, session: &str, counter: u64) -> String {
    format!("{TEMPORARY_PREFIX}{}-{session}-{counter}", shortened(label))
}

/// Returns the name of the part of a save, on another machine than the leader's.
pub fn part(label: &str, session: &str, counter: u64) -> String {
    format!("{PART_PREFIX}{}-{session}-{counter}", shortened(label))
}

/// Returns the name of the copies of files that other machines have of a step.
pub fn copy(label: &str, session: &str, counter: u64) -> String {
    format!("{COPY_PREFIX}{}-{session}-{counter}", shortened(label))
}

/// Returns the name of the mark that a rank gave up on the leader in a save. Every rank derives the
/// same name.
pub fn given_up(label: &str, session: &str, counter: u64) -> String {
    format!("{GIVEN_UP_PREFIX}{}-{session}-{counter}", shortened(label))
}

/// Returns a trash name. `unique` keeps two retired steps of one number apart.
pub fn trash(label: &str, unique: u128) -> String {
    format!("{TRASH_PREFIX}{}-{unique:032x}", shortened(label))
}

/// Returns the quarantine name of an invalid directory that has a step's name.
pub fn quarantine(name: &str, unique: u128) -> String {
    format!("{QUARANTINE_PREFIX}{}-{unique:032x}", shortened(name))
}

/// Returns the name of a step that `rewind` sets aside.
pub fn branch(branch: &str, step_name: &str) -> String {
    format!("{BRANCH_PREFIX}{branch}.{step_name}")
}

/// True if the name is valid for a branch.
pub fn is_branch_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= MAX_LABEL_BYTES
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-'))
}

/// True if a label in a generated name is that of the singular checkpoint `name`.
pub fn is_label_of(label: &str, name: &str) -> bool {
    label == shortened(&label_of_path(name))
}

/// Returns a path in the root's own directory.
pub fn control(name: &str) -> String {
    format!("{CONTROL}/{name}")
}

/// The file with the orders for a tier, by its number among the further ones.
pub fn carry_orders(tier: usize) -> String {
    format!("{CARRY_ORDERS}{tier}.json")
}

/// The file with the report of a machine on these orders.
pub fn carry_report(tier: usize) -> String {
    format!("{CARRY_REPORT}{tier}.json")
}

/// Parses a generated name. `None` for steps and foreign names.
pub fn parse(name: &str) -> Option<OwnName> {
    if name == CONTROL {
        return Some(OwnName::Control);
    }
    if let Some(rest) = name.strip_prefix(TRASH_PREFIX) {
        let (label, _) = rest.rsplit_once('-').filter(|(_, unique)| is_unique(unique))?;
        return Some(OwnName::Trash { label: label.to_owned() });
    }
    if let Some(rest) = name.strip_prefix(QUARANTINE_PREFIX) {
        let (label, _) = rest.rsplit_once('-').filter(|(_, unique)| is_unique(unique))?;
        return Some(OwnName::Quarantine { label: label.to_owned() });
    }
    if let Some(rest) = name.strip_prefix(BRANCH_PREFIX) {
        let (branch, step_name) = rest.split_once('.')?;
        return Some(OwnName::Branch { branch: branch.to_owned(), step_name: step_name.to_owned() });
    }
    if let Some(rest) = name.strip_prefix(GIVEN_UP_PREFIX) {
        let (label, session, _) = of_a_save(rest)?;
        return Some(OwnName::GivenUp { label, session });
    }
    if let Some(rest) = name.strip_prefix(PART_PREFIX) {
        let (label, session, counter) = of_a_save(rest)?;
        return Some(OwnName::Part { label, session, counter });
    }
    if let Some(rest) = name.strip_prefix(COPY_PREFIX) {
        let (label, session, counter) = of_a_save(rest)?;
        return Some(OwnName::Copy { label, session, counter });
    }
    let (label, session, counter) = of_a_save(name.strip_prefix(TEMPORARY_PREFIX)?)?;
    Some(OwnName::Temporary { label, session, counter })
}

/// Parses the rest of a save's name: label, session, counter.
fn of_a_save(rest: &str) -> Option<(String, String, u64)> {
    let mut parts = rest.rsplitn(3, '-');
    let counter = parts.next()?.parse().ok()?;
    let session = parts.next().filter(|session| is_unique(session))?;
    Some((parts.next()?.to_owned(), session.to_owned(), counter))
}

/// True for a generated id. Only names with one are deleted. A user's `.trash-old` stays.
fn is_unique(text: &str) -> bool {
    text.len() == 32 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

fn shortened(label: &str) -> &str {
    let mut end = label.len().min(MAX_LABEL_BYTES);
    while !label.is_char_boundary(end) {
        end -= 1;
    }
    label.get(..end).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step_name::StepName;

    #[test]
    fn names_that_we_make_are_recognised_and_are_never_steps() {
        let session = "0123456789abcdef0123456789abcdef";
        let temporary = temporary(&label(5), session, 3);
        assert_eq!(
            parse(&temporary),
            Some(OwnName::Temporary { label: "00000005".into(), session: session.into(), counter: 3 })
        );
        let given_up = given_up(&label(5), session, 3);
        assert_eq!(parse(&given_up), Some(OwnName::GivenUp { label: label(5), session: session.into() }));
        let part = part(&label(5), session, 3);
        assert_eq!(
            parse(&part),
            Some(OwnName::Part { label: label(5), session: session.into(), counter: 3 })
        );
        let copy = copy(&label(5), session, 3);
        assert_eq!(
            parse(&copy),
            Some(OwnName::Copy { label: label(5), session: session.into(), counter: 3 })
        );
        assert_eq!(parse(&trash("00000005", 1)), Some(OwnName::Trash { label: "00000005".into() }));
        assert_eq!(
            parse(&quarantine("step_00000005", 1)),
            Some(OwnName::Quarantine { label: "step_00000005".into() })
        );
        assert_eq!(
            parse(&branch("main-2", "step_00000005")),
            Some(OwnName::Branch { branch: "main-2".into(), step_name: "step_00000005".into() })
        );
        let any = StepName::new("", 0).unwrap();
        for name in [
            temporary,
            part,
            copy,
            given_up,
            trash("5", 1),
            quarantine("5", 1),
            branch("x", "5"),
            CONTROL.to_owned(),
        ] {
            assert_eq!(any.parse(&name), None);
        }
    }

    #[test]
    fn foreign_names_are_not_ours() {
        for name in ["step_00000005", ".tmp", ".tmp-5", ".tmp-5-abc-1", ".git", ".DS_Store", "x"] {
            assert_eq!(parse(name), None, "{name}");
        }
        let hex = "0123456789abcdef0123456789abcdef";
        for prefix in [TRASH_PREFIX, QUARANTINE_PREFIX] {
            for rest in ["", "old", "best-old", "5-0123456789abcdef", hex] {
                assert_eq!(parse(&format!("{prefix}{rest}")), None, "{prefix}{rest}");
            }
            assert_eq!(parse(&format!("{prefix}5-{}", hex.to_uppercase())), None);
            assert_eq!(parse(&format!("{prefix}5-0{hex}")), None);
        }
    }

    #[test]
    fn the_label_of_a_path_is_never_a_steps() {
        for name in ["a", "20240101", "00000005", "123456789", "5", "+0000005", ""] {
            assert!(!is_step_label(&label_of_path(name)), "{name}");
            assert!(is_label_of(&label_of_path(name), name));
        }
        for step in [0, 5, 123_456_789, u64::MAX] {
            assert!(is_step_label(&label(step)));
        }
    }

    #[test]
    fn generated_names_fit_a_directory_entry_whatever_the_label_is() {
        let label = "é".repeat(300);
        assert!(temporary(&label, &"a".repeat(32), u64::MAX).len() <= 255);
        assert!(trash(&label, u128::MAX).len() <= 255);
    }
}
