//! The schedule of a capture: how soon each window must be captured, and the device that copies it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::windows::{Leaf, PartSource, WindowPart, Windows};
use crate::provider::CaptureTiming;
use crate::sync::AtomicUsize;
use crate::sys::Device;

/// Windows that are read ahead of the capture.
const WINDOWS_AHEAD: usize = 4;

/// A window to capture.
#[derive(Clone, Copy)]
pub(super) struct ScheduledWindow {
    pub window: u32,
    pub timing: CaptureTiming,
    /// The position of the device that copies its first bytes; 0 if no device does.
    pub device: u32,
}

/// Returns the devices that the leaves are on, each once.
pub(super) fn devices(all: &Windows) -> Vec<Arc<Device>> {
    let mut devices: Vec<Arc<Device>> = Vec::new();
    for device in all.leaves.iter().flat_map(|leaf| leaf.provider.devices()) {
        if position(&devices, device).is_none() {
            devices.push(Arc::clone(device));
        }
    }
    devices
}

fn position(devices: &[Arc<Device>], device: &Device) -> Option<usize> {
    devices.iter().position(|known| known.ordinal() == device.ordinal())
}

/// Returns all windows in file order.
pub(super) fn schedule(all: &Windows, devices: &[Arc<Device>]) -> Vec<ScheduledWindow> {
    let is_copied = |leaf: &Leaf| leaf.provider.timing() == CaptureTiming::Copied;
    if devices.is_empty() && all.leaves.iter().all(is_copied) {
        let windows = 0..all.list.len() as u32;
        return windows
            .map(|window| ScheduledWindow { window, timing: CaptureTiming::Copied, device: 0 })
            .collect();
    }
    // The timing of each leaf, and its first device. A leaf may be in many windows.
    let leaves: Vec<(CaptureTiming, Option<usize>)> = all
        .leaves
        .iter()
        .map(|leaf| {
            let device = leaf.provider.devices().first();
            (leaf.provider.timing(), device.and_then(|device| position(devices, device)))
        })
        .collect();
    // Windows that contain only objects may be captured as late as the last leaf.
    let latest = leaves.iter().map(|&(timing, _)| timing).min().unwrap_or(CaptureTiming::Copied);
    all.list
        .iter()
        .zip(0_u32..)
        .map(|(window, number)| {
            let parts = all.parts.get(window.parts.clone()).unwrap_or_default();
            let leaves_of_window = parts.iter().filter_map(|part| {
                let PartSource::Chunk(chunk) = part.source else { return None };
                leaves.get(all.chunks.get(chunk as usize)?.leaf as usize)
            });
            let (mut on_device, mut in_host, mut first) = (latest, latest, None);
            for &(timing, device) in leaves_of_window {
                let urgency = if device.is_some() { &mut on_device } else { &mut in_host };
                *urgency = timing.max(*urgency);
                first = first.or(device);
            }
            // Filling the window captures its host leaves at once. They are no reason to wait for
            // the copies of the device.
            let in_host = if first.is_some() { in_host.min(CaptureTiming::Enqueued) } else { in_host };
            ScheduledWindow {
                window: number,
                timing: on_device.max(in_host),
                device: first.unwrap_or(0) as u32,
            }
        })
        .collect()
}

/// Reads the chunk at the end of a window that is captured soon. Returns false if there is nothing
/// to read.
pub(super) fn read_ahead(all: &Windows, window: &ScheduledWindow) -> bool {
    let parts = all.list.get(window.window as usize).and_then(|window| all.parts.get(window.parts.clone()));
    let last = parts.and_then(|parts| parts.last());
    let Some(&WindowPart { source: PartSource::Chunk(chunk), .. }) = last else { return false };
    let chunk = all.chunks.get(chunk as usize);
    chunk.is_some_and(|chunk| {
        all.leaves.get(chunk.leaf as usize).is_some_and(|leaf| leaf.provider.read_ahead(&chunk.local))
    })
}

/// The windows of one device, in order. Each lane has a thread of its own, if there are enough.
pub(super) struct Lane {
    pub windows: Vec<ScheduledWindow>,
    /// The number of windows that threads have taken.
    taken: AtomicUsize,
}

/// Returns one lane per device, so that all devices copy at the same time.
pub(super) fn lanes(windows: Vec<ScheduledWindow>, devices: usize) -> Vec<Lane> {
    let mut lanes: Vec<Vec<ScheduledWindow>> = vec![Vec::new(); devices.max(1)];
    for window in windows {
        if let Some(lane) = lanes.get_mut(window.device as usize) {
            lane.push(window);
        }
    }
    let lanes = lanes.into_iter().filter(|windows| !windows.is_empty());
    lanes.map(|windows| Lane { windows, taken: AtomicUsize::new(0) }).collect()
}

impl Lane {
    /// Takes the next window.
    pub(super) fn take(&self) -> Option<ScheduledWindow> {
        self.windows.get(self.taken.fetch_add(1, Ordering::Relaxed)).copied()
    }

    /// Returns the windows that threads take next.
    pub(super) fn ahead(&self) -> &[ScheduledWindow] {
        let next = self.taken.load(Ordering::Relaxed).min(self.windows.len());
        let end = next.saturating_add(WINDOWS_AHEAD).min(self.windows.len());
        self.windows.get(next..end).unwrap_or_default()
    }
}
