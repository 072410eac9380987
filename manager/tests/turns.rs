//! Saves that meet: two threads that save at once, steps that lost files, waits of any length.

mod common;

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use common::*;
use stepwell_core::io::Disk;
use stepwell_manager::{Error, Exists, Options, SaveRequest};

#[test]
fn two_threads_that_save_at_once_do_not_starve_each_other() {
    let world = World::default();
    let options = Options { max_pending: 4, staging_bytes: Some(16 << 20), ..options() };
    let manager = world.open(Options { stall_timeout: Duration::from_secs(3), ..options });
    // Each state takes more slots than there are.
    let state = vec![3_u8; 80 << 20];
    std::thread::scope(|scope| {
        for step in [1, 1_000] {
            let (manager, state) = (&manager, &state);
            scope.spawn(move || {
                for step in step..step + 3 {
                    match manager.save(SaveRequest::new(step, state_of(state))) {
                        Ok(save) => committed(&save),
                        Err(error) => assert_eq!(error.kind(), "step_order", "{error}"),
                    }
                }
            });
        }
    });
    assert!(manager.all_steps().unwrap().ends_with(&[1_000, 1_001, 1_002]));
}

#[test]
fn a_step_that_lost_a_file_is_replaced_and_kept_aside() {
    for exists in [Exists::Error, Exists::Skip, Exists::Replace] {
        let world = World::default();
        let manager = world.open(options());
        commit(&manager, 1);
        commit(&manager, 2);
        let item = world.disk.open_dir(Path::new("/run/step_00000002/i0")).unwrap();
        item.remove_file("00000.data").unwrap();
        assert_eq!(manager.latest_step().unwrap(), Some(1));
        committed(&manager.save(SaveRequest { exists, ..request(2) }).unwrap());
        assert_eq!(manager.latest_step().unwrap(), Some(2));
        assert_restores(&manager, 2);
        let aside = world.names().into_iter().filter(|name| name.contains("quarantine")).count();
        assert_eq!(aside, 1, "{exists:?}: {:?}", world.names());
    }
}

#[test]
fn a_damaged_step_does_not_block_training_below_it() {
    let world = World::default();
    let manager = world.open(options());
    for step in [1, 2, 5, 9] {
        commit(&manager, step);
    }
    for step in ["step_00000005", "step_00000009"] {
        let item = world.disk.open_dir(Path::new("/run").join(step).join("i0").as_path()).unwrap();
        item.remove_file("00000.data").unwrap();
    }
    manager.close(Some(LONG)).unwrap();
    let manager = world.open(options());
    assert_eq!((manager.latest_step().unwrap(), manager.next_step().unwrap()), (Some(2), 3));
    for step in 3..=4 {
        commit(&manager, step);
    }
    // Valid steps still define the order: a step back is refused, and the error names the latest.
    let error = manager.save(request(0)).err().unwrap();
    assert!(matches!(error, Error::StepOrder { step: 0, latest: 4, .. }), "{error}");
    // A save over a damaged step quarantines it.
    for step in 5..=9 {
        commit(&manager, step);
        assert_restores(&manager, step);
    }
    let aside = world.names().into_iter().filter(|name| name.starts_with(".quarantine-step_")).count();
    assert_eq!(aside, 2, "{:?}", world.names());
    assert_eq!(manager.all_steps().unwrap(), (1..=9).collect::<Vec<_>>());
}

#[test]
fn a_wait_without_an_end_waits() {
    let world = World::default();
    let manager = world.open(options());
    let held = world.disk.hold_writes();
    let save = save(&manager, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            held.store(false, Ordering::SeqCst);
        });
        manager.wait_until_finished(Some(Duration::MAX)).unwrap();
    });
    assert!(save.is_done(), "it came back before the save was over");
    manager.close(Some(Duration::MAX)).unwrap();
}

#[test]
fn a_stall_timeout_that_no_clock_holds_is_refused() {
    let world = World::default();
    for seconds in [1_000_000_001, u64::MAX] {
        let options = Options { stall_timeout: Duration::from_secs(seconds), ..options() };
        assert_eq!(world.try_open(options).map(drop).unwrap_err().kind(), "invalid");
    }
}
