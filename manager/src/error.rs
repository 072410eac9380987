//! The error type of this crate. [`Error::kind`] is a stable name that front ends map to their
//! exceptions. Messages state the event, the place and the remedy.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use stepwell_core::Kind;

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the manager.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The step exists already, or is being saved.
    #[error("{}", step_exists(*step, root, *latest, *rewind_to))]
    StepExists {
        /// The step.
        step: u64,
        /// The root (or the path of a singular checkpoint).
        root: PathBuf,
        /// The latest step, if this one is below it. Then it cannot be replaced either.
        latest: Option<u64>,
        /// The newest step below it.
        rewind_to: Option<u64>,
    },
    /// A checkpoint exists already at the path.
    #[error("{} exists already", path.display())]
    PathExists {
        /// The path.
        path: PathBuf,
        /// The remedy, which depends on the call.
        advice: Advice,
    },
    /// The step does not exist, or the root has no steps.
    #[error("{}", step_not_found(*step, root, *latest))]
    StepNotFound {
        /// The requested step. `None`: the latest.
        step: Option<u64>,
        /// The root.
        root: PathBuf,
        /// The newest existing step.
        latest: Option<u64>,
    },
    /// The step was removed or replaced after it was opened.
    #[error("{what} of {} is gone: it was removed or replaced while it was open; open it again or take a newer step", path.display())]
    StepGone {
        /// The step's directory.
        path: PathBuf,
        /// The missing thing.
        what: String,
    },
    /// The step is below the latest one.
    #[error(
        "step {step} is below the latest step {latest}: saving backwards would make \"latest\" ambiguous; {}",
        way_back(*step, *rewind_to)
    )]
    StepOrder {
        /// The step of the save.
        step: u64,
        /// The latest step, committed or being saved.
        latest: u64,
        /// The newest step below that of the save.
        rewind_to: Option<u64>,
    },
    /// The save failed, and left nothing visible. `source` has the errno.
    #[error("saving step {step} failed, nothing of it is visible: {source}")]
    SaveFailed {
        /// The step.
        step: u64,
        /// The cause.
        source: stepwell_core::Error,
    },
    /// The root has one machine's part of a run.
    #[error(
        "{} has one machine's part of a run on several machines, and was opened as if it were whole. Nothing was changed", root.display()
    )]
    Spread {
        /// The root.
        root: PathBuf,
    },
    /// The step may have its name, and may not survive a power cut.
    #[error(
        "step {step} may be committed or not, and may not survive a power cut ({source}); it is not counted as committed. Save the step again, or open the root again: that decides it"
    )]
    DurabilityUncertain {
        /// The step.
        step: u64,
        /// The cause.
        source: stepwell_core::Error,
    },
    /// A rank failed, so no rank committed.
    #[error("rank {rank} failed: {cause}; so it has ended on all ranks")]
    RankFailed {
        /// The rank.
        rank: u32,
        /// Its report.
        cause: String,
    },
    /// Ranks did not answer in time.
    #[error("waited {seconds:.1} s without progress for rank(s) {missing:?} {waited_for}")]
    CoordinationTimeout {
        /// The missing ranks.
        missing: Vec<u32>,
        /// The awaited answer.
        waited_for: String,
        /// For how long, in seconds.
        seconds: f64,
    },
    /// A call of this rank, or of one that it waited for, had no answer. The ranks no longer agree
    /// on their calls.
    #[error(
        "the session of the ranks is over: {cause}. Start the job again, or open the root again on all ranks"
    )]
    SessionLost {
        /// The ranks that did not answer.
        missing: Vec<u32>,
        /// The first failure.
        cause: String,
    },
    /// The other ranks gave up on this rank, the leader.
    #[error(
        "the other ranks have given up on step {step}: no heartbeat from this rank (the leader) for {seconds:.1} s. The step was not committed"
    )]
    GivenUpOn {
        /// The step.
        step: u64,
        /// Their timeout, in seconds.
        seconds: f64,
    },
    /// The ranks' layouts of a tensor contradict each other. The save left nothing visible.
    #[error("leaf `{leaf}`: {what}; the step was not committed on any rank")]
    Layout {
        /// The rendered leaf path.
        leaf: String,
        /// The ranks and regions concerned.
        what: String,
        /// A remedy.
        advice: Option<Advice>,
    },
    /// The board for messages between ranks does not answer.
    #[error("the ranks cannot reach each other: {0}")]
    Unreachable(String),
    /// An error that another rank reported.
    #[error("{0}")]
    Relayed(Relayed),
    /// Another live writer has the root.
    #[error("{} has another live writer{}", root.display(), owned_by(owner.as_deref()))]
    Locked {
        /// The root.
        root: PathBuf,
        /// The other writer, if it is known.
        owner: Option<String>,
    },
    /// The step is held, so it is neither deleted nor replaced.
    #[error("step {step} stays as it is: {by}")]
    Held {
        /// The step.
        step: u64,
        /// The holder.
        by: String,
        /// The remedy, unless it is to try again.
        advice: Option<Advice>,
    },
    /// A tier will not get a step.
    #[error("step {step} {}: {why}", not_carried(tier))]
    NotCarried {
        /// The step.
        step: u64,
        /// The tier's name. Empty: the copies on other machines.
        tier: String,
        /// Why not.
        why: String,
    },
    /// The file system has no locks, and the caller did not ask to take the root over.
    #[error("{} lies on a file system without locks ({answer}), so a second writer cannot be kept out by one", root.display())]
    NoLocks {
        /// The root.
        root: PathBuf,
        /// The system's answer.
        answer: String,
    },
    /// The requested pattern of step names does not match existing steps of the root.
    #[error(
        "{} names its steps {recorded}, and {example} stands there: to a manager with the names {wanted} it would be no step, neither listed nor counted by retention. Pass the names {both}, or none to go on as the root says",
        root.display()
    )]
    OtherStepName {
        /// The root.
        root: PathBuf,
        /// The pattern of the root.
        recorded: String,
        /// The requested pattern.
        wanted: String,
        /// A pattern that matches both.
        both: String,
        /// The name of a step that only the root's pattern matches.
        example: String,
    },
    /// A branch of this name exists already.
    #[error(
        "{} has a branch {branch:?} already ({example} stands there), and two lines of steps are not mixed in one; nothing was moved: choose another name, or none to have one made",
        root.display()
    )]
    BranchExists {
        /// The root.
        root: PathBuf,
        /// The branch.
        branch: String,
        /// The name of one of its steps.
        example: String,
    },
    /// The buffer of a leaf was donated before its capture.
    #[error("leaf `{leaf}`: its buffer was donated before it was captured")]
    DonatedBuffer {
        /// The rendered leaf path.
        leaf: String,
    },
    /// The handle was made before a fork, in the parent process.
    #[error("this {0} was made before a fork and belongs to the parent process; make a new one in the child")]
    ForkedProcess(&'static str),
    /// The manager was closed.
    #[error("this manager of {} is closed; make a new one", root.display())]
    Closed {
        /// The root.
        root: PathBuf,
    },
    /// The manager is read-only.
    #[error("cannot {what}: this manager of {} only reads", root.display())]
    ReadOnly {
        /// The request.
        what: &'static str,
        /// The root.
        root: PathBuf,
    },
    /// The directory is not a step, or has a wrong name.
    #[error("{} is no step: {reason}", path.display())]
    NotAStep {
        /// The directory.
        path: PathBuf,
        /// The violated condition.
        reason: String,
    },
    /// An invalid argument.
    #[error("{0}")]
    Invalid(String),
    /// A wait reached its deadline.
    #[error("waited {:.1} s for {waited_for}; it goes on in the background", waited.as_secs_f64())]
    Timeout {
        /// The event that did not come.
        waited_for: String,
        /// For how long.
        waited: Duration,
    },
    /// An earlier background save failed, and nobody has seen it yet. A caller that cannot report
    /// it passes it to [`Manager::put_back`].
    ///
    /// [`Manager::put_back`]: crate::Manager::put_back
    #[error("an earlier save failed: {source}{}", not_begun(*unsaved))]
    Earlier {
        /// The step whose save raised this instead, and was not begun.
        unsaved: Option<u64>,
        /// Why it failed.
        source: Arc<Error>,
    },
    /// The system refused staging memory.
    #[error("no memory for a staging ring of {wanted} bytes, of which {there} are there already ({source})")]
    NoStagingMemory {
        /// The requested bytes, in all.
        wanted: u64,
        /// The allocated bytes.
        there: u64,
        /// The system's answer.
        source: stepwell_core::Error,
    },
    /// An error of planning. A mismatch has the whole report.
    #[error(transparent)]
    Reshard(#[from] stepwell_reshard::Error),
    /// An error of the engine.
    #[error(transparent)]
    Core(#[from] stepwell_core::Error),
}

fn step_exists(step: u64, root: &std::path::Path, latest: Option<u64>, rewind_to: Option<u64>) -> String {
    let root = root.display();
    match latest {
        None => format!("step {step} exists already in {root}"),
        Some(latest) => format!(
            "step {step} exists already in {root}, below the latest step {latest}; {}",
            way_back(step, rewind_to)
        ),
    }
}

/// The remedy for a run that continues from an older step than the latest.
fn way_back(step: u64, rewind_to: Option<u64>) -> String {
    match rewind_to {
        Some(older) => {
            format!(
                "to continue from step {older}, rewind to step {older} first: that sets the steps after {older} aside"
            )
        }
        None => format!(
            "there is no step below {step} to rewind to: delete the steps that are not wanted, or save to another root"
        ),
    }
}

fn step_not_found(step: Option<u64>, root: &std::path::Path, latest: Option<u64>) -> String {
    let root = root.display();
    match (step, latest) {
        (Some(step), Some(latest)) => format!("{root} has no step {step}; the latest is {latest}"),
        (Some(step), None) => format!("{root} has no step {step}; it has no step at all"),
        (None, _) => format!("{root} is no step and holds none; is the path right?"),
    }
}

fn not_begun(unsaved: Option<u64>) -> String {
    unsaved
        .map(|step| format!(". This is reported once, and step {step} was not saved. Save it again"))
        .unwrap_or_default()
}

fn owned_by(owner: Option<&str>) -> String {
    let here = format!("process {} ", std::process::id());
    owner
        .map(|owner| {
            let whose = if format!("{owner} ").contains(&here) {
                ": this very process, where an earlier manager of this root is open, or has not ended yet"
            } else {
                ""
            };
            format!(" ({owner}{whose})")
        })
        .unwrap_or_default()
}

fn not_carried(tier: &str) -> String {
    if tier.is_empty() {
        return "is not copied to other machines".to_owned();
    }
    format!("does not come to the tier `{tier}`")
}

impl Error {
    /// Returns the error of a broken invariant: see [`stepwell_core::Error::Internal`].
    pub fn internal(expected: impl Into<String>, found: impl Into<String>) -> Self {
        stepwell_core::Error::internal(expected, found).into()
    }

    /// Returns the stable name of its [`Kind`], a part of the public interface.
    pub fn kind(&self) -> &'static str {
        let kind = match self {
            Self::StepExists { .. } | Self::PathExists { .. } => Kind::StepExists,
            Self::StepNotFound { .. } => Kind::StepNotFound,
            Self::StepGone { .. } => Kind::StepGone,
            Self::StepOrder { .. } => Kind::StepOrder,
            Self::SaveFailed { source, .. } => match source.inner() {
                stepwell_core::Error::Leaf { .. } => Kind::UnsupportedLeaf,
                stepwell_core::Error::Torn { .. } => Kind::TornSnapshot,
                stepwell_core::Error::Provider { kind, .. } => *kind,
                _ => Kind::SaveFailed,
            },
            Self::DurabilityUncertain { .. } => Kind::DurabilityUncertain,
            Self::RankFailed { .. } => Kind::RankFailed,
            Self::CoordinationTimeout { .. } | Self::GivenUpOn { .. } => Kind::CoordinationTimeout,
            Self::SessionLost { .. } => Kind::SessionLost,
            Self::Layout { .. } => Kind::Mismatch,
            Self::Unreachable(_) => Kind::Unreachable,
            Self::Relayed(relayed) => return relayed.kind(),
            Self::Locked { .. } | Self::Held { .. } => Kind::Locked,
            Self::NotCarried { .. } => Kind::NotCarried,
            Self::NoLocks { .. } => Kind::NoLocks,
            Self::DonatedBuffer { .. } => Kind::DonatedBuffer,
            Self::ForkedProcess(_) => Kind::ForkedProcess,
            Self::Closed { .. } => Kind::Closed,
            Self::ReadOnly { .. } => Kind::ReadOnly,
            Self::NotAStep { .. } => Kind::NotAStep,
            Self::Invalid(_)
            | Self::OtherStepName { .. }
            | Self::BranchExists { .. }
            | Self::Spread { .. } => Kind::Invalid,
            Self::Timeout { .. } => Kind::Timeout,
            Self::Earlier { source, .. } => return source.kind(),
            Self::NoStagingMemory { source, .. } => return source.kind(),
            Self::Reshard(error) => return error.kind(),
            Self::Core(error) => return error.kind(),
        };
        kind.name()
    }

    /// Returns the remedy, which the front end words in its own terms.
    pub fn advice(&self) -> Option<Advice> {
        match self {
            Self::StepExists { latest: None, .. } => Some(Advice::ReplaceOrKeepStep),
            Self::StepExists { .. } => Some(Advice::KeepStep),
            Self::PathExists { advice, .. } => Some(*advice),
            Self::Locked { .. } => Some(Advice::OpenReadOnly),
            Self::ReadOnly { .. } => Some(Advice::OpenWritable),
            Self::NoLocks { .. } => Some(Advice::TakeOver),
            Self::OtherStepName { .. } => Some(Advice::OtherStepName),
            Self::Spread { .. } => Some(Advice::Spread),
            Self::DonatedBuffer { .. } => Some(Advice::CaptureEagerly),
            Self::NoStagingMemory { .. } => Some(Advice::LessStaging),
            Self::Layout { advice, .. } | Self::Held { advice, .. } => *advice,
            Self::Relayed(relayed) => relayed.advice,
            Self::Earlier { source, .. } => source.advice(),
            _ => match self.core() {
                Some(stepwell_core::Error::Torn { .. }) => Some(Advice::GuardUpdates),
                _ => None,
            },
        }
    }

    /// Returns the underlying error of the engine, if there is one.
    pub fn core(&self) -> Option<&stepwell_core::Error> {
        match self {
            Self::SaveFailed { source, .. }
            | Self::DurabilityUncertain { source, .. }
            | Self::NoStagingMemory { source, .. } => Some(source.inner()),
            Self::Core(error) => Some(error.inner()),
            Self::Earlier { source, .. } => source.core(),
            _ => None,
        }
    }

    /// Returns the ranks that did not answer, if it names some.
    pub fn missing(&self) -> Option<&[u32]> {
        match self {
            Self::CoordinationTimeout { missing, .. } | Self::SessionLost { missing, .. } => Some(missing),
            Self::Relayed(relayed) => relayed.missing.as_deref(),
            _ => None,
        }
    }

    /// Returns the errno of the failed file operation, if there is one.
    pub fn errno(&self) -> Option<i32> {
        if let Self::Relayed(relayed) = self {
            return relayed.errno;
        }
        self.core().and_then(stepwell_core::Error::errno)
    }
}

/// Returns the error of a record that cannot be encoded as JSON.
pub(crate) fn unencodable(error: &serde_json::Error) -> Error {
    Error::internal("a record that JSON can hold", error.to_string())
}

/// A remedy for an error, which the front end words in its own terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Advice {
    /// Replace the step, or keep it.
    ReplaceOrKeepStep,
    /// Keep the step: it cannot be replaced.
    KeepStep,
    /// Replace the checkpoint at that path, or pass another one.
    ReplacePath,
    /// Pass another path: this call replaces nothing.
    OtherPath,
    /// Delete the step first: this call replaces nothing.
    DeleteStep,
    /// Open the root to read only.
    OpenReadOnly,
    /// Open the root to write.
    OpenWritable,
    /// Take the root over.
    TakeOver,
    /// Pass another pattern of step names.
    OtherStepName,
    /// Open it as a tier that is spread over machines.
    Spread,
    /// Save earlier, or capture the state before `save` returns.
    CaptureEagerly,
    /// Allow less staging memory, or raise the limit of the process.
    LessStaging,
    /// Change leaves under a guard only.
    GuardUpdates,
    /// Release the hold of this manager first.
    ReleaseHold,
    /// Close the reader that has it first.
    CloseReader,
    /// Declare which copies of a part are replicas.
    NameReplicas,
    /// Declare that a leaf has a value for each rank, or that one rank's value is stored.
    NamePerRank,
}

