//! Valid and invalid steps; retention, rewinding, leases, recovery.

#![allow(clippy::unwrap_used, reason = "tests end by it")]

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use common::*;
use stepwell_core::format::manifest::{Manifest, Others};
use stepwell_core::format::sealed_text;
use stepwell_core::io::Disk;
use stepwell_core::io::simulated::{Action, Fault, ImageNode, OperationKind};
use stepwell_core::load::LoadOptions;
use stepwell_manager::root::{self, PathKind, Root};
use stepwell_manager::{Checkpoint, Error, Mode, Options, Retention, SaveRequest, StepName};

#[test]
fn lookalikes_of_steps_are_neither_chosen_nor_deleted() {
    let world = World::default();
    let manager = world.open(keeping(Retention::keep_latest(1)));
    commit(&manager, 3);
    world.disk.settle();
    let step = world.disk.image().get("/run/step_00000003").unwrap().clone();
    world.disk.plant("/run/step_00000007", &ImageNode::dir(vec![])).unwrap();
    world.disk.plant("/run/step_8", &step).unwrap();
    world.disk.plant("/run/step_00000009", &step).unwrap();
    world.disk.plant("/run/step_00000010", &ImageNode::file(Arc::new(vec![1]))).unwrap();
    world.disk.plant("/run/notes", &step).unwrap();
    assert_eq!(manager.all_steps().unwrap(), [3]);
    let quarantined = manager.quarantined().unwrap();
    let names: Vec<&str> = quarantined.iter().map(|q| q.name.as_str()).collect();
    assert_eq!(names, ["step_00000007", "step_00000009", "step_00000010"]);
    assert!(quarantined[0].reason.contains("no manifest.json"), "{quarantined:?}");
    assert!(quarantined[1].reason.contains("step 3"), "{quarantined:?}");
    commit(&manager, 4);
    assert!(manager.wait_for_deletions(LONG).unwrap());
    assert_eq!(
        world.names(),
        ["notes", "step_00000004", "step_00000007", "step_00000009", "step_00000010", "step_8"]
    );
}

#[test]
fn two_roots_of_one_process_share_nothing() {
    let world = World::default();
    let manager = world.open(options());
    commit(&manager, 1);
    commit(&manager, 2);
    manager.close(None).unwrap();
    world.disk.settle();
    let copy = world.disk.image().get(ROOT).unwrap().clone();
    world.disk.plant("/copy", &copy).unwrap();
    let environment = world.environment();
    let open = |path: &str, session: char| {
        Root::open(Path::new(path), &session.to_string().repeat(32), &options(), &environment, true)
    };
    let steps = |root: &Root| root.list().unwrap().steps.keys().copied().collect::<Vec<u64>>();
    let (one, other) = (open(ROOT, 'a').unwrap(), open("/copy", 'b').unwrap());
    assert_eq!((steps(&one), steps(&other)), (vec![1, 2], vec![1, 2]));
    // A deletion or damage in one root leaves the other alone.
    world.disk.corrupt("/copy/step_00000002/i0/00000.data", |bytes| bytes.truncate(1));
    assert_eq!(one.newest().unwrap().unwrap().manifest.step, 2);
    assert_eq!(other.newest().unwrap().unwrap().manifest.step, 1);
    assert_eq!(one.find(Some(2)).unwrap().manifest, other.find(Some(2)).unwrap().manifest);
    // Each has its own writer.
    assert!(matches!(open("/copy", 'c'), Err(Error::Locked { .. })));
    one.release();
    assert_eq!(steps(&open(ROOT, 'd').unwrap()), [1, 2]);
    assert!(matches!(open("/copy", 'e'), Err(Error::Locked { .. })));
}

#[test]
fn a_commit_sets_aside_what_has_its_name_and_is_no_step() {
    let world = World::default();
    let manager = world.open(options());
    world
        .disk
        .plant("/run/step_00000001", &ImageNode::dir(vec![("x".into(), ImageNode::file(Arc::new(vec![1])))]))
        .unwrap();
    commit(&manager, 1);
    assert_restores(&manager, 1);
    let names = world.names();
    assert!(names[0].starts_with(".quarantine-step_00000001-"), "{names:?}");
    assert_eq!(world.disk.bytes(&format!("/run/{}/x", names[0])).unwrap().as_slice(), [1]);
}

#[test]
fn an_empty_directory_of_the_name_is_not_silently_replaced() {
    let world = World::default();
    let manager = world.open(options());
    world.disk.plant("/run/step_00000001", &ImageNode::dir(vec![])).unwrap();
    commit(&manager, 1);
    assert_eq!(world.names().len(), 2);
}

