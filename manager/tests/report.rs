//! A root's report on its steps.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests end by it")]

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::*;
use stepwell_core::io::simulated::{Moment, OperationKind};
use stepwell_manager::{Manager, Options, Retention};

#[test]
fn a_report_names_items_bytes_thinning_and_metadata() {
    let world = World::default();
    let thinning = Retention::keep_every_items(1, ["params"]);
    let manager = world.open(keeping(thinning));
    let mut first = request(1);
    first.custom_metadata = serde_json::json!({"tokens": 1, "git": "abc"});
    first.metrics.insert("loss".to_owned(), f64::NAN);
    committed(&manager.save(first).unwrap());
    commit(&manager, 2);
    manager.wait_until_finished(Some(LONG)).unwrap();

    let report = manager.report().unwrap();
    assert_eq!(report.iter().map(|row| row.step).collect::<Vec<_>>(), [Some(1), Some(2)]);
    let names = |row: &stepwell_manager::manager::StepReport| {
        row.items.iter().map(|item| item.name.clone()).collect::<Vec<_>>()
    };
    assert_eq!(names(&report[0]), ["params"]);
    assert_eq!(report[0].dropped.len(), 2);
    assert_eq!(report[0].metadata_keys, ["tokens", "git"]);
    assert_eq!(report[0].metrics["loss"], "NaN");
    assert_eq!(names(&report[1]).len(), 3);
    let manifest = manager.manifest(Some(2)).unwrap();
    for (item, listed) in report[1].items.iter().zip(&manifest.items) {
        let below = format!("{}/", listed.dir);
        let files = manifest.files.iter().filter(|file| file.path.starts_with(&below));
        assert_eq!(item.bytes, files.map(|file| file.length).sum::<u64>(), "{}", item.name);
    }
    assert_eq!(report[1].bytes, report[1].items.iter().map(|item| item.bytes).sum::<u64>());
}

#[test]
fn a_step_retired_during_a_report_is_left_out() {
    let world = World::default();
    let writer = Arc::new(world.open(keeping(Retention::keep_latest(1))));
    commit(&writer, 1);
    let other = world.disk.process();
    let reading = Options { read_only: true, ..options() };
    let reader = Manager::open(Path::new(ROOT), reading, world.environment_of(&other)).unwrap();
    let raced = Arc::new(AtomicBool::new(false));
    let (once, saver) = (Arc::clone(&raced), Arc::clone(&writer));
    // Right before the first of its files is looked for, when it is listed already.
    world.disk.set_hook(Some(Arc::new(move |now, operation| {
        let looks = operation.process == 1
            && operation.kind == OperationKind::Stat
            && operation.path.to_string_lossy().contains("step_00000001/i0");
        if now == Moment::Before && looks && !once.swap(true, Ordering::SeqCst) {
            commit(&saver, 2);
            assert!(saver.wait_for_deletions(LONG).unwrap());
        }
    })));
    let report = reader.report().unwrap();
    world.disk.set_hook(None);
    assert!(raced.load(Ordering::SeqCst));
    assert!(report.iter().all(|row| row.damage.is_none()), "{report:?}");
}
