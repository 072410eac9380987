//! The Python bindings, without policy, format or framework logic. The package `stepwell` beside
//! this crate is the public interface. It calls this module, `stepwell._core`.
//!
//! | module | content |
//! |---|---|
//! | [`flatten`] [`values`] | turns a state into a tree and leaves; Python values as object leaves |
//! | [`arrays`] [`ingest`] | arrays of other libraries; memory that Python owns, the only unsafe code |
//! | [`errors`] [`hooks`] | exceptions; functions of the package that this crate calls |
//! | [`manager`] [`save_handle`] [`checkpoint`] [`singular`] | the engine's types, and its functions of a path |
//! | [`matching`] [`options`] | the match of a restore; options |
//! | [`convert`] | conversions into files of other formats, which the package plans |
//! | [`array_group`] | the arrays of a plain subtree, restored together |
//! | [`foreign`] | bytes of other libraries' files, for the package's format modules |
//! | [`msgpack`] | a MessagePack file as Python objects, for the same |
//! | [`pickle`] | the nodes of a pickle as Python objects, for the same |
//! | [`state`] [`snapshot`] | a flattened state; the request of a save |
//! | [`trace`] | digests of a state; the traces of a root |
//! | [`board`] | a coordinator that Python provides |
//! | [`location`] [`credentials`] | paths and URLs; credentials that a function of the user gives |
//! | [`events`] [`log`] [`wait`] | tasks of the notifier thread; the engine's log; waits that handle signals |
#![expect(clippy::needless_pass_by_value, reason = "pyo3 hands arguments over by value")]
use pyo3::prelude::*;

mod array_group;
mod arrays;
mod board;
mod checkpoint;
mod convert;
#[cfg(feature = "remote")]
mod credentials;
mod errors;
mod events;
mod flatten;
mod foreign;
mod hooks;
mod ingest;
mod location;
mod log;
mod manager;
mod matching;
mod msgpack;
mod options;
mod pickle;
mod save_handle;
mod singular;
mod snapshot;
mod state;
mod trace;
mod values;
mod wait;

/// The engine behind the package `stepwell`.
#[pymodule(gil_used = true)]
mod _core {
    use pyo3::prelude::*;
    use stepwell_core::limits;

    #[pymodule_export]
    use crate::array_group::{ArrayGroup, array_group};
    #[pymodule_export]
    use crate::arrays::array_type;
    #[pymodule_export]
    use crate::board::Board;
    #[pymodule_export]
    use crate::checkpoint::Checkpoint;
    #[pymodule_export]
    use crate::convert::{
        Conversion, Sharing, StoredReads, StoredTensor, compare_tensors, discard_conversion,
        leftover_conversions, read_object, removal_of, remove_conversion, remove_objects, remove_output_file,
        stored_level, write_record,
    };
    #[cfg(feature = "remote")]
    #[pymodule_export]
    use crate::credentials::Credentials;
    #[pymodule_export]
    use crate::events::Events;
    #[pymodule_export]
    use crate::foreign::{
        Reading, ZipDirectory, compressed_archives, crc32c, entered_objects, npy_headers, ocdbt_entries,
        read_foreign, read_foreign_ranges, safetensors_header, safetensors_header_length, stored_objects,
        zip_archives,
    };
    #[pymodule_export]
    use crate::manager::{
        Held, Manager, Ticket, carry_within, is_copied, saves_until_full, tier_states, tiers_of,
        wait_carried, wait_until_carried,
    };
    #[pymodule_export]
    use crate::matching::{first_globs, flat_pieces, match_state, renamed};
    #[pymodule_export]
    use crate::msgpack::msgpack;
    #[pymodule_export]
    use crate::pickle::pickle;
    #[pymodule_export]
    use crate::save_handle::SaveHandle;
    #[pymodule_export]
    use crate::singular::{
        PathTicket, add_metrics, cuda, engine_choice, file_system, forget_damaged, keep_staging_memory,
        open_path, path_kind, probe_store, remove_guest, repair, stored_names, supported_calls,
    };
    #[pymodule_export]
    use crate::state::{State, covers, flatten, is_plain, shared_memory};
    #[pymodule_export]
    use crate::trace::read_traces;

    /// The version of the package and its engine.
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");

    /// Limits that the package checks before the engine does, so that its errors name the argument.
    #[pymodule_export]
    const MAX_STEP: u64 = limits::MAX_STEP;
    #[pymodule_export]
    const MAX_DEPTH: u64 = limits::MAX_DEPTH;
    #[pymodule_export]
    const MAX_NAME_BYTES: u64 = limits::MAX_NAME_BYTES;
    #[pymodule_export]
    const MAX_METADATA_BYTES: u64 = limits::MAX_METADATA_BYTES;
    #[pymodule_export]
    const MAX_METADATA_DEPTH: u64 = limits::MAX_METADATA_DEPTH;
    #[pymodule_export]
    const EXPORT_RECORD: &str = stepwell_manager::directory_layout::EXPORT_RECORD;

    #[pymodule_init]
    #[expect(clippy::unnecessary_wraps, reason = "the form that pyo3 calls")]
    fn init(_module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::log::install();
        Ok(())
    }

    /// Returns the stable names of all kinds of errors.
    #[pyfunction]
    fn error_kinds() -> Vec<&'static str> {
        stepwell_core::Kind::ALL.iter().map(|kind| kind.name()).collect()
    }

    /// Returns the names of all dtypes of the format.
    #[pyfunction]
    fn dtype_names() -> Vec<&'static str> {
        stepwell_core::dtype::Dtype::ALL.iter().map(|dtype| dtype.name()).collect()
    }
}
