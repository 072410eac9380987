//! Saving.

use stepwell_core::io::simulated::{Action, Fault, OperationKind, SimDisk};
use stepwell_manager::{Exists, SaveRequest};
use stepwell_tests::steps::run::{Run, close, options};
use stepwell_tests::steps::states;

use super::survives;

#[test]
fn a_first_save_into_a_new_root() {
    let run = Run::fresh();
    let manager = run.open(options()).unwrap();
    run.save(&manager, 1, "a").unwrap();
    close(&manager).unwrap();
    survives(&run);
}

#[test]
fn three_saves_in_a_row() {
    let run = Run::with_steps([]).unwrap();
    let manager = run.open(options()).unwrap();
    for step in 1..=3 {
        run.save(&manager, step, "a").unwrap();
    }
    close(&manager).unwrap();
    survives(&run);
}

#[test]
fn saves_that_wait_for_one_another() {
    let run = Run::with_steps([1]).unwrap();
    let manager = run.open(stepwell_manager::Options { max_pending: 3, ..options() }).unwrap();
    let saves: Vec<_> = (2..=3)
        .map(|step| {
            run.mark(&format!("begin {step} a"));
            let mut request = SaveRequest::new(step, states::state(step, "a").unwrap());
            request.custom_metadata = states::metadata("a", states::FEW);
            manager.save(request).unwrap()
        })
        .collect();
    for save in saves {
        assert!(save.wait(None).unwrap().unwrap().error().is_none());
        run.mark(&format!("committed {} a", save.step()));
    }
    close(&manager).unwrap();
    survives(&run);
}

#[test]
fn transfers_that_complete_out_of_order() {
    for seed in [3, 4] {
        let run = Run::on(SimDisk::new().with_order(seed));
        let manager = run.open(options()).unwrap();
        run.settle(&[]);
        run.save(&manager, 1, "a").unwrap();
        close(&manager).unwrap();
        survives(&run);
    }
}

#[test]
fn transfers_that_are_short() {
    let run = Run::with_steps([1]).unwrap();
    let manager = run.open(options()).unwrap();
    run.disk.inject(Fault::on(OperationKind::Write, Action::Short).from_then_on());
    run.save(&manager, 2, "a").unwrap();
    close(&manager).unwrap();
    survives(&run);
}

#[test]
fn aligned_transfers() {
    let run = Run::on(SimDisk::new().with_alignment(4096));
    let manager = run.open(options()).unwrap();
    run.settle(&[]);
    run.save(&manager, 1, "a").unwrap();
    close(&manager).unwrap();
    survives(&run);
}

#[test]
fn replacing_the_latest_step() {
    let run = Run::with_steps([1, 2]).unwrap();
    let manager = run.open(options()).unwrap();
    run.replace(&manager, 2, "b").unwrap();
    close(&manager).unwrap();
    survives(&run);
}

#[test]
fn replacing_the_only_step_twice() {
    let run = Run::with_steps([1]).unwrap();
    let manager = run.open(options()).unwrap();
    run.replace(&manager, 1, "b").unwrap();
    run.replace(&manager, 1, "c").unwrap();
    close(&manager).unwrap();
    survives(&run);
}

#[test]
fn replacing_a_step_that_is_not_there() {
    let run = Run::with_steps([1]).unwrap();
    let manager = run.open(options()).unwrap();
    run.replace(&manager, 2, "b").unwrap();
    close(&manager).unwrap();
    survives(&run);
}

#[test]
fn skipping_a_step_that_is_there_changes_nothing() {
    let run = Run::with_steps([1]).unwrap();
    let manager = run.open(options()).unwrap();
    let before = run.disk.image();
    let mut request = SaveRequest::new(1, states::state(1, "b").unwrap());
    request.exists = Exists::Skip;
    assert!(manager.save(request).unwrap().refusal().is_some());
    assert_eq!(run.disk.image(), before);
    close(&manager).unwrap();
    survives(&run);
}

#[test]
fn reopening_between_saves() {
    let run = Run::with_steps([1]).unwrap();
    for step in 2..=3 {
        let manager = run.open(options()).unwrap();
        run.save(&manager, step, "a").unwrap();
        close(&manager).unwrap();
    }
    survives(&run);
}

#[test]
fn a_directory_that_is_no_step_is_set_aside_for_one() {
    let run = Run::with_steps([1]).unwrap();
    run.plant_torn("step_00000002", &[1]).unwrap();
    let manager = run.open(options()).unwrap();
    run.save(&manager, 2, "b").unwrap();
    close(&manager).unwrap();
    survives(&run);
}

#[test]
fn a_directory_that_is_no_step_is_set_aside_for_a_replacement() {
    let run = Run::with_steps([1]).unwrap();
    run.plant_torn("step_00000002", &[1]).unwrap();
    let manager = run.open(options()).unwrap();
    run.replace(&manager, 2, "b").unwrap();
    close(&manager).unwrap();
    survives(&run);
}

#[test]
fn a_copied_step_gets_its_lease_back() {
    let run = Run::with_steps([1]).unwrap();
    let root = run.disk.image().get("run").cloned().unwrap();
    let (name, step) =
        root.entries().unwrap().iter().find(|(name, _)| name.starts_with("step_")).unwrap().clone();
    let copied =
        step.entries().unwrap().iter().filter(|(name, _)| name.as_ref() != ".lease").cloned().collect();
    let copy = SimDisk::from_image(&run.disk.image());
    copy.plant(&format!("run/{name}"), &stepwell_core::io::simulated::ImageNode::dir(copied)).unwrap();
    let run = Run::on(SimDisk::from_image(&copy.image()));
    run.mark("committed 1 a");
    let manager = run.open(options()).unwrap();
    assert!(run.disk.bytes(&format!("run/{name}/.lease")).is_some());
    run.save(&manager, 2, "a").unwrap();
    close(&manager).unwrap();
    survives(&run);
}
