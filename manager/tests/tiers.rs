//! Tiers: a near root on a disk, a far one in a store. Steps are carried, read from where they are,
//! and never lost or resurrected, whatever request of the carrier is the last of its process.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests end by it")]

mod common;

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::tiers::*;
use common::*;
use stepwell_core::io::simulated::{Action, Fault, OperationKind};
use stepwell_core::load::LoadOptions;
use stepwell_core::remote::simulated::{Fate, SimStore};
use stepwell_manager::{Exists, Manager, Options, Retention, SaveRequest, TierPlace, TierRule};

const EIO: i32 = 5;

#[test]
fn each_step_arrives_and_is_restored_after_the_node_is_lost() {
    let worlds = Worlds::new();
    let manager = worlds.open(Options { retention: Retention::keep_latest(1), ..quick() }, EACH);
    for step in 1..=4 {
        commit(&manager, step);
    }
    for step in 1..=4 {
        manager.wait_carried(step, "home", LONG).unwrap();
    }
    assert_eq!(home_of(&manager).steps, [1, 2, 3, 4]);
    assert_eq!(manager.all_steps().unwrap(), [1, 2, 3, 4], "near has the last one only");
    assert_restores(&manager, 2);
    assert_restores(&manager, 4);
    manager.close(Some(LONG)).unwrap();
    let worlds = worlds.on_a_new_node();
    let second = worlds.open(quick(), EACH);
    assert_eq!((second.latest_step().unwrap(), second.next_step().unwrap()), (Some(4), 5));
    for step in 1..=4 {
        assert_restores(&second, step);
    }
    let missing = second.checkpoint(Some(9)).err().unwrap().to_string();
    assert!(missing.contains("the latest is 4"), "{missing}");
    assert_eq!(second.save(request(4)).unwrap_err().kind(), "step_exists");
    assert_eq!(second.save(request(3)).unwrap_err().kind(), "step_exists");
    commit(&second, 5);
    assert_restores(&second, 5);
    second.close(Some(LONG)).unwrap();
    assert_eq!(worlds.read_home().all_steps().unwrap(), [1, 2, 3, 4, 5]);
}

#[test]
fn the_copy_has_the_same_attempt_and_manifest() {
    let worlds = Worlds::new();
    let manager = worlds.open(quick(), EACH);
    commit(&manager, 1);
    manager.add_metrics(1, &[("loss".to_owned(), 0.5)].into()).unwrap();
    carried(&manager);
    let (near, home) = (manager.manifest(Some(1)).unwrap(), worlds.read_home().manifest(Some(1)).unwrap());
    assert_eq!(near.encode().unwrap(), home.encode().unwrap());
    assert!((worlds.read_home().metrics(1).unwrap()["loss"] - 0.5).abs() < 1e-9);
    manager.add_metrics(1, &[("loss".to_owned(), 0.25)].into()).unwrap();
    assert!((worlds.read_home().metrics(1).unwrap()["loss"] - 0.25).abs() < 1e-9);
}

#[test]
fn a_due_step_stays_near_until_it_has_arrived() {
    let near = Options { retention: Retention::keep_latest(1), ..quick() };
    let (worlds, silent, manager) = open_silenced(near, EACH);
    silent.store(true, Ordering::SeqCst);
    for step in 1..=3 {
        commit(&manager, step);
    }
    manager.wait_until_finished(Some(LONG)).unwrap();
    let error = manager.wait_carried(1, "home", Duration::from_millis(50)).unwrap_err();
    assert_eq!(error.kind(), "timeout");
    assert_eq!(manager.all_steps().unwrap(), [1, 2, 3], "none has arrived");
    silent.store(false, Ordering::SeqCst);
    carried(&manager);
    assert_eq!(home_of(&manager).steps, [1, 2, 3]);
    manager.close(Some(LONG)).unwrap();
    assert_eq!(worlds.near.open(options()).all_steps().unwrap(), [3]);
}

