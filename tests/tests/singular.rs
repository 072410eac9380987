//! A process that is killed in a save to a path leaves a temporary beside it; the next save to that
//! path removes it, and never one whose process lives.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use stepwell_core::io::Engine;
use stepwell_manager::{Checkpoint, Environment, Exists, Manager, Outcome, SaveRequest, singular};
use stepwell_tests::real::trials;

/// A process in the middle of a save to `path`: its temporary is there.
fn saver(path: &Path) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_saver"));
    let mut child = command.arg(path).arg("singular").stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "captures\n");
    for _ in 0..500 {
        let parent = path.parent().unwrap();
        let written = leftovers(parent).iter().any(|name| parent.join(name).join(".lease").exists());
        if written {
            return child;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    unreachable!("it makes no temporary")
}

fn leftovers(parent: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(parent) else { return Vec::new() };
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.starts_with('.')).collect()
}

fn save(path: &Path, step: u64) {
    let environment = Environment::real(path, Engine::Auto).unwrap();
    let request = SaveRequest { exists: Exists::Replace, ..SaveRequest::new(0, trials::state(step)) };
    let save = singular::save(path, request, &trials::options(), &environment).unwrap();
    assert!(matches!(save.wait(Some(Duration::from_secs(60))), Ok(Some(Outcome::Committed))));
    assert_eq!(Checkpoint::open(path, &environment).unwrap().leaves().len(), 2);
}

#[test]
fn a_writer_leaves_live_path_saves_and_removes_dead_ones() {
    let directory = tempfile::tempdir().unwrap();
    let open = || {
        let environment = Environment::real(directory.path(), Engine::Auto).unwrap();
        let manager = Manager::open(directory.path(), trials::options(), environment).unwrap();
        manager.close(Some(Duration::from_secs(60))).unwrap();
        leftovers(directory.path()).into_iter().filter(|name| name != ".stepwell").count()
    };
    assert_eq!(open(), 0);
    let mut live = saver(&directory.path().join("model"));
    assert_eq!(open(), 1, "its process lives");
    live.kill().unwrap();
    live.wait().unwrap();
    assert_eq!(open(), 0);
}

#[test]
fn a_path_save_removes_dead_leftovers_beside_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model");
    let mut live = saver(&path);
    save(&path, 1);
    assert_eq!(leftovers(directory.path()).len(), 1, "its process lives");
    live.kill().unwrap();
    live.wait().unwrap();
    assert_eq!(leftovers(directory.path()).len(), 1);
    save(&path, 2);
    assert_eq!(leftovers(directory.path()), [] as [&str; 0]);
}