#[test]
fn a_damaged_step_is_skipped_and_a_copied_one_stays_one() {
    let world = World::default();
    let manager = world.open(options());
    commit(&manager, 1);
    commit(&manager, 2);
    commit(&manager, 3);
    assert!(world.disk.corrupt("/run/step_00000002/i0/00000.data", |bytes| bytes.truncate(5000)));
    assert!(world.disk.corrupt("/run/step_00000003/manifest.json", |bytes| bytes[100] ^= 1));
    manager.reload().unwrap();
    assert_eq!(manager.latest_step().unwrap(), Some(1));
    assert_eq!(manager.all_steps().unwrap(), [1, 2]);
    manager.close(Some(LONG)).unwrap();

    let step = world.disk.image().get("/run/step_00000001").unwrap().clone();
    let copy = World::default();
    copy.disk.plant("/run", &ImageNode::dir(vec![("step_00000001".into(), step)])).unwrap();
    let manager = copy.open(options());
    assert_restores(&manager, 1);
}

#[test]
fn a_flipped_metadata_byte_keeps_the_step_from_being_read() {
    let world = World::default();
    let manager = world.open(options());
    commit(&manager, 1);
    manager.close(Some(LONG)).unwrap();
    for file in ["manifest.json", "i0/index"] {
        let path = format!("/run/step_00000001/{file}");
        let length = world.disk.bytes(&path).unwrap().len();
        for at in (0..length).step_by(7) {
            world.disk.corrupt(&path, |bytes| bytes[at] ^= 0x10);
            let opened = Checkpoint::open(Path::new("/run/step_00000001"), &world.environment());
            assert!(opened.is_err(), "{file} byte {at}");
            world.disk.corrupt(&path, |bytes| bytes[at] ^= 0x10);
        }
    }
    Checkpoint::open(Path::new("/run/step_00000001"), &world.environment()).unwrap();
}

#[test]
fn retention_is_applied_after_each_commit_and_explains_itself() {
    let world = World::default();
    let manager = world.open(keeping(Retention::keep_latest(2) | Retention::keep_every(4)));
    for step in [0, 2, 4, 6, 8, 10] {
        commit(&manager, step);
    }
    assert_eq!(manager.all_steps().unwrap(), [0, 4, 8, 10]);
    assert_eq!(manager.plan_retention().unwrap().kept().count(), 4);
    assert!(manager.wait_for_deletions(LONG).unwrap());
    assert_eq!(world.names().len(), 4);
}

#[test]
fn a_save_that_fails_evicts_nothing() {
    let world = World::default();
    let manager = world.open(keeping(Retention::keep_latest(1)));
    commit(&manager, 1);
    world.disk.inject(Fault::on(OperationKind::Rename, Action::Fail(5)).at("step_00000002"));
    world.disk.inject(Fault::on(OperationKind::Sync, Action::Fail(5)).at("manifest"));
    assert!(save(&manager, 2).wait(Some(LONG)).unwrap().unwrap().error().is_some());
    assert_eq!(manager.all_steps().unwrap(), [1]);
    assert_restores(&manager, 1);
}

#[test]
fn the_best_and_the_newest_stay_across_a_restart() {
    let world = World::default();
    let retention = Retention::keep_best(2, "loss", Mode::Min);
    for half in [[0.5, 0.1, 0.4], [0.9, f64::NAN, 0.2]] {
        let manager = world.open(keeping(retention.clone()));
        for loss in half {
            let step = manager.next_step().unwrap();
            let metrics = BTreeMap::from([("loss".to_owned(), loss)]);
            committed(&manager.save(SaveRequest { metrics, ..request(step) }).unwrap());
        }
        manager.close(Some(LONG)).unwrap();
    }
    let manager = world.open(keeping(retention));
    assert_eq!(manager.all_steps().unwrap(), [1, 5]);
    assert_eq!(manager.best_step(None).unwrap(), Some(1));
}

#[test]
fn old_steps_are_thinned_to_the_items_that_are_asked_for() {
    let world = World::default();
    let manager = world.open(keeping(Retention::keep_latest(1) | Retention::keep_every_items(1, ["params"])));
    commit(&manager, 1);
    commit(&manager, 2);
    let thin = manager.checkpoint(Some(1)).unwrap();
    assert_eq!(read(&thin), [("params/w".to_owned(), vec![1; 3000])]);
    assert_eq!(thin.manifest().dropped.len(), 2);
    assert!(world.disk.image().get("/run/step_00000001/i2").is_none());
    assert_restores(&manager, 2);
    assert_eq!(manager.plan_retention().unwrap().thinned().count(), 0);
}

