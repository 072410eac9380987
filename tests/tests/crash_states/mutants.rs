//! The checker, checked: every fsync and rename of the protocol left out, every two neighbours
//! swapped.

use stepwell_core::io::simulated::SimDisk;
use stepwell_manager::{Manager, Retention};
use stepwell_tests::crash::Profile;
use stepwell_tests::crash::mutants::{Explained, Report, judge};
use stepwell_tests::steps::check::Checker;
use stepwell_tests::steps::run::{Run, close, options};

use super::{crash, keeping};

/// Judges every mutant of what a scenario did.
fn mutants_are_caught(run: &Run, explained: &[Explained]) -> Report {
    let log = run.disk.log();
    let mut checker = Checker::new(options());
    let report = judge(&log, &crash(Profile::PosixMinimal), explained, |disk: &SimDisk, marks| {
        checker.check(disk, marks)
    });
    let report = report.unwrap_or_else(|failure| panic!("{failure}\nthe scenario:\n{log}"));
    println!("{report}");
    assert_eq!(report.survivors(), Vec::<&str>::new());
    assert_eq!(report.unused, Vec::<&str>::new());
    report
}

pub(super) const ANY_ORDER: Explained = Explained {
    pattern: "swap [fsync */.tmp-*/* | create */.tmp-*]",
    reason: "what is in a temporary becomes durable in any order, all before the rename",
};
const INTENTION: Explained = Explained {
    pattern: "swap [mark \"begin 1 a\" | mkdir run/.tmp-*]",
    reason: "an intention promises nothing, and a temporary is no step",
};
pub(super) const TRASH_AFTER_COMMIT: Explained = Explained {
    pattern: "swap [fsync */ | mark \"committed *\"]",
    reason: "here this is the sync after the old step became trash: the commit's own came before, and is caught",
};
pub(super) const FIRST_DELETION: Explained = Explained {
    pattern: "swap [mark \"* | unlink */.trash-*]",
    reason: "trash is durably out of sight before anybody is told anything",
};
pub(super) const LEFTOVER_RENAME: Explained = Explained {
    pattern: "drop rename */.tmp-* -> .trash-*",
    reason: "no step has that name: the rename to trash only tells a live owner's temporary from what may be deleted",
};
pub(super) const LEFTOVER_SYNC: Explained = Explained {
    pattern: "swap [rename */.tmp-* -> .trash-* | fsync */]",
    reason: "a temporary and trash are both leftovers, whichever name a crash keeps",
};

/// Mutants of trash, durably invisible, whose files wait to be written over.
const TRASH_THAT_WAITS: [Explained; 5] = [
    Explained {
        pattern: "drop rename */.trash-* -> .spare-*",
        reason: "a name keeps those away who open files, and no power cut opens any",
    },
    Explained {
        pattern: "swap [rename */.trash-* -> .spare-* | rename */.trash-* -> .spare-*]",
        reason: "files of trash get their names in any order",
    },
    Explained { pattern: "swap [unlink */.trash-* | unlink */.trash-*]", reason: "trash goes in any order" },
    Explained { pattern: "swap [rmdir */.trash-* | unlink */.trash-*]", reason: "trash goes in any order" },
    Explained {
        pattern: "drop fsync */.tmp-*/.lease",
        reason: "it is empty: its name alone counts, which the sync of its directory makes durable",
    },
];

fn scenario(steps: &[u64], retention: Retention, act: impl FnOnce(&Run, &Manager)) -> Run {
    let run = Run::with_steps(steps.iter().copied()).unwrap();
    let manager = run.open(keeping(retention)).unwrap();
    // Opening has its own mutants: see `of_opening_a_root_with_leftovers`.
    run.settle(steps);
    act(&run, &manager);
    close(&manager).unwrap();
    run
}

#[test]
fn of_a_save() {
    let run = scenario(&[1], Retention::KeepAll, |run, manager| run.save(manager, 2, "a").unwrap());
    mutants_are_caught(&run, &[ANY_ORDER]);
}

#[test]
fn of_a_save_of_several_windows() {
    let run = Run::with_steps([1]).unwrap().with_windows(16).unwrap();
    let manager = run.open(options()).unwrap();
    run.settle(&[1]);
    run.save(&manager, 2, "a").unwrap();
    close(&manager).unwrap();
    mutants_are_caught(&run, &[ANY_ORDER]);
}