#[test]
fn a_copy_whose_last_answer_is_lost_keeps_its_objects() {
    for silence in [30, 60, 90, 120, 200] {
        let worlds = Worlds::new();
        let store = worlds.store.process();
        let manager = worlds.try_open_with(&worlds.near.disk, &store, quick(), EACH).unwrap();
        let since = Mutex::new(None::<Instant>);
        store.script(move |request| {
            let mut since = since.lock().unwrap();
            let is_entry = request.call == "create" && request.key.contains("/ledger/");
            match *since {
                None if is_entry => {
                    *since = Some(Instant::now());
                    Fate::AnswerLost
                }
                Some(begun) if begun.elapsed() < Duration::from_millis(silence) => Fate::Dropped,
                _ => Fate::Served,
            }
        });
        commit(&manager, 1);
        manager.wait_carried(1, "home", LONG).unwrap();
        assert_restores(&worlds.read_home(), 1);
        manager.close(Some(LONG)).unwrap();
        assert_restores(&worlds.read_home(), 1);
    }
}

#[test]
fn a_newer_step_takes_the_place_of_one_that_waits() {
    let (_worlds, silent, manager) = open_silenced(quick(), LATEST);
    silent.store(true, Ordering::SeqCst);
    for step in 1..=4 {
        commit(&manager, step);
    }
    silent.store(false, Ordering::SeqCst);
    carried(&manager);
    // One step may be on its way while the newest is committed.
    let home = home_of(&manager);
    assert_eq!(home.steps.last(), Some(&4));
    assert!(home.superseded >= 2, "{home:?}");
    assert_eq!(home.steps.len() as u64 + home.superseded, 4, "{home:?}");
    for step in (1..=4).filter(|step| !home.steps.contains(step)) {
        let error = manager.wait_carried(step, "home", LONG).unwrap_err();
        assert_eq!(error.kind(), "not_carried", "{error}");
    }
}

#[test]
fn a_tier_takes_the_steps_of_its_rule() {
    let worlds = Worlds::new();
    let manager = worlds.open(quick(), TierRule { every: 2, all: true });
    for step in 1..=5 {
        commit(&manager, step);
    }
    carried(&manager);
    assert_eq!(home_of(&manager).steps, [2, 4]);
    let error = manager.wait_carried(3, "home", LONG).unwrap_err();
    assert!(error.to_string().contains("does not take"), "{error}");
    assert!(manager.wait_carried(3, "attic", LONG).unwrap_err().to_string().contains("home"));
}

#[test]
fn damage_of_the_near_tier_is_not_carried_and_not_restored() {
    let worlds = Worlds::new();
    let manager = worlds.open(quick(), EACH);
    commit(&manager, 1);
    carried(&manager);
    manager.close(Some(LONG)).unwrap();
    let near = worlds.near.open(options());
    commit(&near, 2);
    damage(&worlds, &near, 2);
    near.close(Some(LONG)).unwrap();
    let manager = worlds.open(quick(), EACH);
    let error = manager.wait_carried(2, "home", LONG).unwrap_err();
    assert_eq!(error.kind(), "not_carried", "{error}");
    assert_eq!(home_of(&manager).steps, [1]);
    assert!(home_of(&manager).failure.unwrap().1.contains("checksum"));
    assert_restores(&manager, 1);
}

#[test]
fn a_step_with_a_damaged_index_is_given_up() {
    let worlds = Worlds::new();
    let near = worlds.near.open(options());
    commit(&near, 1);
    let index = near.manifest(Some(1)).unwrap().items[0].index.path.clone();
    let path = near.step_path(1).join(index);
    assert!(worlds.near.disk.corrupt(path.to_str().unwrap(), |bytes| bytes[200] ^= 1));
    near.close(Some(LONG)).unwrap();
    let error = worlds.open(quick(), EACH).wait_carried(1, "home", LONG).unwrap_err();
    assert_eq!(error.kind(), "not_carried", "{error}");
}

#[test]
fn a_damaged_block_is_read_from_the_next_tier() {
    let worlds = Worlds::new();
    let manager = worlds.open(quick(), EACH);
    commit(&manager, 1);
    carried(&manager);
    damage(&worlds, &manager, 1);
    assert_restores(&manager, 1);
    let stats = read_stats(&manager.checkpoint(Some(1)).unwrap()).unwrap();
    assert!(stats.pieces_mended > 0, "{stats:?}");
    let report = manager.checkpoint(Some(1)).unwrap().verify(&LoadOptions::default(), &mut |_| true).unwrap();
    assert!(!report.damages.is_empty(), "a verification says what is damaged here");
}

