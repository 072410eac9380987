//! Operations that never return: every call ends by its deadline, `close` reports the hang, no
//! other writer is admitted meanwhile, and after the process's end (or the disk's return) nothing
//! is torn or lost.
//!
//! The hanging operation belongs to the engine's own threads, or is a transfer in a queue. A call
//! that itself uses the disk (opening, listing, deleting) hangs with it in the kernel.

use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use stepwell_core::io::simulated::{Action, Fault, Image, Moment, OperationKind, SimDisk};
use stepwell_manager::{Error, Manager, Options, Retention};
use stepwell_tests::crash::{Explorer, Marks};
use stepwell_tests::steps::check::Checker;
use stepwell_tests::steps::run::{Run, close, options};
use stepwell_tests::steps::{ROOT, world};

use super::kills::trust;
use super::{bound, quick};

/// The most time of a call beyond its deadlines on a busy machine. A slower call hangs.
const FOR_EVER: Duration = Duration::from_secs(120);

/// One operation that does not return until it is let go.
#[derive(Default)]
struct Hang {
    /// True if it was come to, and whether it was let go.
    state: Mutex<(bool, bool)>,
    changed: Condvar,
}

impl Hang {
    /// The engine's operation `number` of process 0 hangs, before or after it has taken effect.
    fn at(disk: &SimDisk, number: u64, when: Moment) -> Arc<Self> {
        let hang = Arc::new(Self::default());
        let hook = Arc::clone(&hang);
        disk.set_hook(Some(Arc::new(move |moment, operation| {
            let engine = std::thread::current().name().is_some_and(|name| name.starts_with("stepwell-"));
            if engine && moment == when && operation.process == 0 && operation.number == number {
                let mut state = hook.state.lock().unwrap();
                state.0 = true;
                let held = hook.changed.wait_timeout_while(state, 4 * FOR_EVER, |(_, released)| !*released);
                drop(held.unwrap());
            }
        })));
        hang
    }

    fn was_reached(&self) -> bool {
        self.state.lock().unwrap().0
    }

    fn let_go(&self) {
        self.state.lock().unwrap().1 = true;
        self.changed.notify_all();
    }
}

/// How it goes on.
#[derive(Clone, Copy, PartialEq)]
enum After {
    /// The process is killed.
    Killed,
    /// The disk answers after all.
    Released,
}

/// The results of the hanging process's calls.
struct Said {
    saved: Result<(), String>,
    closed: Result<(), String>,
    manager: Manager,
}

/// Saves these steps with the deadlines of `patience`, and closes. Every call ends.
fn save_and_close(run: &Arc<Run>, steps: &'static [u64], patience: Duration) -> Said {
    let (tell, told) = channel();
    let here = Arc::clone(run);
    std::thread::spawn(move || {
        let retention = Retention::keep_latest(1);
        let manager = here.open(Options { stall_timeout: patience, retention, ..options() }).unwrap();
        let saved = steps.iter().try_for_each(|&step| {
            (1..step).for_each(|gone| here.mark(&format!("may go {gone} once {step}")));
            here.save(&manager, step, "b")
        });
        let closed = manager.close(Some(patience)).map_err(|error| error.kind().to_owned());
        drop(tell.send(Said { saved, closed, manager }));
    });
    told.recv_timeout(FOR_EVER).expect("I11: a call has not ended by its deadline")
}

/// On the steps 1 and 2, through a ring of its own: what hangs keeps its memory.
fn prepared(image: &Image, slots: usize, patience: Duration) -> Arc<Run> {
    let mut run = Run::on(SimDisk::from_image(image)).with_windows(slots).unwrap();
    run.settle(&[1, 2]);
    run.patience = patience;
    Arc::new(run)
}

