//! One run for each operation that a scenario does: there the process is killed, or that operation
//! fails.
//!
//! A kill is no power cut: what was done and never synced is still there for the next process,
//! which may build on it, and *then* the power goes. So the sweep hands over the living disk; its
//! log goes on with what the next process does.

use stepwell_core::io::simulated::{Action, Fault, SimDisk};

/// Runs `scenario` once for each operation that it does, killed there; then hands the disk, as a
/// new process sees it, to `after`. Gives the number of runs. `scenario` must do the same
/// operations every time; its own errors are its business.
pub fn kills(
    mut prepare: impl FnMut() -> SimDisk,
    mut scenario: impl FnMut(&SimDisk),
    mut after: impl FnMut(&SimDisk) -> Result<(), String>,
) -> Result<u64, String> {
    for number in 0.. {
        let disk = prepare();
        disk.kill_at(disk.operations() + number);
        scenario(&disk);
        if !disk.is_killed() {
            return Ok(number);
        }
        let next = disk.process();
        after(&next).map_err(|message| format!("killed at operation {number}: {message}\n{}", next.log()))?;
    }
    Ok(0)
}

/// Runs `scenario` once for each operation that it does, which then does `action`; then hands the
/// same process's disk to `after`. Gives the number of runs.
pub fn failures(
    action: Action,
    from_then_on: bool,
    mut prepare: impl FnMut() -> SimDisk,
    mut scenario: impl FnMut(&SimDisk),
    mut after: impl FnMut(&SimDisk) -> Result<(), String>,
) -> Result<u64, String> {
    for number in 0.. {
        let disk = prepare();
        let fault = Fault::any(action).after(number);
        let before = disk.operations();
        disk.inject(if from_then_on { fault.from_then_on() } else { fault });
        scenario(&disk);
        let reached = disk.operations() - before > number;
        disk.clear_faults();
        if !reached {
            return Ok(number);
        }
        let context = |message| format!("operation {number} did {action:?}: {message}\n{}", disk.log());
        after(&disk).map_err(context)?;
    }
    Ok(0)
}