#[test]
fn a_damaged_header_or_footer_is_read_from_the_next_tier() {
    for compress in [&[][..], &["**"]] {
        let worlds = Worlds::compressing(compress);
        let manager = worlds.open(quick(), EACH);
        commit(&manager, 1);
        carried(&manager);
        let file = &manager.manifest(Some(1)).unwrap().files[0];
        let path = manager.step_path(1).join(&file.path);
        let flip = |at: u64| {
            assert!(worlds.near.disk.corrupt(path.to_str().unwrap(), |bytes| bytes[at as usize] ^= 16));
        };
        let footer = file.length - 4 * 4096..file.length;
        for at in [0, 20, 4095].into_iter().chain(footer.step_by(1000)).chain([file.length - 4090]) {
            flip(at);
            assert_restores(&manager, 1);
            let step = manager.checkpoint(Some(1)).unwrap();
            let stats = read_stats(&step).unwrap();
            let report = step.verify(&LoadOptions::default(), &mut |_| true).unwrap();
            assert!(!report.damages.is_empty(), "byte {at}: a verification says what is damaged here");
            let is_header = at < 4096 || at + 4096 > file.length;
            assert!(!is_header || stats.pieces_mended > 0, "byte {at}: {stats:?}");
            drop(step);
            flip(at);
        }
    }
}

#[test]
fn a_header_that_is_damaged_in_every_tier_is_an_error() {
    let worlds = Worlds::new();
    let manager = worlds.open(quick(), TierRule { every: 2, all: true });
    commit(&manager, 1);
    let file = manager.step_path(1).join(&manager.manifest(Some(1)).unwrap().files[0].path);
    assert!(worlds.near.disk.corrupt(file.to_str().unwrap(), |bytes| bytes[20] ^= 1));
    let error = read_stats(&manager.checkpoint(Some(1)).unwrap()).unwrap_err();
    assert!(error.contains("header"), "{error}");
}

/// Removes a data file of a step of the near tier.
fn lose_a_file(worlds: &Worlds, manager: &Manager, step: u64) {
    let file = manager.manifest(Some(step)).unwrap().files[0].path.clone();
    let dir = worlds.near_environment(&worlds.near.disk).disk.open_dir(&manager.step_path(step)).unwrap();
    dir.remove_file(&file).unwrap();
}

#[test]
fn an_earlier_save_does_not_stand_in_for_a_damaged_step() {
    let (worlds, silent, manager) = open_silenced(quick(), EACH);
    commit(&manager, 2);
    commit(&manager, 3);
    carried(&manager);
    silent.store(true, Ordering::SeqCst);
    let again = SaveRequest { exists: Exists::Replace, ..SaveRequest::new(3, state(77)) };
    committed(&manager.save(again).unwrap());
    assert_value(&manager, 3, 77);
    lose_a_file(&worlds, &manager, 3);
    assert_eq!(manager.latest_step().unwrap(), Some(2));
    assert_eq!(manager.checkpoint(None).unwrap().step(), 2);
    assert_eq!(manager.manifest(None).unwrap().step, 2);
    let error = read_stats(&manager.checkpoint(Some(3)).unwrap()).unwrap_err();
    assert!(error.contains("00000.data"), "{error}");
    assert_restores(&manager, 2);
    silent.store(false, Ordering::SeqCst);
}

#[test]
fn a_step_that_is_whole_near_needs_no_answer_of_home() {
    let worlds = Worlds::new();
    let store = worlds.store.process();
    let manager = worlds.try_open_with(&worlds.near.disk, &store, quick(), EACH).unwrap();
    commit(&manager, 1);
    carried(&manager);
    let before = store.requests().len();
    assert_restores(&manager, 1);
    drop(manager.hold(1).unwrap());
    assert_eq!((manager.latest_step().unwrap(), manager.choose(None).unwrap()), (Some(1), 1));
    let asked: Vec<_> = store.requests().into_iter().skip(before).collect();
    assert!(asked.is_empty(), "{asked:?}");
}

#[test]
fn a_block_that_is_damaged_in_every_tier_is_an_error() {
    let worlds = Worlds::new();
    let manager = worlds.open(quick(), TierRule { every: 2, all: true });
    commit(&manager, 1);
    damage(&worlds, &manager, 1);
    let error = read_stats(&manager.checkpoint(Some(1)).unwrap()).unwrap_err();
    assert!(error.contains("checksum"), "{error}");
}

