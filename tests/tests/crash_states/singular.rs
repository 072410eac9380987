//! Singular checkpoints: new, replaced, cancelled, failing, killed.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use stepwell_core::io::simulated::{Action, Image, Moment, SimDisk};
use stepwell_manager::coordination::testing::InProcess;
use stepwell_manager::singular::save as save_to_path;
use stepwell_manager::{Checkpoint, Environment, Exists, SaveRequest, guest};
use stepwell_tests::crash::mutants::{Explained, judge};
use stepwell_tests::crash::{Explorer, Marks, Profile, explore_nested, sweep};
use stepwell_tests::steps::run::{Run, options};
use stepwell_tests::steps::singular::{self, Checker, settle, with_a_checkpoint};
use stepwell_tests::steps::states::verify;
use stepwell_tests::steps::world::environment;

use super::mutants::{ANY_ORDER, LEFTOVER_RENAME, LEFTOVER_SYNC};
use super::{Crash, crash, quick};

fn save(run: &Run, tag: &str) -> Result<(), String> {
    singular::save(run, tag, &Arc::default())
}

fn survives(run: &Run) {
    let log = run.disk.log();
    for profile in [Profile::PosixMinimal, Profile::OrderedMetadata] {
        let mut checker = Checker::default();
        match explore_nested(&log, &crash(profile), |disk, marks| checker.check(disk, marks)) {
            Ok((outer, inner)) => println!("{profile:?}: {outer}; inside sweeps: {inner}"),
            Err(failure) => panic!("{profile:?}: {failure}\nthe scenario:\n{log}"),
        }
    }
}

/// A disk with attempt `a`.
fn base() -> Image {
    with_a_checkpoint().unwrap().disk.image()
}

fn on(image: &Image) -> Run {
    let run = Run::on(SimDisk::from_image(image));
    settle(&run);
    run
}

#[test]
fn a_new_one_in_a_new_directory() {
    let run = Run::fresh();
    save(&run, "a").unwrap();
    survives(&run);
}

#[test]
fn a_replacement_and_another() {
    let run = on(&base());
    save(&run, "b").unwrap();
    save(&run, "c").unwrap();
    survives(&run);
}

/// A deleted guest is whole or gone, and stays gone once that was acknowledged. The next deletion
/// beside it deletes what a crash has left.
#[test]
fn a_deleted_guest_is_whole_or_gone() {
    let run = with_a_checkpoint().unwrap();
    assert!(guest::remove(Path::new(singular::PATH), &run.environment()).unwrap());
    run.mark("deleted");
    for profile in [Profile::PosixMinimal, Profile::OrderedMetadata] {
        let options = Crash { unread: None, ..crash(profile) };
        let explored = explore_nested(&run.disk.log(), &options, |disk, marks| {
            let environment = environment(disk, 1 << 40);
            let is_there = disk.image().get(singular::PATH).is_some();
            if is_there {
                if marks.contains("deleted") {
                    return Err("it is back after its deletion was acknowledged".into());
                }
                let checkpoint = Checkpoint::open(Path::new(singular::PATH), &environment);
                verify(&checkpoint.map_err(|error| error.to_string())?)?;
            }
            let beside = Path::new(singular::PATH).with_file_name("other");
            guest::remove(&beside, &environment).map_err(|error| error.to_string())?;
            let image = disk.image();
            let entries = image.get("models").and_then(|models| models.entries()).unwrap_or_default();
            if entries.len() != usize::from(is_there) {
                return Err(format!("left behind: {entries:?}"));
            }
            Ok(())
        });
        println!("{profile:?}: {}", explored.unwrap().0);
    }
}

/// Two ranks on two nodes save attempt `tag` together. Both have the whole state.
fn save_by_two(run: &Run, tag: &str) {
    run.mark(&format!("replace 0 {tag}"));
    std::thread::scope(|scope| {
        for coordinator in InProcess::ranks(2, 1) {
            let environment = Environment { coordinator: Arc::new(coordinator), ..run.environment() };
            scope.spawn(move || {
                let (state, custom_metadata) = run.state(0, tag).unwrap();
                let exists = Exists::Replace;
                let request = SaveRequest { exists, custom_metadata, ..SaveRequest::new(0, state) };
                let save = save_to_path(Path::new(singular::PATH), request, &options(), &environment);
                let outcome = save.unwrap().wait(Some(run.patience)).unwrap().unwrap();
                assert!(outcome.error().is_none(), "{outcome:?}");
            });
        }
    });
    run.mark(&format!("committed 0 {tag}"));
}

#[test]
fn two_ranks_make_one_and_replace_it() {
    let run = Run::fresh();
    save_by_two(&run, "a");
    save_by_two(&run, "b");
    survives(&run);
}

#[test]
fn one_of_several_windows_through_a_small_ring() {
    let run = on(&base()).with_windows(2).unwrap();
    save(&run, "b").unwrap();
    survives(&run);
}

