//! Retention removes its steps, and nothing else.

use stepwell_manager::{Manager, Mode, Retention};
use stepwell_tests::steps::run::{Run, close};

use super::{keeping, survives};

/// Saves `step`; retention takes `victims` away then.
fn save_retiring(run: &Run, manager: &Manager, step: u64, victims: &[u64]) {
    for victim in victims {
        run.mark(&format!("may go {victim} once {step}"));
    }
    run.save(manager, step, "a").unwrap();
    for victim in victims {
        run.mark(&format!("gone {victim}"));
    }
}

/// Saves `step`; retention thins `victims` then.
fn save_thinning(run: &Run, manager: &Manager, step: u64, victims: &[u64]) {
    for victim in victims {
        run.mark(&format!("may thin {victim} once {step}"));
    }
    run.save(manager, step, "a").unwrap();
    for victim in victims {
        run.mark(&format!("thinned {victim}"));
    }
}

fn latest_and_params(n: u64) -> Retention {
    Retention::Any { of: vec![Retention::keep_latest(n), Retention::keep_every_items(1, ["params"])] }
}

#[test]
fn keeping_the_latest_one() {
    let run = Run::with_steps([1]).unwrap();
    let manager = run.open(keeping(Retention::keep_latest(1))).unwrap();
    save_retiring(&run, &manager, 2, &[1]);
    save_retiring(&run, &manager, 3, &[2]);
    close(&manager).unwrap();
    survives(&run);
}

#[test]
fn keeping_the_latest_two() {
    let run = Run::with_steps([1, 2]).unwrap();
    let manager = run.open(keeping(Retention::keep_latest(2))).unwrap();
    save_retiring(&run, &manager, 3, &[1]);
    save_retiring(&run, &manager, 4, &[2]);
    close(&manager).unwrap();
    survives(&run);
}

#[test]
fn a_new_rule_takes_several_at_once() {
    let run = Run::with_steps([1, 2, 3]).unwrap();
    let manager = run.open(keeping(Retention::keep_latest(1))).unwrap();
    save_retiring(&run, &manager, 4, &[1, 2, 3]);
    close(&manager).unwrap();
    survives(&run);
}

#[test]
fn keeping_every_second_step() {
    let run = Run::with_steps([1, 2]).unwrap();
    let rule = Retention::Any { of: vec![Retention::keep_latest(1), Retention::keep_every(2)] };
    let manager = run.open(keeping(rule)).unwrap();
    save_retiring(&run, &manager, 3, &[1]);
    save_retiring(&run, &manager, 4, &[3]);
    close(&manager).unwrap();
    survives(&run);
}

#[test]
fn keeping_the_best_one() {
    let run = Run::with_steps([]).unwrap();
    let rule =
        Retention::Any { of: vec![Retention::keep_latest(1), Retention::keep_best(1, "loss", Mode::Min)] };
    let manager = run.open(keeping(rule)).unwrap();
    run.save_metric(&manager, 1, "a", 0.5).unwrap();
    run.save_metric(&manager, 2, "a", 0.9).unwrap();
    run.mark("may go 2 once 3");
    run.save_metric(&manager, 3, "a", 0.7).unwrap();
    run.mark("gone 2");
    close(&manager).unwrap();
    survives(&run);
}

#[test]
fn thinning_an_old_step() {
    let run = Run::with_steps([1]).unwrap();
    let manager = run.open(keeping(latest_and_params(1))).unwrap();
    save_thinning(&run, &manager, 2, &[1]);
    close(&manager).unwrap();
    survives(&run);
}

#[test]
fn thinning_two_steps_at_once() {
    let run = Run::with_steps([1, 2]).unwrap();
    let manager = run.open(keeping(latest_and_params(1))).unwrap();
    save_thinning(&run, &manager, 3, &[1, 2]);
    close(&manager).unwrap();
    survives(&run);
}

#[test]
fn retiring_a_thinned_step() {
    let run = Run::with_steps([1]).unwrap();
    let manager = run.open(keeping(latest_and_params(1))).unwrap();
    save_thinning(&run, &manager, 2, &[1]);
    close(&manager).unwrap();
    let manager = run.open(keeping(Retention::keep_latest(2))).unwrap();
    save_retiring(&run, &manager, 3, &[1]);
    close(&manager).unwrap();
    survives(&run);
}

#[test]
fn a_held_step_stays() {
    let run = Run::with_steps([1]).unwrap();
    let manager = run.open(keeping(Retention::keep_latest(1))).unwrap();
    let hold = manager.hold(1).unwrap();
    run.save(&manager, 2, "a").unwrap();
    drop(hold);
    save_retiring(&run, &manager, 3, &[1, 2]);
    close(&manager).unwrap();
    survives(&run);
}

#[test]
fn replacing_under_retention() {
    let run = Run::with_steps([1]).unwrap();
    let manager = run.open(keeping(Retention::keep_latest(1))).unwrap();
    save_retiring(&run, &manager, 2, &[1]);
    run.replace(&manager, 2, "b").unwrap();
    close(&manager).unwrap();
    survives(&run);
}