#[test]
fn of_retention() {
    let run = scenario(&[1], Retention::keep_latest(1), |run, manager| {
        run.mark("may go 1 once 2");
        run.save(manager, 2, "a").unwrap();
        run.mark("gone 1");
    });
    mutants_are_caught(&run, &[[ANY_ORDER].as_slice(), &TRASH_THAT_WAITS].concat());
}

#[test]
fn of_a_save_over_a_retired_step() {
    let run = scenario(&[1], Retention::keep_latest(1), |run, manager| {
        for (gone, step, values) in [(1, 2, "a"), (2, 3, "b")] {
            run.mark(&format!("may go {gone} once {step}"));
            run.save(manager, step, values).unwrap();
            run.mark(&format!("gone {gone}"));
        }
    });
    assert!(run.disk.log().to_string().contains("/.spare-0 -> "), "no file was written over");
    let before_the_rename = "both come before the rename to a step";
    let order = [
        ANY_ORDER,
        FIRST_DELETION,
        Explained { pattern: "swap [mark \"begin 3 b\" | mkdir run/.tmp-*]", ..INTENTION },
        Explained { pattern: "swap [fsync */.tmp-* | set length of */.tmp-*]", ..ANY_ORDER },
        Explained { pattern: "swap [fsync */.t* | fsync */.trash-*]", reason: before_the_rename },
        Explained { pattern: "swap [fsync */.trash-* | create */.tmp-*]", reason: before_the_rename },
        Explained { pattern: "swap [rmdir */.trash-* | mark \"gone 2\"]", ..FIRST_DELETION },
    ];
    let report = mutants_are_caught(&run, &[order.as_slice(), &TRASH_THAT_WAITS].concat());
    let caught = report.caught().into_iter().filter(|mutant| mutant.starts_with("drop fsync run/.trash-"));
    assert_eq!(caught.count(), 4, "a power cut may leave one file under two names");
}

#[test]
fn of_a_replacement() {
    let run = scenario(&[1], Retention::KeepAll, |run, manager| run.replace(manager, 1, "b").unwrap());
    let report = mutants_are_caught(
        &run,
        &[
            ANY_ORDER,
            TRASH_AFTER_COMMIT,
            FIRST_DELETION,
            LEFTOVER_RENAME,
            LEFTOVER_SYNC,
            Explained {
                pattern: "drop fsync run/",
                reason: "the second one: the exchanged step is a leftover by the first already",
            },
        ],
    );
    assert!(report.caught().contains(&"drop fsync run/"), "the first one");
}

#[test]
fn of_setting_aside_what_is_no_step() {
    let run = Run::with_steps([1]).unwrap();
    let manager = run.open(options()).unwrap();
    run.plant_torn("step_00000002", &[1]).unwrap();
    run.save(&manager, 2, "a").unwrap();
    close(&manager).unwrap();
    let early = Explained {
        pattern: "swap [fsync run/.tmp-*/ | rename run/step_00000002 -> .quarantine-*]",
        reason: "what is set aside has nothing to do with the temporary, which is whole and durable before it takes the name",
    };
    let report = mutants_are_caught(&run, &[ANY_ORDER, early]);
    let syncs = report.caught().into_iter().filter(|mutant| *mutant == "drop fsync run/").count();
    assert_eq!(syncs, 2, "that of what was set aside, and that of the commit");
}

#[test]
fn of_thinning() {
    let rule =
        Retention::Any { of: vec![Retention::keep_latest(1), Retention::keep_every_items(1, ["params"])] };
    let run = scenario(&[1], rule, |run, manager| {
        run.mark("may thin 1 once 2");
        run.save(manager, 2, "a").unwrap();
        run.mark("thinned 1");
    });
    let report = mutants_are_caught(
        &run,
        &[
            ANY_ORDER,
            Explained {
                pattern: "drop fsync run/step_00000001/",
                reason: "the second one: recovery deletes what a tombstone names",
            },
            Explained {
                pattern: "swap [rmdir run/step_00000001/i2 | fsync run/step_00000001/]",
                reason: "as above",
            },
            Explained {
                pattern: "swap [fsync run/step_00000001/ | mark \"committed 2 a\"]",
                reason: "as above; step 2 was durable before",
            },
            Explained {
                pattern: "swap [fsync run/ | create run/step_00000001/.manifest.json.new]",
                reason: "the new manifest says nothing before it has its name",
            },
        ],
    );
    assert!(report.caught().contains(&"drop fsync run/step_00000001/"), "the first one");
}