#[test]
fn notes_of_a_later_version_survive_thinning() {
    let world = World::default();
    let manager = world.open(options());
    commit(&manager, 1);
    manager.close(Some(LONG)).unwrap();
    let noted = || ("from_the_future".to_owned(), serde_json::json!({"x": [1, "ü"]}));
    world.disk.corrupt("/run/step_00000001/manifest.json", |bytes| {
        let mut manifest = Manifest::decode(bytes, Path::new("manifest.json")).unwrap();
        manifest.others.extend([noted()]);
        manifest.items.iter_mut().for_each(|item| item.others.extend([noted()]));
        manifest.files.iter_mut().for_each(|file| file.others.extend([noted()]));
        *bytes = manifest.encode().unwrap();
    });
    let root_json = || -> serde_json::Map<String, serde_json::Value> {
        let bytes = world.disk.bytes("/run/.stepwell/root.json").unwrap();
        serde_json::from_slice(sealed_text::unseal(&bytes).unwrap()).unwrap()
    };
    world.disk.corrupt("/run/.stepwell/root.json", |bytes| {
        let mut root: serde_json::Map<String, serde_json::Value> =
            serde_json::from_slice(sealed_text::unseal(bytes).unwrap()).unwrap();
        root.extend([noted()]);
        *bytes = serde_json::to_vec(&root).unwrap();
        sealed_text::seal(bytes);
    });
    let retention = Retention::keep_latest(1) | Retention::keep_every_items(1, ["params"]);
    // The root's metadata changes too, so that its file is rewritten.
    let manager = world.open(Options { root_metadata: serde_json::json!({"run": 1}), ..keeping(retention) });
    commit(&manager, 2);
    let thin = manager.manifest(Some(1)).unwrap();
    assert_eq!((thin.items.len(), thin.dropped.len()), (1, 2));
    let is_noted = |others: &Others| *others == Others::from_iter([noted()]);
    assert!(is_noted(&thin.others) && is_noted(&thin.items[0].others) && is_noted(&thin.files[0].others));
    let root = root_json();
    assert_eq!((root.get("from_the_future"), &root["metadata"]["run"]), (Some(&noted().1), &1.into()));
}

#[test]
fn an_interrupted_thinning_is_finished_by_the_next_writer() {
    let world = World::default();
    let manager = world.open(keeping(Retention::keep_latest(1) | Retention::keep_every_items(1, ["params"])));
    commit(&manager, 1);
    world
        .disk
        .inject(Fault::on(OperationKind::RemoveFile, Action::Fail(5)).at("step_00000001/i1").from_then_on());
    commit(&manager, 2);
    assert!(world.disk.image().get("/run/step_00000001/i2").is_some());
    manager.close(Some(LONG)).unwrap();
    world.disk.clear_faults();
    let manager = world.open(options());
    assert!(world.disk.image().get("/run/step_00000001/i2").is_none());
    assert_eq!(read(&manager.checkpoint(Some(1)).unwrap()).len(), 1);
}

#[test]
fn a_step_stays_listed_while_a_reader_has_leased_it() {
    let world = World::default();
    let manager = world.open(keeping(Retention::keep_latest(1)));
    commit(&manager, 1);
    let reader = Checkpoint::open(Path::new("/run/step_00000001"), &world.environment()).unwrap();
    assert!(reader.is_leased());
    commit(&manager, 2);
    assert_eq!(manager.all_steps().unwrap(), [1, 2]);
    assert_eq!(read(&reader)[0].1, vec![1; 3000]);
    drop(reader);
    commit(&manager, 3);
    assert_eq!(manager.all_steps().unwrap(), [3]);
    manager.close(Some(LONG)).unwrap();
    assert_eq!(world.names(), ["step_00000003"]);
}

#[test]
fn a_reader_finishes_with_a_step_that_was_retired() {
    let world = World::default();
    // The bound of a lease is over at once.
    let retention = keeping(Retention::keep_latest(1));
    let manager = world.open(Options { grace: Duration::ZERO, ..retention });
    commit(&manager, 1);
    let reader = Checkpoint::open(Path::new("/run/step_00000001"), &world.environment()).unwrap();
    commit(&manager, 2);
    assert_eq!(manager.all_steps().unwrap(), [2]);
    assert!(manager.wait_for_deletions(LONG).unwrap());
    assert_eq!(read(&reader)[0].1, vec![1; 3000]);
    assert_eq!(world.names().len(), 2);
    drop(reader);
    manager.close(Some(LONG)).unwrap();
    assert_eq!(world.names(), ["step_00000002"]);
}

