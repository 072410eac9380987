//! Held buffers as what the engine reads from and writes to.

use std::collections::HashMap;
use std::sync::Arc;

use pyo3::prelude::*;

use stepwell_core::Result;
use stepwell_core::load::Destination;
use stepwell_core::provider::{CaptureTiming, DeviceProvider, HostProvider, StateProvider};
use stepwell_core::sys::{Device, DeviceMemory, DeviceSource, HostSource, HostTarget, UserStream, driver};

use stepwell_manager::Streams;

use super::HeldBuffer;
use crate::events::Parcel;

/// A provider over the `buffer` of an array leaf of a parcel; it shares the parcel, so that the
/// memory stays for as long as the provider lives, and for as long as a device copies from it.
pub fn provider_of(
    parcel: &Arc<Parcel>,
    buffer: &HeldBuffer,
    timing: CaptureTiming,
) -> Result<Arc<dyn StateProvider>> {
    Ok(match device_of(buffer)? {
        None => {
            let provider = HostProvider::with_owner(source_of(buffer)?, Arc::clone(parcel));
            Arc::new(provider.lazy(timing < CaptureTiming::Copied))
        }
        Some(device) => {
            Arc::new(DeviceProvider::new(device_source_of(device, buffer, Arc::clone(parcel))?, timing))
        }
    })
}

/// The device that a buffer is on.
pub fn device_of(buffer: &HeldBuffer) -> Result<Option<Arc<Device>>> {
    buffer.device().map(|ordinal| driver()?.device(ordinal)).transpose()
}

/// The current streams of a framework's devices, by their handles.
pub fn streams_of(py: Python<'_>, handles: &HashMap<u32, u64>) -> PyResult<Streams> {
    let streams = handles.iter().map(|(&device, &handle)| Ok((device, user_stream(handle)?)));
    streams.collect::<Result<_>>().map_err(|error| crate::errors::raise(py, &error))
}

/// A stream of a framework's, by its handle.
fn user_stream(handle: u64) -> Result<UserStream> {
    // SAFETY: the adapters pass the current stream of a device, which lives as long as its
    // framework: those of torch's pool are never destroyed, and one that the caller made and made
    // current is his to keep until the call returns.
    unsafe { UserStream::new(handle) }
}

fn strides_of(buffer: &HeldBuffer) -> Vec<i64> {
    buffer.strides().iter().map(|&stride| stride as i64).collect()
}

fn source_of(buffer: &HeldBuffer) -> Result<HostSource> {
    // SAFETY: the exporter of a held buffer keeps every element that shape and strides name
    // readable until the buffer is released, and the callers store the source beside a share of the
    // parcel that holds it, or read through it with such a share in hand only. That nobody writes
    // meanwhile is what `save` demands of its caller.
    unsafe { HostSource::new(buffer.address(), buffer.itemsize(), &buffer.dims(), &strides_of(buffer)) }
}

fn device_source_of<O: Send + Sync + 'static>(
    device: Arc<Device>,
    buffer: &HeldBuffer,
    owner: Arc<O>,
) -> Result<DeviceSource> {
    let (address, strides) = (buffer.address() as u64, strides_of(buffer));
    // SAFETY: the exporter of a held buffer keeps every element that shape and strides name, on
    // that device, until the buffer is released; the owner holds it.
    unsafe { DeviceSource::new(device, address, buffer.itemsize(), &buffer.dims(), &strides, owner) }
}

/// The memory of a held, writable buffer, from its lowest element to its highest. `owner` holds the
/// buffer.
pub fn target_of<'a, O: Send + Sync + 'static>(
    buffer: &'a HeldBuffer,
    owner: &Arc<O>,
) -> Result<Destination<'a>> {
    let (below, len) = buffer.span();
    let address = buffer.address().wrapping_sub(below);
    if let Some(device) = device_of(buffer)? {
        let owner = Arc::clone(owner);
        // SAFETY: the exporter of a held buffer keeps everything between its lowest and highest
        // element, on that device, until the buffer is released; the owner holds it.
        let memory = unsafe { DeviceMemory::new(device, address as u64, len as u64, owner) };
        return Ok(Destination::Device(Arc::new(memory)));
    }
    // SAFETY: the exporter of a held, writable buffer keeps everything between its lowest and
    // highest element mapped and writable until the buffer is released, which outlives the target
    // by the borrow. That nobody else reads or writes it meanwhile is what `restore` demands of its
    // caller.
    Ok(unsafe { HostTarget::new(address, len)? }.into())
}