#[test]
fn a_step_that_has_lost_a_file_is_read_from_the_next_tier() {
    let worlds = Worlds::new();
    let manager = worlds.open(quick(), EACH);
    commit(&manager, 1);
    carried(&manager);
    lose_a_file(&worlds, &manager, 1);
    assert_eq!(manager.latest_step().unwrap(), Some(1));
    assert_restores(&manager, 1);
}

#[test]
fn a_rewind_reaches_every_tier() {
    let worlds = Worlds::new();
    let manager = worlds.open(Options { retention: Retention::keep_latest(2), ..quick() }, EACH);
    for step in 1..=4 {
        commit(&manager, step);
    }
    carried(&manager);
    let (branch, moved) = manager.rewind(2, Some("b")).unwrap();
    assert_eq!((branch.as_str(), moved), ("b", vec![4, 3]), "near had 3 and 4 only");
    assert_eq!(manager.all_steps().unwrap(), [1, 2]);
    let again = SaveRequest::new(3, state(33));
    committed(&manager.save(again).unwrap());
    carried(&manager);
    assert_value(&manager, 3, 33);
    manager.close(Some(LONG)).unwrap();
    assert_value(&worlds.read_home(), 3, 33);
    assert_eq!(worlds.read_home().all_steps().unwrap(), [1, 2, 3]);
}

#[test]
fn a_branch_is_deleted_in_every_tier() {
    let worlds = Worlds::new();
    let manager = worlds.open(Options { retention: Retention::keep_latest(1), ..quick() }, EACH);
    for step in 1..=3 {
        commit(&manager, step);
    }
    carried(&manager);
    manager.rewind(1, Some("b")).unwrap();
    assert_eq!(manager.delete_branch("b").unwrap(), ["step_00000002", "step_00000003"], "near had 3 only");
    manager.close(Some(LONG)).unwrap();
    for alone in [worlds.write_home(), worlds.near.open(options())] {
        assert!(alone.delete_branch("b").unwrap_err().to_string().contains("no branch"));
        alone.close(Some(LONG)).unwrap();
    }
}

#[test]
fn a_step_that_cannot_be_read_does_not_stop_those_behind_it() {
    let worlds = Worlds::new();
    let near = worlds.near.open(options());
    for step in 1..=2 {
        commit(&near, step);
    }
    let near_file = near.manifest(Some(1)).unwrap().files[0].path.clone();
    near.close(Some(LONG)).unwrap();
    let broken = format!("step_00000001/{near_file}");
    worlds.near.disk.inject(Fault::on(OperationKind::Read, Action::Fail(EIO)).at(&broken).from_then_on());
    let manager = worlds.open(quick(), EACH);
    manager.wait_carried(2, "home", LONG).unwrap();
    let error = manager.wait_carried(1, "home", LONG).unwrap_err();
    assert!(error.kind() == "not_carried" && error.to_string().contains(&broken), "{error}");
    assert_eq!(home_of(&manager).steps, [2]);
}

#[test]
fn the_rate_of_a_tier_is_kept_again_after_a_notice() {
    let worlds = Worlds::new();
    let home =
        TierPlace { bytes_per_second: Some(20_000), ..worlds.home(&worlds.store, EACH, Retention::KeepAll) };
    let environment = worlds.near_environment(&worlds.near.disk);
    let manager = Manager::open_with_tiers(Path::new(ROOT), quick(), environment, &[home]).unwrap();
    manager.hurry_carriers(Duration::from_millis(20)).unwrap();
    std::thread::sleep(Duration::from_millis(30));
    let begun = Instant::now();
    commit(&manager, 1);
    carried(&manager);
    assert!(begun.elapsed() > Duration::from_millis(500), "{:?}", begun.elapsed());
}