#[test]
fn a_reader_that_died_holds_nothing() {
    let world = World::default();
    let manager = world.open(keeping(Retention::keep_latest(1)));
    commit(&manager, 1);
    let other = world.disk.process();
    let reader = Checkpoint::open(Path::new("/run/step_00000001"), &world.environment_of(&other)).unwrap();
    other.kill();
    commit(&manager, 2);
    manager.close(Some(LONG)).unwrap();
    assert_eq!(world.names(), ["step_00000002"]);
    drop(reader);
}

#[test]
fn a_held_step_stays_as_long_as_it_is_held() {
    let world = World::default();
    let manager = world.open(keeping(Retention::keep_latest(1)));
    commit(&manager, 1);
    let hold = manager.hold(1).unwrap();
    commit(&manager, 2);
    assert_eq!(manager.all_steps().unwrap(), [1, 2]);
    drop(hold);
    commit(&manager, 3);
    assert_eq!(manager.all_steps().unwrap(), [3]);
}

#[test]
fn a_rewind_sets_newer_steps_aside_and_training_continues() {
    let world = World::default();
    let manager = world.open(options());
    for step in 1..=4 {
        commit(&manager, step);
    }
    let (branch, moved) = manager.rewind(2, Some("before")).unwrap();
    assert_eq!((branch.as_str(), moved), ("before", vec![4, 3]));
    assert_eq!(manager.all_steps().unwrap(), [1, 2]);
    assert_eq!(manager.next_step().unwrap(), 3);
    committed(&manager.save(SaveRequest::new(3, state(33))).unwrap());
    assert_value(&manager, 3, 33);
    let aside =
        Checkpoint::open(Path::new("/run/.branch-before.step_00000004"), &world.environment()).unwrap();
    assert_eq!(read(&aside)[0].1, vec![4; 3000]);
    assert_eq!(manager.rewind(9, None).unwrap_err().kind(), "step_not_found");
    assert_eq!(manager.rewind(1, Some("../x")).unwrap_err().kind(), "invalid");
}

#[test]
fn a_rewind_to_a_damaged_step_is_refused() {
    let world = World::default();
    let manager = world.open(options());
    for step in 1..=3 {
        commit(&manager, step);
    }
    assert!(world.disk.corrupt("/run/step_00000002/i0/00000.data", |bytes| bytes.truncate(5000)));
    let before = world.names();
    let error = manager.rewind(2, Some("b")).unwrap_err();
    assert_eq!(error.kind(), "corrupt_checkpoint");
    assert!(
        error.to_string().contains("step_00000002") && error.to_string().contains("5000 bytes"),
        "{error}"
    );
    assert_eq!(world.names(), before);
    assert_eq!(manager.latest_step().unwrap(), Some(3));
    manager.rewind(1, Some("b")).unwrap();
    assert_eq!(manager.latest_step().unwrap(), Some(1));
}

#[test]
fn a_rewind_that_is_interrupted_leaves_a_latest_between_the_two() {
    let world = World::default();
    let manager = world.open(options());
    for step in 1..=4 {
        commit(&manager, step);
    }
    world.disk.inject(Fault::on(OperationKind::Rename, Action::Fail(5)).at("step_00000003"));
    manager.rewind(1, Some("b")).unwrap_err();
    assert_eq!(manager.all_steps().unwrap(), [1, 2, 3]);
    // A branch of that name may hold another line of steps by now, so the rest needs a new one.
    assert_eq!(manager.rewind(1, Some("b")).unwrap_err().kind(), "invalid");
    manager.rewind(1, Some("c")).unwrap();
    assert_eq!(manager.all_steps().unwrap(), [1]);
}

#[test]
fn a_rewind_to_an_existing_branch_is_refused() {
    let world = World::default();
    let manager = world.open(options());
    for step in 1..=4 {
        commit(&manager, step);
    }
    manager.rewind(2, Some("b")).unwrap();
    // True if a name of the new line is taken there or none.
    for steps in [vec![3], vec![4, 5], vec![9]] {
        for &step in &steps {
            commit(&manager, step);
        }
        let before = world.names();
        let error = manager.rewind(2, Some("b")).unwrap_err();
        assert_eq!(error.kind(), "invalid");
        let text = error.to_string();
        assert!(text.contains("\"b\"") && text.contains("another name"), "{text}");
        assert_eq!(world.names(), before);
    }
    // Names that begin like it are others.
    manager.rewind(2, Some("b-2")).unwrap();
    assert_eq!(manager.all_steps().unwrap(), [1, 2]);
    // Without steps to move, the branch name is not checked.
    manager.rewind(2, Some("b")).unwrap();
}