/// These steps are saved under retention, each operation of the engine hanging in turn (without
/// `STEPWELL_LONG` every seventh one).
fn survives_hangs(when: Moment, after: After, slots: usize, steps: &'static [u64]) {
    let image = Run::with_steps([1, 2]).unwrap().disk.image();
    let mut explorer = Explorer::new(quick());
    let mut checker = Checker::new(options());
    let stride = bound(7, 1) as u64;
    let (mut number, mut hung, mut takeovers) = (0, 0, 0);
    let mut patience = Duration::from_millis(50);
    loop {
        let run = prepared(&image, slots, patience);
        let hang = Hang::at(&run.disk, number, when);
        let said = save_and_close(&run, steps, patience);
        let reached = hang.was_reached();
        if reached {
            hung += 1;
            assert_eq!(said.closed, Err("timeout".to_owned()), "close reports what hangs at {number}");
            let other = Manager::open(
                ROOT.as_ref(),
                Options { create: false, ..options() },
                world::environment(&run.disk.process(), 99),
            );
            // A committed step stays committed: a hanging deletion blocks no writer.
            match other {
                Err(Error::Locked { .. }) if said.saved.is_err() => {}
                Ok(_) if said.saved.is_ok() => takeovers += 1,
                other => panic!("hung at {number}, {:?}: another writer gets {:?}", said.saved, other.err()),
            }
        }
        if after == After::Killed {
            run.disk.kill();
        }
        hang.let_go();
        run.disk.set_hook(None);
        let operations = run.disk.operations();
        drop(said.manager);
        if after == After::Released {
            gone(&run.disk, number);
        }
        if reached {
            let next = run.next_process();
            trust(&next, true).unwrap_or_else(|what| panic!("hung at {number}: {what}\n{}", run.disk.log()));
            explorer
                .explore(&run.disk.log(), &Marks::default(), |disk, marks| checker.check(disk, marks))
                .unwrap_or_else(|failure| panic!("hung at {number}: {failure}\n{}", run.disk.log()));
        }
        if reached || number < operations {
            number += stride;
        } else if said.saved.is_ok() && said.closed.is_ok() {
            break;
        } else {
            // Nothing hangs, and it was not done by its deadline: the machine is slow.
            patience *= 2;
        }
    }
    println!("{hung} hangs of {number} operations, {takeovers} in a deletion; {}", explorer.explored);
    assert!(hung * stride > 100 && takeovers * stride > 12, "{hung}, {takeovers}");
}

/// Waits until a process that gave up has let go of everything.
fn gone(disk: &SimDisk, number: u64) {
    let until = Instant::now() + FOR_EVER;
    while disk.locks_held() > 0 || disk.open_handles() > 0 {
        let (locks, handles) = (disk.locks_held(), disk.open_handles());
        assert!(
            Instant::now() < until,
            "hung at {number}, let go: {locks} locks and {handles} handles are left"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn any_operation_hangs_and_the_process_is_killed() {
    survives_hangs(Moment::Before, After::Killed, 16, &[3]);
}

#[test]
fn any_operation_may_hang_after_its_effect() {
    survives_hangs(Moment::After, After::Killed, 16, &[3]);
}

#[test]
fn any_operation_hangs_for_a_while() {
    survives_hangs(Moment::Before, After::Released, 16, &[3]);
}

#[test]
fn any_operation_hangs_while_the_capture_waits_for_memory() {
    survives_hangs(Moment::Before, After::Killed, 2, &[3]);
}

#[test]
fn any_operation_hangs_in_a_save_over_a_retired_step() {
    survives_hangs(Moment::Before, After::Killed, 16, &[3, 4]);
}

#[test]
fn a_hanging_write_fails_its_save_and_frees_the_step() {
    let image = Run::with_steps([1, 2]).unwrap().disk.image();
    let mut explorer = Explorer::new(quick());
    let mut checker = Checker::new(options());
    let mut stalled = 0;
    let mut patience = Duration::from_millis(200);
    let mut number = 0;
    while number < 6 {
        let run = prepared(&image, 16, FOR_EVER);
        let manager = run.open(Options { stall_timeout: patience, ..options() }).unwrap();
        run.disk.inject(Fault::on(OperationKind::Write, Action::Stall).at("data").after(number));
        let begun = Instant::now();
        let saved = run.save(&manager, 3, "b");
        if let Err(error) = saved {
            if !error.contains("writes to complete") {
                // It was no write that did not move: the machine is slow.
                assert!(error.contains("waited"), "{error}");
                patience *= 2;
                run.disk.kill();
                continue;
            }
            stalled += 1;
            assert!(begun.elapsed() >= patience, "it gave up too early");
            assert_eq!(manager.all_steps().unwrap(), [1, 2]);
        }
        drop(manager.close(Some(FOR_EVER)));
        drop(manager);
        run.disk.kill();
        let next = run.next_process();
        let again = next.open(options()).unwrap();
        if again.all_steps().unwrap() == [1, 2] {
            next.save(&again, 3, "c").unwrap();
        }
        close(&again).unwrap();
        explorer
            .explore(&run.disk.log(), &Marks::default(), |disk, marks| checker.check(disk, marks))
            .unwrap_or_else(|failure| panic!("stalled at write {number}: {failure}\n{}", run.disk.log()));
        number += 1;
    }
    println!("{stalled} writes that never completed; {}", explorer.explored);
    assert!(stalled >= 5, "{stalled}");
}