#[test]
fn a_rewind_that_is_refused_has_moved_nothing() {
    let (worlds, silent, manager) = open_silenced(quick(), EACH);
    for step in 1..=3 {
        commit(&manager, step);
    }
    carried(&manager);
    silent.store(true, Ordering::SeqCst);
    commit(&manager, 4);
    let hold = manager.hold(3).unwrap();
    assert_eq!(manager.rewind(1, None).unwrap_err().kind(), "locked");
    drop(hold);
    assert_eq!(worlds.read_home().all_steps().unwrap(), [1, 2, 3]);
    assert_eq!(home_of(&manager).due, [4], "it is still due");
    silent.store(false, Ordering::SeqCst);
    carried(&manager);
    assert_eq!(home_of(&manager).steps, [1, 2, 3, 4]);
}

#[test]
fn a_replaced_step_is_not_passed_over() {
    let near = Options { retention: Retention::keep_latest(1), ..quick() };
    let (worlds, silent, manager) = open_silenced(near, LATEST);
    commit(&manager, 3);
    carried(&manager);
    silent.store(true, Ordering::SeqCst);
    let again = SaveRequest { exists: Exists::Replace, ..SaveRequest::new(3, state(77)) };
    committed(&manager.save(again).unwrap());
    assert_eq!(manager.tiers_of(3).unwrap(), [""], "home has the earlier attempt");
    commit(&manager, 4);
    silent.store(false, Ordering::SeqCst);
    carried(&manager);
    assert_value(&worlds.read_home(), 3, 77);
    assert_value(&manager, 3, 77);
}

#[test]
fn a_rewind_stops_what_is_carried() {
    let (_worlds, silent, manager) = open_silenced(quick(), EACH);
    commit(&manager, 1);
    carried(&manager);
    silent.store(true, Ordering::SeqCst);
    commit(&manager, 2);
    manager.rewind(1, None).unwrap();
    silent.store(false, Ordering::SeqCst);
    carried(&manager);
    assert_eq!((manager.all_steps().unwrap(), home_of(&manager).steps), (vec![1], vec![1]));
    let error = manager.wait_carried(2, "home", LONG).unwrap_err();
    assert!(error.to_string().contains("removed"), "{error}");
}

#[test]
fn steps_are_deleted_and_replaced_in_every_tier() {
    let worlds = Worlds::new();
    let manager = worlds.open(Options { retention: Retention::keep_latest(1), ..quick() }, EACH);
    for step in 1..=3 {
        commit(&manager, step);
    }
    carried(&manager);
    manager.delete(1).unwrap();
    assert_eq!(manager.delete(1).unwrap_err().kind(), "step_not_found");
    let again = SaveRequest { exists: Exists::Replace, ..SaveRequest::new(3, state(77)) };
    committed(&manager.save(again).unwrap());
    carried(&manager);
    assert_value(&worlds.read_home(), 3, 77);
    manager.delete(3).unwrap();
    assert_eq!(manager.all_steps().unwrap(), [2]);
    let hold = manager.hold(2).unwrap();
    assert_eq!(manager.delete(2).unwrap_err().kind(), "locked");
    drop(hold);
    manager.close(Some(LONG)).unwrap();
    assert_eq!(worlds.read_home().all_steps().unwrap(), [2]);
}

#[test]
fn each_tier_has_a_retention_of_its_own() {
    let worlds = Worlds::new();
    let home =
        worlds.home(&worlds.store.process(), EACH, Retention::keep_every(2) | Retention::keep_latest(1));
    let near = Options { retention: Retention::keep_latest(2), ..quick() };
    let environment = worlds.near_environment(&worlds.near.disk);
    let manager = Manager::open_with_tiers(Path::new(ROOT), near, environment, &[home]).unwrap();
    for step in 1..=5 {
        commit(&manager, step);
        carried(&manager);
    }
    assert_eq!(home_of(&manager).steps, [2, 4, 5]);
    assert_eq!(manager.all_steps().unwrap(), [2, 4, 5]);
    assert_restores(&manager, 2);
    let hold = manager.hold(5).unwrap();
    for step in [6, 7] {
        commit(&manager, step);
        carried(&manager);
    }
    assert_eq!(home_of(&manager).steps, [2, 4, 5, 6, 7], "5 is held in both tiers");
    drop(hold);
    commit(&manager, 8);
    carried(&manager);
    assert_eq!(home_of(&manager).steps, [2, 4, 6, 8]);
}