#[test]
fn the_next_writer_removes_dead_leftovers_only() {
    let world = World::default();
    let killed = world.disk.process();
    let manager =
        stepwell_manager::Manager::open(Path::new(ROOT), options(), world.environment_of(&killed)).unwrap();
    commit(&manager, 1);
    kill_at_write(&killed, ".tmp-00000002");
    assert!(save(&manager, 2).wait(Some(LONG)).unwrap().unwrap().error().is_some());
    world.disk.set_hook(None);
    assert!(world.names().iter().any(|name| name.starts_with(".tmp-00000002")), "{:?}", world.names());
    drop(manager);

    let manager = world.open(options());
    assert_restores(&manager, 1);
    commit(&manager, 2);
    manager.close(Some(LONG)).unwrap();
    assert_eq!(world.names(), ["step_00000001", "step_00000002"]);
}

#[test]
fn a_writer_that_was_taken_over_commits_nothing_more() {
    let world = World::default();
    let manager = world.open(options());
    commit(&manager, 1);
    let epoch = br#"{"epoch": 9, "session": "ffffffffffffffffffffffffffffffff", "owner": "another"}"#;
    world.disk.corrupt("/run/.stepwell/epoch", |bytes| *bytes = epoch.to_vec());
    let error = save(&manager, 2).wait(Some(LONG)).unwrap().unwrap().error().cloned().unwrap();
    assert_eq!(error.kind(), "locked");
    assert!(error.to_string().contains("another"), "{error}");
    assert_eq!(world.names(), ["step_00000001"]);
}

#[test]
fn a_full_disk_is_met_by_emptying_the_trash_once() {
    let world = World::default();
    let manager = world.open(keeping(Retention::keep_latest(1)));
    commit(&manager, 1);
    world.disk.inject(Fault::on(OperationKind::CreateDir, Action::Fail(28)).at(".tmp-00000002"));
    commit(&manager, 2);
    world.disk.inject(Fault::on(OperationKind::CreateFile, Action::Fail(28)).at("i1"));
    commit(&manager, 3);
    world.disk.inject(Fault::on(OperationKind::CreateFile, Action::Fail(28)).at("i1").from_then_on());
    let error = save(&manager, 4).wait(Some(LONG)).unwrap().unwrap().error().cloned().unwrap();
    assert_eq!(error.errno(), Some(28));
    assert_eq!(manager.all_steps().unwrap(), [3]);
    assert_restores(&manager, 3);
}

#[test]
fn a_changed_pattern_reads_old_names_and_writes_the_new_one() {
    let world = World::default();
    let manager = world.open(Options { step_name: Some(StepName::new("", 0).unwrap()), ..options() });
    commit(&manager, 7);
    manager.close(Some(LONG)).unwrap();
    // Nothing said: the root's own pattern.
    let manager = world.open(options());
    assert_eq!(manager.all_steps().unwrap(), [7]);
    manager.close(Some(LONG)).unwrap();
    let both = StepName::default().also_reading(vec![StepName::new("", 0).unwrap()]).unwrap();
    let manager = world.open(Options { step_name: Some(both), ..options() });
    commit(&manager, 8);
    assert_eq!(manager.all_steps().unwrap(), [7, 8]);
    assert_eq!(world.names(), ["7", "step_00000008"]);
}

#[test]
fn of_two_directories_the_writable_name_is_listed() {
    // Many, as directories are listed in any order.
    let steps = 1..9;
    let (plain, other) = (StepName::new("", 0).unwrap(), StepName::default());
    let (world, elsewhere) = (World::default(), World::default());
    let both = plain.also_reading(vec![other]).unwrap();
    let manager = world.open(Options { step_name: Some(both.clone()), ..options() });
    let copied = elsewhere.open(options());
    // Both worlds draw the same numbers: from here on not in step.
    commit(&copied, 0);
    for step in steps.clone() {
        commit(&manager, step);
        manager.add_metrics(step, &BTreeMap::from([("accuracy".to_owned(), 0.5)])).unwrap();
        commit(&copied, step);
    }
    let attempt =
        |manager: &stepwell_manager::Manager, step| manager.manifest(Some(step)).unwrap().attempt.clone();
    let attempts: Vec<_> = steps.clone().map(|step| attempt(&manager, step)).collect();
    manager.close(Some(LONG)).unwrap();
    let image = elsewhere.disk.image();
    for step in steps.clone() {
        let path = format!("{ROOT}/step_{step:08}");
        world.disk.plant(&path, image.get(&path).unwrap()).unwrap();
    }
    let manager = world.open(Options { step_name: Some(both), ..options() });
    assert!(manager.all_steps().unwrap().into_iter().eq(steps.clone()));
    assert_eq!(steps.clone().map(|step| attempt(&manager, step)).collect::<Vec<_>>(), attempts);
    for step in steps {
        assert_eq!(manager.metrics(step).unwrap().get("accuracy"), Some(&0.5));
    }
}

