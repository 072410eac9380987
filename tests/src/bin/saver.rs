//! Saves some steps with retention and says on standard output, line by line, what became of each:
//! the process that is killed or fed errors at every system call (`tests/tests/system_calls.rs`).
//! The twin of `tests/python/saver.py`.
//!
//! `saver ROOT FIRST STEPS` saves at once. With a fourth argument `wait` it first says `ready` and
//! waits for a line on standard input, so that a tracer may attach and count from there; then it
//! opens `/stepwell-sweep-begins-here`, which is found in a trace.
//!
//! `saver PATH singular` saves one state under a path, prints `captures`, and never ends by itself:
//! one of its leaves never finishes.
//!
//! The lines: `open failed KIND ERRNO`, `committed STEP`, `failed STEP KIND ERRNO`, `uncertain STEP
//! ERRNO`, `closed`, `close failed KIND ERRNO`.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use stepwell_core::io::{Engine, open_disk};
use stepwell_core::provider::{Fill, StateProvider};
use stepwell_core::staging::{Filling, Slot};
use stepwell_manager::{
    Environment, Error, LeafSource, Manager, Options, Outcome, Retention, SaveRequest, singular,
};
use stepwell_tests::real::trials;

const DEADLINE: Duration = Duration::from_secs(30);

/// In one write, so that a kill leaves no half line. Errors are injected here too, and it is not
/// the talking that is tried.
fn write(to: impl AsFd, line: &str) {
    for _ in 0..5 {
        if rustix::io::write(&to, format!("{line}\n").as_bytes()).is_ok() {
            return;
        }
    }
}

fn say(line: &str) {
    write(std::io::stdout(), line);
}

fn explain(error: &Error) {
    write(std::io::stderr(), &error.to_string());
}

fn of(error: &Error) -> String {
    let errno = error.errno().map_or_else(|| "none".to_owned(), |errno| errno.to_string());
    format!("{} {errno}", error.kind())
}

fn open(root: &Path) -> Result<Manager, Error> {
    let environment = Environment::single_process(open_disk(root, Engine::Auto)?);
    let options = Options { retention: Retention::KeepLatest { n: 2 }, ..trials::options() };
    Manager::open(root, options, environment)
}

fn run(root: &Path, first: u64, steps: u64) {
    let manager = match open(root) {
        Ok(manager) => manager,
        Err(error) => {
            say(&format!("open failed {}", of(&error)));
            explain(&error);
            return;
        }
    };
    for step in first..first + steps {
        let outcome = manager
            .save(SaveRequest::new(step, trials::state(step)))
            .map(|save| save.wait(Some(DEADLINE)).ok().flatten());
        match outcome {
            Ok(Some(Outcome::Committed)) => say(&format!("committed {step}")),
            Ok(Some(Outcome::DurabilityUncertain(error))) => {
                say(&format!("uncertain {step} {}", of(&error)));
                explain(&error);
            }
            Ok(Some(Outcome::NotCommitted(error))) => {
                say(&format!("failed {step} {}", of(&error)));
                explain(&error);
            }
            Ok(None) => say(&format!("failed {step} hang none")),
            Err(error) => {
                say(&format!("failed {step} {}", of(&error)));
                explain(&error);
            }
        }
    }
    match manager.close(Some(DEADLINE)) {
        Ok(()) => say("closed"),
        Err(error) => {
            say(&format!("close failed {}", of(&error)));
            explain(&error);
        }
    }
}

/// A leaf that never finishes.
struct Endless;

impl StateProvider for Endless {
    fn capture(&self, _: &[Fill<'_>], _: &mut Slot<Filling>) -> stepwell_core::Result<()> {
        say("captures");
        loop {
            std::thread::park();
        }
    }
}

fn run_singular(path: &Path) -> Result<(), Error> {
    let mut state = trials::state(1);
    if let Some(LeafSource::Tensor { provider, .. }) = state.leaves.first_mut() {
        *provider = Arc::new(Endless);
    }
    let environment = Environment::single_process(open_disk(path, Engine::Auto)?);
    singular::save(path, SaveRequest::new(0, state), &trials::options(), &environment).map(drop)
}

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1).peekable();
    let root = arguments.next().map(PathBuf::from);
    if let Some(path) = &root
        && arguments.peek().is_some_and(|mode| mode == "singular")
    {
        if let Err(error) = run_singular(path) {
            explain(&error);
        }
        return ExitCode::FAILURE;
    }
    let mut number = || arguments.next().and_then(|text| text.to_str().and_then(|text| text.parse().ok()));
    let (Some(root), Some(first), Some(steps)) = (root, number(), number()) else {
        say("usage: saver ROOT FIRST STEPS [wait]");
        return ExitCode::FAILURE;
    };
    if arguments.next().is_some() {
        // A test that is no ancestor may trace it; where that needs no leave, none is given.
        let _ = rustix::process::set_ptracer(rustix::process::PTracer::Any);
        say("ready");
        let _ = std::io::stdin().read_line(&mut String::new());
    }
    let _ = std::fs::File::open("/stepwell-sweep-begins-here");
    run(&root, first, steps);
    ExitCode::SUCCESS
}