#[test]
fn a_near_tier_that_was_absent_gives_way() {
    // The first node carries 1 and 2, and has 3 and 4 of its own when it goes away.
    let (worlds, odd) = (Worlds::new(), TierRule { every: 2, all: true });
    let manager = worlds.open(quick(), odd);
    for step in [1, 2, 3] {
        commit(&manager, step);
    }
    carried(&manager);
    manager.close(Some(LONG)).unwrap();
    let first_disk = worlds.near.disk.clone();
    worlds.near.clock.advance(60);
    let worlds = worlds.on_a_new_node();
    let second = worlds.open(quick(), EACH);
    assert_eq!(second.next_step().unwrap(), 3);
    committed(&second.save(SaveRequest::new(3, state(33))).unwrap());
    committed(&second.save(SaveRequest::new(5, state(55))).unwrap());
    second.close(Some(LONG)).unwrap();
    worlds.near.clock.advance(60);
    let worlds =
        Worlds { near: World { disk: first_disk, ..worlds.near }, store: worlds.store, compress: Vec::new() };
    let back = worlds.open(quick(), EACH);
    assert_eq!(back.all_steps().unwrap(), [1, 2, 3, 5]);
    assert_value(&back, 3, 33);
    assert_value(&back, 5, 55);
    let set_aside = |name: &String| name.starts_with(".branch-stale-");
    assert_eq!(worlds.near.names().iter().filter(|name| set_aside(name)).count(), 1, "of step 3");
    back.close(Some(LONG)).unwrap();
}

#[test]
fn a_rewind_reaches_a_near_tier_that_was_absent() {
    let worlds = Worlds::new();
    let manager = worlds.open(quick(), EACH);
    for step in 1..=3 {
        commit(&manager, step);
    }
    carried(&manager);
    manager.close(Some(LONG)).unwrap();
    let first_disk = worlds.near.disk.clone();
    let worlds = worlds.on_a_new_node();
    let second = worlds.open(quick(), EACH);
    second.rewind(1, None).unwrap();
    second.close(Some(LONG)).unwrap();
    let worlds =
        Worlds { near: World { disk: first_disk, ..worlds.near }, store: worlds.store, compress: Vec::new() };
    let back = worlds.open(quick(), EACH);
    assert_eq!((back.latest_step().unwrap(), back.all_steps().unwrap()), (Some(1), vec![1]));
    carried(&back);
    assert_eq!(home_of(&back).steps, [1]);
}

/// Saves steps 1 to 5, of which the second ones are carried. Then the node goes away, and `remove`
/// is done on another one. Returns the tiers with the first node.
fn removed_while_the_node_was_absent(remove: impl FnOnce(&Worlds)) -> Worlds {
    let worlds = Worlds::new();
    let manager = worlds.open(quick(), EVERY_OTHER);
    for step in 1..=5 {
        commit(&manager, step);
    }
    carried(&manager);
    manager.close(Some(LONG)).unwrap();
    let first_disk = worlds.near.disk.clone();
    let worlds = worlds.on_a_new_node();
    remove(&worlds);
    Worlds { near: World { disk: first_disk, ..worlds.near }, store: worlds.store, compress: Vec::new() }
}

#[test]
fn a_rewind_removes_steps_that_only_an_absent_tier_has() {
    let with_tiers = |worlds: &Worlds, step| {
        let second = worlds.open(quick(), EACH);
        second.rewind(step, None).unwrap();
        second.close(Some(LONG)).unwrap();
    };
    // Nothing of home is moved by the second one.
    for (step, left) in [(2, vec![1, 2]), (4, vec![1, 2, 3, 4])] {
        for alone in [false, true] {
            let worlds = removed_while_the_node_was_absent(|worlds| {
                if alone {
                    worlds.write_home().rewind(step, None).unwrap();
                } else {
                    with_tiers(worlds, step);
                }
            });
            for _ in 0..2 {
                let back = worlds.open(quick(), EVERY_OTHER);
                assert_eq!(back.all_steps().unwrap(), left, "{alone}");
                back.close(Some(LONG)).unwrap();
            }
            let back = worlds.open(quick(), EVERY_OTHER);
            commit(&back, 5);
            commit(&back, 6);
            carried(&back);
            back.close(Some(LONG)).unwrap();
            let again = worlds.open(quick(), EVERY_OTHER);
            assert_eq!(again.all_steps().unwrap(), [left.clone(), vec![5, 6]].concat(), "new steps stay");
        }
    }
}