#[test]
fn a_pattern_that_misses_existing_steps_is_refused() {
    let world = World::default();
    let plain = || StepName::new("", 0).unwrap();
    let manager = world.open(Options { step_name: Some(plain()), ..options() });
    commit(&manager, 7);
    let metrics = BTreeMap::from([("accuracy".to_owned(), 0.5)]);
    manager.add_metrics(7, &metrics).unwrap();
    manager.close(Some(LONG)).unwrap();
    let before = world.disk.image();
    let other = StepName::new("ckpt-", 3).unwrap();
    let error = world.try_open(Options { step_name: Some(other.clone()), ..options() }).err().unwrap();
    assert!(matches!(&error, Error::OtherStepName { example, .. } if example == "7"), "{error}");
    assert_eq!(error.kind(), "invalid");
    for said in [
        r#"StepName("", 0)"#,
        r#"StepName("ckpt-", 3)"#,
        r#"StepName("ckpt-", 3, also_read=(StepName("", 0),))"#,
    ] {
        assert!(error.to_string().contains(said), "{error}");
    }
    assert_eq!(world.disk.image(), before);
    // As the error says; and from there on the root knows both.
    let both = other.clone().also_reading(vec![plain()]).unwrap();
    let manager = world.open(Options { step_name: Some(both), ..options() });
    commit(&manager, 8);
    assert_eq!(manager.metrics(7).unwrap(), metrics);
    manager.close(Some(LONG)).unwrap();
    let error = world.try_open(Options { step_name: Some(other.clone()), ..options() }).err().unwrap();
    assert!(matches!(&error, Error::OtherStepName { example, .. } if example == "7"), "{error}");
    // The old pattern is forgotten once no step uses it.
    let manager = world.open(options());
    manager.delete(7).unwrap();
    manager.close(Some(LONG)).unwrap();
    assert_eq!(world.open(Options { step_name: Some(other), ..options() }).all_steps().unwrap(), [8]);
}

#[test]
fn metrics_of_damaged_steps_of_a_former_pattern_stay() {
    let world = World::default();
    let manager = world.open(Options { step_name: Some(StepName::new("", 0).unwrap()), ..options() });
    let metrics = BTreeMap::from([("accuracy".to_owned(), 0.5)]);
    for step in [7, 8] {
        commit(&manager, step);
        manager.add_metrics(step, &metrics).unwrap();
    }
    manager.close(Some(LONG)).unwrap();
    for step in [7, 8] {
        world.disk.corrupt(&format!("/run/{step}/manifest.json"), |bytes| bytes[100] ^= 1);
    }
    world.open(Options { step_name: Some(StepName::default()), ..options() }).close(Some(LONG)).unwrap();
    assert_eq!(sidecars(&world), 2);
}

#[test]
fn a_deleted_step_may_be_saved_again_at_once() {
    let world = World::default();
    let manager = world.open(options());
    commit(&manager, 1);
    manager.delete(1).unwrap();
    assert_eq!(manager.all_steps().unwrap(), [] as [u64; 0]);
    committed(&manager.save(SaveRequest::new(1, state(9))).unwrap());
    manager.delete(1).unwrap();
    manager.close(Some(LONG)).unwrap();
    assert_eq!(world.names(), [] as [&str; 0]);
}

#[test]
fn listing_again_reads_no_manifest_again() {
    let world = World::default();
    let manager = world.open(options());
    for step in 0..5 {
        commit(&manager, step);
    }
    manager.all_steps().unwrap();
    world.disk.inject(Fault::on(OperationKind::Read, Action::Fail(5)).at("manifest.json").from_then_on());
    assert_eq!(manager.all_steps().unwrap(), [0, 1, 2, 3, 4]);
}