#[test]
fn of_a_rewind() {
    let run = scenario(&[1, 2, 3], Retention::KeepAll, |run, manager| {
        run.rewind(manager, 1, "old", &[2, 3]).unwrap();
    });
    mutants_are_caught(&run, &[]);
}

#[test]
fn of_a_deletion() {
    let run = scenario(&[1, 2], Retention::KeepAll, |run, manager| run.delete(manager, 1).unwrap());
    mutants_are_caught(
        &run,
        &[Explained {
            pattern: "swap [mark \"gone 1\" | unlink run/.trash-*]",
            reason: "trash is durably out of sight before anything of it is deleted",
        }],
    );
}

#[test]
fn of_metrics() {
    let run = scenario(&[1], Retention::KeepAll, |run, manager| run.add_metric(manager, 1, 0.5).unwrap());
    mutants_are_caught(
        &run,
        &[Explained {
            pattern: "swap [fsync run/.stepwell/metrics/*.new | rename run/.stepwell/metrics/*]",
            reason: "a sidecar that is torn was not acknowledged, and is left out",
        }],
    );
}

#[test]
fn of_making_a_root() {
    let run = Run::fresh();
    let manager = run.open(options()).unwrap();
    run.save(&manager, 1, "a").unwrap();
    close(&manager).unwrap();
    mutants_are_caught(
        &run,
        &[
            ANY_ORDER,
            INTENTION,
            Explained {
                pattern: "drop fsync run/.stepwell/",
                reason: "before the first writer is told that it is one, the next one makes all of it again",
            },
            Explained {
                pattern: "swap [mkdir run/.stepwell/metrics | fsync run/.stepwell/]",
                reason: "as above",
            },
            Explained {
                pattern: "swap [rename run/.stepwell/.epoch.new -> epoch | fsync run/.stepwell/]",
                reason: "as above",
            },
            Explained {
                pattern: "swap [fsync run/.stepwell/.epoch.new | rename run/.stepwell/.epoch.new -> epoch]",
                reason: "as above",
            },
            Explained {
                pattern: "swap [fsync run/.stepwell/ | create run/.stepwell/.root.json.new]",
                reason: "as above",
            },
        ],
    );
}

#[test]
fn of_opening_a_root_with_leftovers() {
    let run = Run::with_steps([1]).unwrap();
    let manager = run.open(options()).unwrap();
    run.disk.kill_at(run.disk.operations() + 30);
    run.save(&manager, 2, "b").unwrap_err();
    let next = Run::on(SimDisk::from_image(&run.disk.image())).next_process();
    next.settle(&[1]);
    next.mark("begin 2 b");
    let second = next.open(options()).unwrap();
    close(&second).unwrap();
    mutants_are_caught(
        &next,
        &[
            LEFTOVER_RENAME,
            LEFTOVER_SYNC,
            Explained {
                pattern: "drop fsync run/",
                reason: "of temporaries that became trash; before that, all was durable here (see after a kill)",
            },
            Explained {
                pattern: "swap [fsync run/.stepwell/ | rename run/.tmp-*]",
                reason: "the lock says that their owner is dead; the epoch is for those whom no lock stops",
            },
            Explained {
                pattern: "swap [fsync run/ | mark \"opened *\"]",
                reason: "the epoch is durable before",
            },
            Explained { pattern: "swap [mark \"opened *\" | unlink run/.trash-*]", reason: "as above" },
        ],
    );
}

#[test]
fn of_opening_a_root_after_a_kill() {
    // Killed right after the rename: the step is there, and not durable.
    let run = (0..1000)
        .map(|number| {
            let run = Run::with_steps([1]).unwrap();
            let manager = run.open(options()).unwrap();
            run.settle(&[1]);
            run.disk.kill_at(run.disk.operations() + number);
            drop(run.save(&manager, 2, "b"));
            run
        })
        .find(|run| run.disk.image().get("run/step_00000002").is_some())
        .unwrap();
    let next = run.next_process();
    let manager = next.open(options()).unwrap();
    next.mark("seen 2 b");
    close(&manager).unwrap();
    let nothing_concluded = Explained {
        pattern: "swap [fsync run/ | create run/.stepwell/.epoch.new]",
        reason: "nothing is concluded from the root before the epoch is there",
    };
    let report = mutants_are_caught(&next, &[ANY_ORDER, nothing_concluded]);
    assert!(report.caught().contains(&"drop fsync run/"), "what is visible is synced before it is trusted");
}