/// An error that one rank reports to others. They raise the same kind with the same text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{text}")]
pub struct Relayed {
    kind: String,
    text: String,
    errno: Option<i32>,
    advice: Option<Advice>,
    /// The step concerned, if the error names one.
    pub step: Option<u64>,
    /// The failed rank, if the error names one.
    pub rank: Option<u32>,
    /// The missing ranks, if the error names some.
    pub missing: Option<Vec<u32>>,
}

impl Relayed {
    /// Returns the report of an error to other ranks.
    pub fn of(error: &Error) -> Self {
        let step = match error {
            Error::StepExists { step, .. }
            | Error::StepOrder { step, .. }
            | Error::SaveFailed { step, .. }
            | Error::GivenUpOn { step, .. }
            | Error::DurabilityUncertain { step, .. } => Some(*step),
            Error::Relayed(relayed) => relayed.step,
            _ => None,
        };
        let rank = match error {
            Error::RankFailed { rank, .. } => Some(*rank),
            Error::Relayed(relayed) => relayed.rank,
            _ => None,
        };
        Self {
            kind: error.kind().to_owned(),
            text: error.to_string(),
            errno: error.errno(),
            advice: error.advice(),
            step,
            rank,
            missing: error.missing().map(<[u32]>::to_vec),
        }
    }

