//! Which operations fail, and how.

/// The kind of an operation, for faults and hooks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum OperationKind {
    /// A directory is opened, by path or below another.
    OpenDir,
    /// A directory is made.
    CreateDir,
    /// A directory is listed.
    Entries,
    /// A name or an open file is asked what it is.
    Stat,
    /// A file is made.
    CreateFile,
    /// Space is reserved for a file that was just made.
    Allocate,
    /// A file is opened.
    OpenFile,
    /// Bytes are read, with or without a queue.
    Read,
    /// Bytes are written, with or without a queue (counted when it completes).
    Write,
    /// A file is cut or extended.
    SetLen,
    /// A file is synced.
    Sync,
    /// A directory is synced.
    SyncDir,
    /// A rename, with or without replacement.
    Rename,
    /// Two names are swapped.
    Exchange,
    /// A file is removed.
    RemoveFile,
    /// A directory is removed.
    RemoveDir,
    /// A lock is tried.
    Lock,
    /// Free space is asked for.
    FreeBytes,
}

/// The effect of a fault on an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// It fails with this errno, without effect.
    Fail(i32),
    /// It fails with this errno after half of its bytes were written (writes; everything else as
    /// `Fail`).
    FailHalfway(i32),
    /// It takes effect, and then fails with this errno: a lost reply (network file systems).
    FailAfterwards(i32),
    /// Half of its bytes are transferred first, as an operation of its own; the queue goes on with
    /// the rest (transfers only).
    Short,
    /// It never completes (transfers of a queue only: everything else ignores it; use a hook to
    /// make other calls wait).
    Stall,
}

/// A rule: which operations are hit, and what happens to them.
#[derive(Clone, Debug)]
pub struct Fault {
    kind: Option<OperationKind>,
    path: Option<String>,
    skip: u64,
    times: u64,
    action: Action,
}

impl Fault {
    /// The next operation of any kind.
    pub fn any(action: Action) -> Self {
        Self { kind: None, path: None, skip: 0, times: 1, action }
    }

    /// The next operation of this kind.
    pub fn on(kind: OperationKind, action: Action) -> Self {
        Self { kind: Some(kind), ..Self::any(action) }
    }

    /// Only operations whose path contains this text.
    #[must_use]
    pub fn at(mut self, path_part: impl Into<String>) -> Self {
        self.path = Some(path_part.into());
        self
    }

    /// Lets this many matching operations pass first.
    #[must_use]
    pub fn after(mut self, skip: u64) -> Self {
        self.skip = skip;
        self
    }

    /// Hits every matching operation from the first one on.
    #[must_use]
    pub fn from_then_on(mut self) -> Self {
        self.times = u64::MAX;
        self
    }
}

/// The rules of one process.
#[derive(Default)]
pub(super) struct Faults(Vec<Fault>);

impl Faults {
    pub(super) fn add(&mut self, fault: Fault) {
        self.0.push(fault);
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// The action for this operation, where a rule hits it. The first rule wins; all that match
    /// count it.
    pub(super) fn hit(&mut self, kind: OperationKind, path: &str) -> Option<Action> {
        let mut found = None;
        for fault in &mut self.0 {
            let matches = fault.kind.is_none_or(|wanted| wanted == kind)
                && fault.path.as_ref().is_none_or(|part| path.contains(part.as_str()));
            if !matches {
                continue;
            }
            if fault.skip > 0 {
                fault.skip -= 1;
            } else if found.is_none() {
                fault.times = fault.times.saturating_sub(1);
                found = Some(fault.action);
            }
        }
        self.0.retain(|fault| fault.times > 0);
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_hits_the_operation_that_it_names() {
        let mut faults = Faults::default();
        faults.add(Fault::on(OperationKind::Sync, Action::Fail(5)).after(1).at("data"));
        assert_eq!(faults.hit(OperationKind::Write, "data"), None);
        assert_eq!(faults.hit(OperationKind::Sync, "index"), None);
        assert_eq!(faults.hit(OperationKind::Sync, "x/data"), None);
        assert_eq!(faults.hit(OperationKind::Sync, "x/data"), Some(Action::Fail(5)));
        assert_eq!(faults.hit(OperationKind::Sync, "x/data"), None);
        faults.add(Fault::any(Action::Fail(28)).from_then_on());
        for _ in 0..3 {
            assert_eq!(faults.hit(OperationKind::Entries, ""), Some(Action::Fail(28)));
        }
    }
}
