use super::*;
use crate::io::Disk as _;
use crate::io::simulated::SimDisk;

/// A directory, the writer's view of it, its change log, and another process's view.
fn scene() -> (RecordingDir, Arc<ChangeLog>, Arc<dyn Dir>) {
    let disk = SimDisk::new();
    let root = Path::new("/run");
    let dir = disk.open_dir(Path::new("/")).unwrap();
    dir.create_dir("run").unwrap();
    let changes = Arc::new(ChangeLog::default());
    let mine = RecordingDir::new(disk.open_dir(root).unwrap(), Arc::clone(&changes));
    let other = disk.process().open_dir(root).unwrap();
    (mine, changes, other)
}

fn list(mine: &RecordingDir, changes: &ChangeLog) {
    let at = changes.now();
    changes.listed(at, mine.changed().unwrap());
}

fn touched(mine: &RecordingDir, changes: &ChangeLog) -> Option<Vec<String>> {
    changes.since_listed(mine.changed().unwrap()).map(|(touched, _)| touched)
}

#[test]
fn nothing_is_known_of_a_directory_that_was_not_listed() {
    let (mine, changes, _) = scene();
    assert_eq!(touched(&mine, &changes), None);
    mine.create_dir("a").unwrap();
    assert_eq!(touched(&mine, &changes), None);
}

#[test]
fn what_the_writer_changes_itself_is_known_by_name() {
    let (mine, changes, _) = scene();
    list(&mine, &changes);
    assert_eq!(touched(&mine, &changes).unwrap(), [""; 0]);
    mine.create_dir("a").unwrap();
    mine.rename("a", "b", Rename::NoReplace).unwrap();
    assert_eq!(touched(&mine, &changes).unwrap(), ["a", "b"]);
    let (_, at) = changes.since_listed(mine.changed().unwrap()).unwrap();
    mine.remove_dir("b").unwrap();
    changes.clear_up_to(at);
    assert_eq!(touched(&mine, &changes).unwrap(), ["b"], "it was changed again after it was looked at");
}

#[test]
fn changes_of_others_are_news_until_the_next_listing() {
    let (mine, changes, other) = scene();
    list(&mine, &changes);
    other.create_dir("a").unwrap();
    assert_eq!(touched(&mine, &changes), None);
    mine.create_dir("b").unwrap();
    assert_eq!(touched(&mine, &changes), None, "a change of its own does not hide it");
    list(&mine, &changes);
    assert_eq!(touched(&mine, &changes).unwrap(), [""; 0]);
}

#[test]
fn a_change_during_a_listing_makes_it_count_for_nothing() {
    let (mine, changes, _) = scene();
    let at = changes.now();
    let shows = mine.changed().unwrap();
    mine.create_dir("a").unwrap();
    changes.listed(at, shows);
    assert_eq!(touched(&mine, &changes), None);
}

#[test]
fn a_change_that_fails_is_none() {
    let (mine, changes, _) = scene();
    mine.create_dir("a").unwrap();
    list(&mine, &changes);
    assert!(mine.create_dir("a").is_err());
    assert_eq!(touched(&mine, &changes).unwrap(), ["a"]);
}