    /// Returns the report of a rank's failure. It has the failure's kind if `keeps_kind`.
    pub fn of_rank(rank: u32, error: &Error, keeps_kind: bool) -> Self {
        let failed = Self::of(&Error::RankFailed { rank, cause: error.to_string() });
        let kind = if keeps_kind { error.kind().to_owned() } else { failed.kind };
        Self { kind, advice: error.advice(), ..failed }
    }

    /// Returns its kind: see [`Error::kind`].
    pub fn kind(&self) -> &'static str {
        Kind::named(&self.kind).unwrap_or(Kind::RankFailed).name()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_advice_reaches_the_ranks_that_the_leader_answers() {
        let error = Error::PathExists { path: "/x".into(), advice: Advice::ReplacePath };
        assert_eq!(error.advice(), Some(Advice::ReplacePath));
        assert_eq!(Relayed::of_rank(1, &error, false).advice, Some(Advice::ReplacePath));
        let sent = serde_json::to_vec(&Relayed::of(&error)).unwrap();
        let relayed = Error::Relayed(serde_json::from_slice(&sent).unwrap());
        assert_eq!((relayed.kind(), relayed.advice()), (error.kind(), error.advice()));
        let bug = Error::Relayed(Relayed::of(&Error::internal("3 files", "4")));
        assert_eq!(bug.kind(), "internal");
        assert!(bug.to_string().contains("expected 3 files, found 4"), "{bug}");
    }

    #[test]
    fn an_earlier_failure_keeps_its_kind_and_errno() {
        let source = stepwell_core::Error::io("write", "/x", std::io::Error::from_raw_os_error(28));
        let error = Error::Earlier { unsaved: None, source: Arc::new(Error::SaveFailed { step: 7, source }) };
        assert_eq!(error.kind(), "save_failed");
        assert_eq!(error.errno(), Some(28));
        assert!(error.to_string().contains("step 7"));
    }
}
