//! The table of error kinds: the only place that spells their names.
//!
//! The errors of this crate and of the crates above it answer with these names. Each name belongs
//! to one exception class of the front end. They are part of the public interface.

macro_rules! kinds {
    ($($(#[doc = $doc:literal])* $kind:ident = $name:literal,)*) => {
        /// The subject of an error.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Kind {
            $($(#[doc = $doc])* $kind,)*
        }

        impl Kind {
            /// All kinds.
            pub const ALL: &[Self] = &[$(Self::$kind),*];

            /// Returns the kind with this stable name.
            pub fn named(name: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|kind| kind.name() == name)
            }

            /// Its stable name.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$kind => $name,)*
                }
            }
        }
    };
}

kinds! {
    /// The step, or a checkpoint at that path, exists.
    StepExists = "step_exists",
    /// There is no such step or checkpoint.
    StepNotFound = "step_not_found",
    /// The step was removed while it was read.
    StepGone = "step_gone",
    /// The step is below the newest one.
    StepOrder = "step_order",
    /// Stored bytes are not the bytes that were written.
    CorruptCheckpoint = "corrupt_checkpoint",
    /// The stored and the wanted state do not fit, or the layouts of ranks do not.
    Mismatch = "mismatch",
    /// A leaf cannot be stored or restored into.
    UnsupportedLeaf = "unsupported_leaf",
    /// A save was not committed.
    SaveFailed = "save_failed",
    /// A leaf changed before its capture.
    TornSnapshot = "torn_snapshot",
    /// A step may not survive a power cut.
    DurabilityUncertain = "durability_uncertain",
    /// Another rank failed.
    RankFailed = "rank_failed",
    /// Ranks were missing at the deadline.
    CoordinationTimeout = "coordination_timeout",
    /// A call of all ranks had no answer: they can no longer agree.
    SessionLost = "session_lost",
    /// The transport between ranks does not answer.
    Unreachable = "unreachable",
    /// Nothing happened until the deadline.
    Timeout = "timeout",
    /// Another process holds the root or the step.
    Locked = "locked",
    /// A tier will not get a step.
    NotCarried = "not_carried",
    /// The file system has no locks.
    NoLocks = "no_locks",
    /// An object's own loading function failed. Only the front end raises it.
    LoadFailed = "load_failed",
    /// A resumed run differs from the run that it continues. Only the front end raises it.
    ResumeDiffers = "resume_differs",
    /// The buffer of a leaf was donated before its capture.
    DonatedBuffer = "donated_buffer",
    /// The handle belongs to the parent process.
    ForkedProcess = "forked_process",
    /// A file has a form that this version does not read, or passes a limit.
    Format = "format",
    /// A directory has a step's name but is not a step.
    NotAStep = "not_a_step",
    /// The handle was closed.
    Closed = "closed",
    /// The handle only reads.
    ReadOnly = "read_only",
    /// A file operation failed.
    Io = "io",
    /// A device failed or is missing.
    Device = "device",
    /// The caller's arguments cannot work.
    Invalid = "invalid",
    /// The other half of the operation ended first.
    Cancelled = "cancelled",
    /// An invariant of stepwell does not hold.
    Internal = "internal",
}