#[test]
fn a_temporary_cannot_be_opened_as_a_checkpoint() {
    let world = World::default();
    let path = format!("/run/.tmp-00000001-{}-0", "0".repeat(32));
    let error = Checkpoint::open(Path::new(&path), &world.environment()).err().unwrap();
    assert_eq!(error.kind(), "not_a_step");
}

fn sidecars(world: &World) -> usize {
    world.disk.image().get("/run/.stepwell/metrics").unwrap().entries().unwrap().len()
}

#[test]
fn metrics_of_gone_steps_are_removed_by_the_next_writer() {
    let world = World::default();
    let manager = world.open(options());
    let metrics = BTreeMap::from([("accuracy".to_owned(), 0.5)]);
    for step in 1..=5 {
        commit(&manager, step);
        manager.add_metrics(step, &metrics).unwrap();
    }
    manager.rewind(4, Some("kept")).unwrap();
    manager.close(Some(LONG)).unwrap();
    // Deleted by hand; damaged; killed in the middle of writing a sidecar, and of one for a step
    // that is gone.
    let root = world.disk.image().get("/run").unwrap().clone();
    let entries = root.entries().unwrap().iter().filter(|(name, _)| name.as_ref() != "step_00000001");
    let gone = ImageNode::dir(entries.cloned().collect());
    let other = World { clock: world.clock.clone(), rng: world.rng.clone(), ..World::default() };
    other.disk.plant("/run", &gone).unwrap();
    other.disk.corrupt("/run/step_00000002/manifest.json", |bytes| bytes[100] ^= 1);
    let half = format!("/run/.stepwell/metrics/.{}-7-{}.json.new", "a".repeat(32), "b".repeat(32));
    other
        .disk
        .plant(&half, &ImageNode::file(Arc::new(b"{\"step\": 9, \"unix_ns\": 0, \"metrics\": {}}".to_vec())))
        .unwrap();
    assert_eq!(sidecars(&other), 6);
    let manager = other.open(options());
    assert_eq!(sidecars(&other), 4, "of 2 (damaged), 3, 4 and 5 (in a branch)");
    assert_eq!(manager.metrics(3).unwrap(), metrics);
    manager.close(Some(LONG)).unwrap();
    // The damage is undone, and the metrics are there.
    other.disk.corrupt("/run/step_00000002/manifest.json", |bytes| bytes[100] ^= 1);
    assert_eq!(other.open(options()).metrics(2).unwrap(), metrics);
}

#[test]
fn a_reader_removes_no_metrics() {
    let world = World::default();
    let manager = world.open(options());
    commit(&manager, 1);
    manager.add_metrics(1, &BTreeMap::from([("accuracy".to_owned(), 0.5)])).unwrap();
    manager.close(Some(LONG)).unwrap();
    world.disk.corrupt("/run/step_00000001/manifest.json", Vec::clear);
    world.open(Options { read_only: true, ..options() }).close(Some(LONG)).unwrap();
    assert_eq!(sidecars(&world), 1);
}

#[test]
fn a_checkpoint_is_read_by_the_options_of_its_manager() {
    let world = World::default();
    commit(&world.open(options()), 1);
    let reads = |queue_depth, stall_timeout| {
        let told = Options { read_only: true, queue_depth, stall_timeout, ..options() };
        world.open(told).checkpoint(None).unwrap().load_options().clone()
    };
    let ours = LoadOptions::default();
    let minutes = Duration::from_secs(600);
    assert_eq!(reads(None, minutes), LoadOptions { stall_timeout: minutes, ..ours.clone() });
    let told = LoadOptions { stall_timeout: Duration::from_secs(3), queue_depth: 2, ..ours.clone() };
    assert_eq!(reads(Some(2), Duration::from_secs(3)), told);
    let path = Path::new("/run/step_00000001");
    let alone = Checkpoint::open(path, &world.environment()).unwrap();
    assert_eq!(*alone.load_options(), LoadOptions { stall_timeout: minutes, ..ours });
}

#[test]
fn a_disk_that_does_not_answer_is_no_place_with_nothing_there() {
    let world = World::default();
    let manager = world.open(options());
    commit(&manager, 1);
    manager.close(Some(LONG)).unwrap();
    let environment = world.environment();
    let at = |path: &str| root::path_kind(&environment, Path::new(path));
    assert_eq!(at("/nowhere").unwrap(), PathKind::Absent);
    assert_eq!(at(ROOT).unwrap(), PathKind::Root);
    assert_eq!(at("/run/step_00000001").unwrap(), PathKind::Checkpoint);
    assert_eq!(at("/run/step_00000001/i0").unwrap(), PathKind::Directory);
    assert_eq!(at("/run/step_00000001/manifest.json").unwrap(), PathKind::Absent);
    for kind in [OperationKind::OpenDir, OperationKind::Stat] {
        world.disk.inject(Fault::on(kind, Action::Fail(5)));
        assert!(at(ROOT).is_err(), "{kind:?}");
        world.disk.clear_faults();
    }
}

