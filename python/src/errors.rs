//! Converts errors of the engine to exceptions of the package. The stable kind of an error
//! determines the class. Leaf, file, block, rank and errno become attributes.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use stepwell_core::{Error as CoreError, Kind};
use stepwell_manager::{Advice, Error as ManagerError};

use crate::hooks::hooks;

/// Returns the exception for an error of the manager.
pub fn raise_manager(py: Python<'_>, error: &ManagerError) -> PyErr {
    build(py, error).unwrap_or_else(|failure| failure)
}

/// Returns the exception for an error of `stepwell_core`.
pub fn raise(py: Python<'_>, error: &CoreError) -> PyErr {
    let error = error.inner();
    let attributes = PyDict::new(py);
    let built = core_attributes(error, &attributes)
        .and_then(|()| make(py, error.kind(), &error.to_string(), &attributes));
    built.unwrap_or_else(|failure| failure)
}

/// Returns the exception for a wrong argument.
pub fn invalid(py: Python<'_>, what: &str) -> PyErr {
    raise_manager(py, &ManagerError::Invalid(what.to_owned()))
}

/// Returns the exception for a use of a closed handle.
pub fn closed(py: Python<'_>, what: &str) -> PyErr {
    make(py, Kind::Closed.name(), what, &PyDict::new(py)).unwrap_or_else(|failure| failure)
}

/// Returns the exception for a failure that must not be lost. Making an exception runs Python, and
/// so signal handlers. If one raises, returns its exception as `Err`.
pub fn build(py: Python<'_>, error: &ManagerError) -> PyResult<PyErr> {
    let attributes = PyDict::new(py);
    if let Some(core) = error.core() {
        core_attributes(core, &attributes)?;
    }
    // An inner error sets its attributes too.
    let inner = match error {
        ManagerError::Earlier { source, .. } => source,
        error => error,
    };
    if let Some(missing) = inner.missing() {
        attributes.set_item("missing", missing.to_vec())?;
    }
    match inner {
        ManagerError::RankFailed { rank, .. } => attributes.set_item("rank", rank)?,
        ManagerError::Relayed(relayed) => attributes.set_item("rank", relayed.rank)?,
        ManagerError::DonatedBuffer { leaf } => attributes.set_item("leaf", leaf)?,
        // The other ranks missed this rank. This rank missed none.
        ManagerError::GivenUpOn { .. } => attributes.set_item("missing", Vec::<u32>::new())?,
        ManagerError::StepExists { step, .. }
        | ManagerError::StepOrder { step, .. }
        | ManagerError::SaveFailed { step, .. }
        | ManagerError::DurabilityUncertain { step, .. } => attributes.set_item("step", step)?,
        _ => {}
    }
    let message = match error.advice() {
        Some(advice) => format!("{error}. {}", advice_text(advice)),
        None => error.to_string(),
    };
    make(py, error.kind(), &message, &attributes)
}

/// Returns the engine's advice in the terms of the Python package.
fn advice_text(advice: Advice) -> &'static str {
    match advice {
        Advice::ReplaceOrKeepStep => {
            "Pass exists=\"replace\" to write it again, or exists=\"skip\" to keep it (a manager's save)"
        }
        Advice::KeepStep => "exists=\"skip\" keeps it",
        Advice::ReplacePath => "Pass exists=\"replace\" to write it again, or another path",
        Advice::OtherPath => "Pass another path, or delete it",
        Advice::DeleteStep => "To have another step under this number, delete() this one first",
        Advice::OpenReadOnly => "Close it, or pass read_only=True to only read",
        Advice::OpenWritable => "Open it without read_only=True",
        Advice::TakeOver => {
            "Pass Options(take_over=True) to take the root over: this manager becomes the writer once no other one has sent a heartbeat for a while"
        }
        Advice::OtherStepName => "The argument is step_name=",
        Advice::Spread => "Pass it as sw.Tier(…, per_machine=True)",
        Advice::CaptureEagerly => "Save it before the call that donates it, or pass snapshot=\"eager\"",
        Advice::LessStaging => {
            "Pass a smaller staging_bytes= to the manager, or raise the limit of this process (`ulimit -v`)"
        }
        Advice::GuardUpdates => {
            "Change it inside update_guard() or a step of an attached optimizer, or after wait_captured(). What \
             changes elsewhere must not be attached, nor saved with snapshot=\"lazy\""
        }
        Advice::ReleaseHold => "End its hold() first",
        Advice::CloseReader => "Close the open checkpoint, the hold() or the watch() that has it first",
        Advice::NameReplicas => "An array says so with replica=, a Megatron tensor with replica_id",
        Advice::NamePerRank => {
            "Pass it as sw.PerRank(…) if it differs on purpose, or as sw.Replicated(…) to store the first rank's (in a sw.torch.TrainState: replicated=[…])"
        }
    }
}

fn core_attributes(error: &CoreError, attributes: &Bound<'_, PyDict>) -> PyResult<()> {
    attributes.set_item("errno", error.errno())?;
    attributes.set_item("file", error.file().map(|file| file.display().to_string()))?;
    match error {
        CoreError::Corrupt { leaf, block, .. } => {
            attributes.set_item("leaf", leaf.as_deref())?;
            attributes.set_item("block", *block)?;
        }
        CoreError::Internal { expected, found } => {
            attributes.set_item("expected", expected)?;
            attributes.set_item("found", found)?;
        }
        CoreError::Leaf { leaf, .. } | CoreError::Torn { leaf } => attributes.set_item("leaf", leaf)?,
        _ => {}
    }
    Ok(())
}

fn make(py: Python<'_>, kind: &str, message: &str, attributes: &Bound<'_, PyDict>) -> PyResult<PyErr> {
    let exception = hooks(py)?.from_engine.bind(py).call1((kind, message, attributes))?;
    Ok(PyErr::from_value(exception))
}