/// Every crash state of each run of a sweep that begins at attempt `a`.
fn explored(explorer: &mut Explorer, checker: &mut Checker, disk: &SimDisk) -> Result<(), String> {
    explorer
        .explore(&disk.log(), &Marks::default(), |disk, marks| checker.check(disk, marks))
        .map_err(|failure| failure.to_string())
}

#[test]
fn cancelled_at_any_operation_it_is_the_old_one_or_the_new_one() {
    let image = base();
    let (mut explorer, mut checker) = (Explorer::new(quick()), Checker::default());
    let (mut cancelled, mut committed) = (0, 0);
    for number in 0.. {
        // The capture cannot run ahead of the writes by more than the ring.
        let run = on(&image).with_windows(2).unwrap();
        let cancel = Arc::new(AtomicBool::new(false));
        let asked = Arc::clone(&cancel);
        run.disk.set_hook(Some(Arc::new(move |moment, operation| {
            if moment == Moment::Before && operation.number == number {
                asked.store(true, Ordering::Release);
            }
        })));
        match singular::save(&run, "b", &cancel) {
            Ok(()) => committed += 1,
            Err(_) => cancelled += 1,
        }
        run.disk.set_hook(None);
        explored(&mut explorer, &mut checker, &run.disk).unwrap_or_else(|failure| panic!("{failure}"));
        if !cancel.load(Ordering::Acquire) {
            break;
        }
    }
    println!("{cancelled} cancelled, {committed} committed; {}", explorer.explored);
    assert!(cancelled >= 5 && committed >= 5, "{cancelled}, {committed}");
}

fn survives_failures(action: Action, from_then_on: bool) {
    let image = base();
    let (mut explorer, mut checker) = (Explorer::new(quick()), Checker::default());
    let runs = sweep::failures(
        action,
        from_then_on,
        || on(&image).disk,
        |disk| drop(save(&Run::on(disk.clone()), "b")),
        |disk| explored(&mut explorer, &mut checker, disk),
    );
    let runs = runs.unwrap_or_else(|failure| panic!("{failure}"));
    println!("{runs} failures; {}", explorer.explored);
    assert!(runs > 30, "{runs}");
}

#[test]
fn any_operation_of_a_replacement_fails_once() {
    survives_failures(Action::Fail(5), false);
}

#[test]
fn any_operation_of_a_replacement_and_all_after_it_fail() {
    survives_failures(Action::FailHalfway(28), true);
}

#[test]
fn any_operation_of_a_replacement_is_done_and_its_answer_lost() {
    survives_failures(Action::FailAfterwards(5), false);
}

#[test]
fn killed_at_any_operation_and_gone_on_with() {
    let image = base();
    let (mut explorer, mut checker) = (Explorer::new(quick()), Checker::default());
    let runs = sweep::kills(
        || on(&image).disk,
        |disk| drop(save(&Run::on(disk.clone()), "b")),
        |disk| {
            let next = Run::on(disk.clone()).next_process();
            singular::sweep(&next.disk, 77)?;
            save(&next, "z")?;
            explored(&mut explorer, &mut checker, disk)
        },
    );
    let runs = runs.unwrap_or_else(|failure| panic!("{failure}"));
    println!("{runs} kills; {}", explorer.explored);
    assert!(runs > 30, "{runs}");
}

fn mutants_are_caught(run: &Run, explained: &[Explained]) -> Vec<String> {
    let log = run.disk.log();
    let mut checker = Checker::default();
    let report = judge(&log, &crash(Profile::PosixMinimal), explained, |disk: &SimDisk, marks| {
        checker.check(disk, marks)
    });
    let report = report.unwrap_or_else(|failure| panic!("{failure}\nthe scenario:\n{log}"));
    println!("{report}");
    assert_eq!(report.survivors(), Vec::<&str>::new());
    assert_eq!(report.unused, Vec::<&str>::new());
    report.caught().into_iter().map(str::to_owned).collect()
}

#[test]
fn mutants_of_a_new_one() {
    let run = Run::fresh();
    save(&run, "a").unwrap();
    let caught = mutants_are_caught(&run, &[ANY_ORDER]);
    assert!(caught.iter().any(|label| label.starts_with("drop fsync models/")), "{caught:?}");
}

#[test]
fn mutants_of_a_replacement() {
    let run = on(&base());
    save(&run, "b").unwrap();
    let caught = mutants_are_caught(
        &run,
        &[
            ANY_ORDER,
            LEFTOVER_RENAME,
            LEFTOVER_SYNC,
            Explained {
                pattern: "drop fsync models/",
                reason: "the second one: by the first the old checkpoint is a leftover already",
            },
            Explained { pattern: "swap [fsync models/ | unlink models/.trash-*]", reason: "as above" },
        ],
    );
    assert!(caught.iter().any(|label| label.starts_with("drop fsync models/")), "{caught:?}");
}