#[test]
fn a_root_json_that_is_damaged_is_named_with_what_to_do() {
    let world = World::default();
    let manager = world.open(options());
    commit(&manager, 1);
    manager.close(Some(LONG)).unwrap();
    world.disk.corrupt("/run/.stepwell/root.json", |bytes| bytes.truncate(20));
    for read_only in [false, true] {
        let error = world.try_open(Options { read_only, ..options() }).err().unwrap();
        assert_eq!(error.kind(), "format");
        let text = error.to_string();
        assert!(text.contains("/run/.stepwell/root.json") && text.contains("delete this file"), "{text}");
    }
    // The advice of the error works.
    let process = world.disk.process();
    process.open_dir(Path::new("/run/.stepwell")).unwrap().remove_file("root.json").unwrap();
    assert_eq!(world.open(options()).all_steps().unwrap(), [1]);
}

#[test]
fn every_flipped_byte_of_root_json_is_an_error() {
    let world = World::default();
    let manager = world.open(options());
    commit(&manager, 1);
    manager.close(Some(LONG)).unwrap();
    let length = world.disk.bytes("/run/.stepwell/root.json").unwrap().len();
    for at in 0..length {
        let flip = |bytes: &mut Vec<u8>| bytes[at] ^= 1;
        assert!(world.disk.corrupt("/run/.stepwell/root.json", flip));
        for read_only in [true, false] {
            let error = world.try_open(Options { read_only, ..options() }).err();
            assert_eq!(error.map(|error| error.kind()), Some("format"), "byte {at}");
        }
        assert!(world.disk.corrupt("/run/.stepwell/root.json", flip));
    }
    assert_eq!(world.open(options()).all_steps().unwrap(), [1]);
}

#[test]
fn a_flipped_byte_of_later_metrics_is_not_believed() {
    let world = World::default();
    let manager = world.open(options());
    commit(&manager, 1);
    manager.add_metrics(1, &BTreeMap::from([("loss".to_owned(), 1.5)])).unwrap();
    let dir = world.disk.process().open_dir(Path::new("/run/.stepwell/metrics")).unwrap();
    let file = format!("/run/.stepwell/metrics/{}", dir.unsorted_entries().unwrap()[0].name);
    manager.close(Some(LONG)).unwrap();
    let found = || world.open(Options { read_only: true, ..options() }).metrics(1).unwrap();
    assert_eq!(found(), BTreeMap::from([("loss".to_owned(), 1.5)]));
    let change = |bytes: &mut Vec<u8>| {
        let at = bytes.windows(3).position(|three| three == b"1.5").unwrap();
        bytes[at] = b'9';
    };
    assert!(world.disk.corrupt(&file, change));
    assert_eq!(found(), BTreeMap::new());
}

#[test]
fn retention_can_verify_the_newest_step_before_it_deletes() {
    let verifying =
        |verify_before_retiring| Options { verify_before_retiring, ..keeping(Retention::keep_latest(1)) };
    let flip = |bytes: &mut Vec<u8>| bytes[0] ^= 1;
    for (verify, left) in [(false, vec![3]), (true, vec![2, 3])] {
        let world = World::default();
        let manager = world.open(options());
        (1..=3).for_each(|step| commit(&manager, step));
        manager.close(Some(LONG)).unwrap();
        assert!(world.disk.corrupt("/run/step_00000003/i0/00000.data", flip));

        let manager = world.open(verifying(verify));
        let retired = manager.apply_retention().unwrap();
        assert_eq!(manager.all_steps().unwrap(), left, "verify={verify}");
        assert_eq!(retired.len() + left.len(), 3);
        manager.close(Some(LONG)).unwrap();
    }
}

#[test]
fn a_verified_step_lets_retention_delete_older_ones() {
    let world = World::default();
    let manager = world.open(Options { verify_before_retiring: true, ..keeping(Retention::keep_latest(1)) });
    (1..=3).for_each(|step| commit(&manager, step));
    assert_eq!(manager.all_steps().unwrap(), [3]);
    assert_restores(&manager, 3);
}
