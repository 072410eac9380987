//! Which window is captured when, and by whom: how soon something of it must have happened, and the
//! device that copies it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::windows::{PartSource, Windows};
use crate::provider::CaptureTiming;
use crate::staging::CopyQueue;
use crate::sync::AtomicUsize;

/// A window that is to be filled.
#[derive(Clone, Copy)]
pub(super) struct Due {
    pub window: u32,
    pub timing: CaptureTiming,
    /// Which of the capture's devices copies its first bytes; 0 where none does.
    pub lane: u32,
}

/// The devices that copy, each once.
pub(super) fn queues(all: &Windows) -> Vec<Arc<dyn CopyQueue>> {
    let mut queues: Vec<Arc<dyn CopyQueue>> = Vec::new();
    for leaf in &all.leaves {
        leaf.provider.queues(&mut |queue| {
            if queues.iter().all(|other| other.ordinal() != queue.ordinal()) {
                queues.push(queue);
            }
        });
    }
    queues
}

/// All windows: how soon something of each must have happened, and who copies its first bytes.
pub(super) fn due(all: &Windows, queues: &[Arc<dyn CopyQueue>]) -> Vec<Due> {
    let every = all.list.iter().enumerate();
    let simple =
        queues.is_empty() && all.leaves.iter().all(|leaf| leaf.provider.timing() == CaptureTiming::Copied);
    if simple {
        return every
            .map(|(window, _)| Due { window: window as u32, timing: CaptureTiming::Copied, lane: 0 })
            .collect();
    }
    // Asked once for each leaf: there may be thousands in a window.
    let leaves: Vec<(CaptureTiming, Option<u32>)> = all
        .leaves
        .iter()
        .map(|leaf| {
            let mut lane = None;
            leaf.provider.queues(&mut |queue| {
                let at = queues.iter().position(|other| other.ordinal() == queue.ordinal());
                lane = lane.or(at.map(|at| at as u32));
            });
            (leaf.provider.timing(), lane)
        })
        .collect();
    // Windows of objects alone can wait for those that can.
    let least = leaves.iter().map(|&(timing, _)| timing).min().unwrap_or(CaptureTiming::Copied);
    every
        .map(|(number, window)| {
            let parts = all.parts.get(window.parts.clone()).unwrap_or_default();
            let of = parts.iter().filter_map(|part| {
                let PartSource::Chunk(chunk) = part.source else { return None };
                leaves.get(all.chunks.get(chunk as usize)?.leaf as usize)
            });
            let (mut copied, mut read, mut first) = (least, least, None);
            for &(timing, lane) in of {
                let most = if lane.is_some() { &mut copied } else { &mut read };
                *most = timing.max(*most);
                first = first.or(lane);
            }
            // What no device copies is there once the window is filled: that is no reason to wait
            // for what devices copy beside it.
            let read = if first.is_some() { read.min(CaptureTiming::Enqueued) } else { read };
            Due { window: number as u32, timing: copied.max(read), lane: first.unwrap_or(0) }
        })
        .collect()
}

/// Windows that are taken in order, by a thread of their own as far as there are enough.
pub(super) struct Lane {
    pub windows: Vec<Due>,
    /// The next of these that nobody has taken.
    next: AtomicUsize,
}

/// One lane for each device, so that all of them copy at the same time.
pub(super) fn lanes(windows: Vec<Due>, devices: usize) -> Vec<Lane> {
    let mut lanes: Vec<Vec<Due>> = vec![Vec::new(); devices.max(1)];
    for due in windows {
        if let Some(lane) = lanes.get_mut(due.lane as usize) {
            lane.push(due);
        }
    }
    let lanes = lanes.into_iter().filter(|windows| !windows.is_empty());
    lanes.map(|windows| Lane { windows, next: AtomicUsize::new(0) }).collect()
}

impl Lane {
    /// The next window that nobody has taken.
    pub(super) fn take(&self) -> Option<Due> {
        self.windows.get(self.next.fetch_add(1, Ordering::Relaxed)).copied()
    }
}
