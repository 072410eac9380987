//! The request of a save: a flattened state for the engine, and when its arrays are captured.

use std::collections::HashMap;
use std::sync::Arc;

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use stepwell_core::format::manifest::{Others, UnsupportedLeaf};
use stepwell_core::provider::{CaptureTiming, StateProvider};
use stepwell_manager::state::Part;
use stepwell_manager::{Error, LeafSource, SaveRequest, StateSource, Streams};
use stepwell_reshard::glob::PathText;

use crate::errors::raise_manager;
use crate::events::{Events, Parcel};
use crate::flatten::{Flat, Leaf};
use crate::ingest::{HeldBuffer, provider_of, streams_of};
use crate::state::State;

/// A framework's description of its devices.
#[derive(Default)]
pub struct OnDevices {
    /// The current streams, by the number of their device.
    pub streams: Streams,
    /// Memory that changes only in guarded updates: address and length in bytes.
    attached: HashMap<usize, usize>,
}

impl OnDevices {
    /// Converts Python's description. Streams are given as handles.
    pub fn new(py: Python<'_>, streams: &HashMap<u32, u64>, attached: Vec<(usize, usize)>) -> PyResult<Self> {
        Ok(Self { streams: streams_of(py, streams)?, attached: attached.into_iter().collect() })
    }

    /// True if all memory of an array changes only in guarded updates.
    fn is_attached(&self, buffer: &HeldBuffer) -> bool {
        let (below, len) = buffer.span();
        let first = buffer.address() as usize - below;
        self.attached.get(&first).is_some_and(|&bytes| len <= bytes)
    }
}

/// Returns a request without metrics and metadata, and a share of the parcel that keeps the arrays'
/// memory. Each provider has a share too. The caller gives its share back when `save` returns.
pub fn request(
    py: Python<'_>,
    step: u64,
    state: &State,
    snapshot: Snapshot,
    devices: OnDevices,
    events: &Events,
) -> PyResult<(SaveRequest, Arc<Parcel>)> {
    let flat = state.take().ok_or_else(|| PyRuntimeError::new_err("this state was handed over before"))?;
    let parcel = Parcel::new(flat, events.clone());
    let flat = parcel.flat().ok_or_else(|| PyRuntimeError::new_err("an empty parcel"))?;
    let source = source(flat, &parcel, snapshot, &devices).map_err(|error| raise_manager(py, &error))?;
    let unsupported = flat.unsupported.iter().map(|(path, reason)| UnsupportedLeaf {
        path: path.clone(),
        reason: reason.clone(),
        others: Others::new(),
    });
    let request = SaveRequest {
        unsupported: unsupported.collect(),
        streams: devices.streams,
        drops_providers: snapshot == Snapshot::Eager,
        ..SaveRequest::new(step, source)
    };
    Ok((request, parcel))
}

/// Returns a flattened state as the manager takes it.
fn source(
    flat: &Flat,
    parcel: &Arc<Parcel>,
    snapshot: Snapshot,
    devices: &OnDevices,
) -> Result<StateSource, Error> {
    let provider = |buffer: &HeldBuffer, immutable: bool| -> Result<Arc<dyn StateProvider>, Error> {
        Ok(provider_of(parcel, buffer, snapshot.timing(buffer, immutable, devices))?)
    };
    let leaf = |(number, leaf): (u32, &Leaf)| -> Result<LeafSource, Error> {
        let drifts = flat.drifting.binary_search(&number).is_ok();
        Ok(match leaf {
            Leaf::Array { dtype, buffer, immutable } => {
                let whole = LeafSource::whole(*dtype, buffer.dims(), provider(buffer, *immutable)?);
                if drifts { whole.of_first() } else { whole }
            }
            Leaf::Sharded { dtype, shape, shards } => {
                let shards = shards.iter().map(|shard| {
                    let part = Part { region: shard.region.clone(), holders: shard.holders.clone() };
                    Ok((part, provider(&shard.buffer, shard.immutable)?))
                });
                LeafSource::sharded(*dtype, shape.clone(), shards.collect::<Result<_, Error>>()?)
            }
            Leaf::Stored { dtype, shape, tensor } => tensor.get().leaf_source(*dtype, shape.clone()),
            Leaf::Object(value) if drifts => LeafSource::Drifting(value.clone()),
            Leaf::Object(value) => LeafSource::Object(value.clone()),
            Leaf::Alias(of) => LeafSource::Alias(*of),
        })
    };
    let cast = |(number, leaf_source): (u32, LeafSource)| -> Result<LeafSource, Error> {
        let path = flat.tree.leaf_path(number);
        match flat.cast.of(PathText::new(&path).as_bytes()) {
            Some(to) => leaf_source.cast(to, &path),
            None => Ok(leaf_source),
        }
    };
    let leaves = (0_u32..).zip(&flat.leaves).map(|one| cast((one.0, leaf(one)?)));
    Ok(StateSource { tree: flat.tree.clone(), leaves: leaves.collect::<Result<_, Error>>()? })
}

/// When the arrays of a state are captured.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Snapshot {
    /// Mutable leaves before `save` returns, immutable ones after it.
    Auto,
    /// All leaves after `save` returns. The caller changes none of them before their capture.
    Lazy,
    /// All leaves before `save` returns.
    Eager,
}

impl Snapshot {
    pub fn named(name: &str) -> PyResult<Self> {
        match name {
            "auto" => Ok(Self::Auto),
            "lazy" => Ok(Self::Lazy),
            "eager" => Ok(Self::Eager),
            other => Err(PyValueError::new_err(format!("snapshot={other:?}"))),
        }
    }

    /// Returns the timing of an array. A mutable array on a device without a known stream cannot be
    /// fenced, so it is copied.
    fn timing(self, buffer: &HeldBuffer, immutable: bool, devices: &OnDevices) -> CaptureTiming {
        match self {
            Self::Eager => CaptureTiming::Copied,
            Self::Lazy => CaptureTiming::Deferred,
            Self::Auto if immutable => CaptureTiming::Deferred,
            Self::Auto => {
                let attached = devices.is_attached(buffer);
                match buffer.device() {
                    None if attached => CaptureTiming::Deferred,
                    Some(device) if devices.streams.contains_key(&device) => {
                        if attached {
                            CaptureTiming::Deferred
                        } else {
                            CaptureTiming::Enqueued
                        }
                    }
                    _ => CaptureTiming::Copied,
                }
            }
        }
    }
}
