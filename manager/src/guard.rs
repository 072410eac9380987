//! A guard against panics on the engine's own threads. Other threads wait for them, so a panic
//! becomes an error.

use std::panic::{AssertUnwindSafe, catch_unwind};

use stepwell_core::{Error, Result};

/// Runs a function. A panic becomes an error that names `who`.
pub(crate) fn guarded<T>(who: &str, run: impl FnOnce() -> T) -> Result<T> {
    // Its unfinished changes are behind locks that ignore poisoning.
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| {
        let message = panic
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_default();
        Error::internal("a result", format!("{who} panicked: {message}"))
    })
}
