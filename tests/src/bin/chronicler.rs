//! Lives a history of saves on a disk that is going to fail, and judges what is left of it: the
//! process of `tests/disks`, which cuts its power.
//!
//! `chronicler live ROOT NAME SEED [operations=N] [forget=files|directories|root] [device=NAME]`
//! writes its journal to standard output; see [`stepwell_tests::real::history`]. `device` is a
//! `log-writes` target that gets a mark for each line.
//!
//! `chronicler judge ROOT` reads the journals of all processes that lived there from standard
//! input, and says `sound STEPS SET_ASIDE` or `unsound WHY`.
//!
//! `chronicler repeat ROOT` makes saves that give the same bytes on every run, and says `engine
//! NAME direct=… registered=…`, then `saved` or `error KIND ERRNO WORDS`.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use stepwell_core::io::{Engine, open_disk};
use stepwell_manager::Error;
use stepwell_tests::real::history::{History, Journal};
use stepwell_tests::real::{aftermath, repeatable};

const USAGE: &str = "usage: chronicler live ROOT NAME SEED [operations=N] [forget=files|directories|root] [device=NAME] | chronicler judge ROOT | chronicler repeat ROOT";

fn live(arguments: &[String]) -> Result<(), String> {
    let [root, name, seed, options @ ..] = arguments else { return Err(USAGE.to_owned()) };
    let seed = seed.parse().map_err(|_| USAGE.to_owned())?;
    let (mut operations, mut forgets, mut journal) = (None, None, Journal::default());
    for option in options {
        match option.split_once('=') {
            Some(("operations", count)) => operations = Some(count.parse().map_err(|_| USAGE.to_owned())?),
            Some(("forget", what)) => forgets = Some(what.parse()?),
            Some(("device", device)) => journal.device = Some(device.to_owned()),
            _ => return Err(USAGE.to_owned()),
        }
    }
    History::new(PathBuf::from(root), name.clone(), seed, forgets, journal).live(operations)
}

fn judge(root: &str) -> Result<bool, String> {
    let mut journal = String::new();
    std::io::stdin().read_to_string(&mut journal).map_err(|error| error.to_string())?;
    match aftermath::judge(Path::new(root), &aftermath::marks(&journal)) {
        Ok(found) => {
            println!("sound {} {}", found.steps, found.set_aside);
            Ok(true)
        }
        Err(what) => {
            println!("unsound {}", what.replace('\n', " "));
            Ok(false)
        }
    }
}

fn repeat(root: &str) {
    let root = Path::new(root);
    let opened = open_disk(root, Engine::Auto).map_err(|error| Arc::new(Error::from(error)));
    let saved = opened.and_then(|disk| {
        let choice = disk.choice();
        println!("engine {} direct={} registered={}", choice.engine, choice.direct, choice.registered);
        repeatable::save(root, disk, &repeatable::options())
    });
    match saved {
        Ok(()) => println!("saved"),
        Err(error) => {
            let errno = error.errno().map_or_else(|| "none".to_owned(), |errno| errno.to_string());
            println!("error {} {errno} {}", error.kind(), error.to_string().replace('\n', " "));
        }
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match words[..] {
        ["live", ..] => live(&arguments[1..]).map(|()| true),
        ["judge", root] => judge(root),
        ["repeat", root] => {
            repeat(root);
            Ok(true)
        }
        _ => Err(USAGE.to_owned()),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(what) => {
            eprintln!("{what}");
            ExitCode::from(2)
        }
    }
}
