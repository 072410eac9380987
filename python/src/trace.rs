//! Digests of the leaves of a state, and the traces of a root, as Python sees them.

use std::collections::HashMap;
use std::sync::Arc;

use pyo3::prelude::*;

use stepwell_core::io::{Engine, Purpose};
use stepwell_manager::traces::{self, StoredTrace};
use stepwell_manager::{Manager as Engined, root};

use crate::events::Events;
use crate::location::Location;
use crate::manager::call;
use crate::snapshot::{OnDevices, Snapshot, request};
use crate::state::State;

/// A leaf: its path, its kind, true if it may differ between ranks, and its regions (offset,
/// extent) with their digests.
pub type DigestRow = (String, String, bool, Vec<(Vec<u64>, Vec<u64>, u64)>);

/// A trace: session and number of the save of its step, the name of its file, its JSON, or why that
/// is unreadable.
pub type TraceRow = (String, u64, String, Option<String>, Option<String>);

/// Returns the digests of a state. Detached while they are computed.
pub fn digests(
    py: Python<'_>,
    manager: &Arc<Engined>,
    state: &State,
    streams: &HashMap<u32, u64>,
    events: &Events,
) -> PyResult<Vec<DigestRow>> {
    let devices = OnDevices::new(py, streams, Vec::new())?;
    let (request, parcel) = request(py, 0, state, Snapshot::Eager, devices, events)?;
    let manager = Arc::clone(manager);
    let leaves = call(py, move || manager.digests(&request.state, &request.streams))?;
    parcel.give_back(py);
    let row = |leaf: traces::LeafDigest| {
        let parts = leaf.parts.into_iter();
        let parts = parts.map(|(region, digest)| (region.offset.to_vec(), region.extent.to_vec(), digest));
        (leaf.path, leaf.kind, leaf.drifts, parts.collect())
    };
    Ok(leaves.into_iter().map(row).collect())
}

/// Converts traces.
pub fn rows(traces: Vec<StoredTrace>) -> Vec<TraceRow> {
    let row = |trace: StoredTrace| {
        let (json, why) = match trace.json {
            Ok(json) => (Some(json), None),
            Err(why) => (None, Some(why)),
        };
        (trace.attempt.session, trace.attempt.counter, trace.file, json, why)
    };
    traces.into_iter().map(row).collect()
}

/// Returns all traces of a root.
#[pyfunction]
pub fn read_traces(py: Python<'_>, root: Location) -> PyResult<Vec<TraceRow>> {
    let found = call(py, move || {
        let environment = root.environment(Engine::Auto, Purpose::Read)?;
        traces::read(&*root::open(&environment, &root.path, false)?, None)
    });
    found.map(rows)
}