/// Rewinds in a process that ends when it has recorded the rewind.
fn interrupt_rewind(store: &SimStore, manager: Manager, step: u64) {
    let mut recorded = false;
    store.script(move |request| {
        if recorded {
            return Fate::Dropped;
        }
        recorded = request.call == "put" && request.key.contains("rewind.json");
        Fate::Served
    });
    manager.rewind(step, None).unwrap_err();
    drop(manager);
}

#[test]
fn a_deletion_needs_an_answer_of_every_tier() {
    let worlds = Worlds::new();
    let store = worlds.store.process();
    let manager = worlds.try_open_with(&worlds.near.disk, &store, quick(), EACH).unwrap();
    (1..=2).for_each(|step| commit(&manager, step));
    carried(&manager);
    store.script(|_| Fate::Dropped);
    manager.delete(1).unwrap_err();
    store.script(|_| Fate::Served);
    assert_eq!(manager.tiers().unwrap()[0].steps, [1, 2]);
    manager.delete(1).unwrap();
    assert_eq!(manager.all_steps().unwrap(), [2]);
}

#[test]
fn a_damaged_record_of_the_run_brings_no_steps_back() {
    let worlds = removed_while_the_node_was_absent(|worlds| {
        worlds.write_home().rewind(2, None).unwrap();
    });
    let record = format!("{ROOT}/.stepwell/known_run.json");
    assert!(worlds.near.disk.corrupt(&record, |bytes| bytes[20] ^= 1));
    let back = worlds.open(quick(), EVERY_OTHER);
    assert_eq!(back.all_steps().unwrap(), [1, 2]);
}

#[test]
fn an_interrupted_rewind_reaches_an_absent_tier() {
    let worlds = removed_while_the_node_was_absent(|worlds| {
        let store = worlds.store.process();
        let second = worlds.try_open_with(&worlds.near.disk, &store, quick(), EACH).unwrap();
        interrupt_rewind(&store, second, 2);
    });
    let back = worlds.open(quick(), EVERY_OTHER);
    assert_eq!(back.all_steps().unwrap(), [1, 2]);
}

#[test]
fn deleted_steps_do_not_come_back_with_an_absent_tier() {
    for alone in [false, true] {
        let worlds = removed_while_the_node_was_absent(|worlds| {
            if alone {
                worlds.write_home().delete(4).unwrap();
            } else {
                let second = worlds.open(quick(), EACH);
                second.delete(4).unwrap();
                second.close(Some(LONG)).unwrap();
            }
        });
        let back = worlds.open(quick(), EVERY_OTHER);
        assert_eq!(back.all_steps().unwrap(), [1, 2, 3, 5]);
        carried(&back);
        assert_eq!(home_of(&back).steps, [2]);
        commit(&back, 6);
        carried(&back);
        assert_eq!(home_of(&back).steps, [2, 6]);
    }
}

#[test]
fn steps_that_were_saved_after_an_interrupted_rewind_stay() {
    let worlds = Worlds::new();
    let store = worlds.store.process();
    let manager = worlds.try_open_with(&worlds.near.disk, &store, quick(), EACH).unwrap();
    for step in 1..=3 {
        commit(&manager, step);
    }
    carried(&manager);
    interrupt_rewind(&store, manager, 1);
    let home = worlds.write_home();
    assert_eq!(home.all_steps().unwrap(), [1], "the rewind is ended");
    commit(&home, 2);
    commit(&home, 7);
    home.close(Some(LONG)).unwrap();
    let back = worlds.open(quick(), EACH);
    assert_eq!(back.all_steps().unwrap(), [1, 2, 7]);
}

#[test]
fn a_clock_that_goes_back_loses_no_step() {
    let worlds = Worlds::new();
    let manager = worlds.open(quick(), TierRule { every: 2, all: true });
    worlds.near.clock.advance(1000);
    commit(&manager, 2);
    carried(&manager);
    worlds.near.clock.advance(-500);
    manager.delete(2).unwrap();
    commit(&manager, 3);
    manager.close(Some(LONG)).unwrap();
    assert_eq!(worlds.open(quick(), EACH).all_steps().unwrap(), [3]);
}

#[test]
fn a_process_ends_at_each_request_of_its_carrier() {
    end_at_each_request(&[], 5);
}
