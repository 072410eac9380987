use super::*;
use crate::io::Disk as _;
use crate::io::simulated::SimDisk;

/// A directory, the writer's view of it, its notes, and another process's view.
fn scene() -> (Noting, Arc<Notes>, Arc<dyn Dir>) {
    let disk = SimDisk::new();
    let root = Path::new("/run");
    let dir = disk.open_dir(Path::new("/")).unwrap();
    dir.create_dir("run").unwrap();
    let notes = Arc::new(Notes::default());
    let mine = Noting::new(disk.open_dir(root).unwrap(), Arc::clone(&notes));
    let other = disk.process().open_dir(root).unwrap();
    (mine, notes, other)
}

fn list(mine: &Noting, notes: &Notes) {
    let at = notes.now();
    notes.listed(at, mine.changed().unwrap());
}

fn touched(mine: &Noting, notes: &Notes) -> Option<Vec<String>> {
    notes.since_listed(mine.changed().unwrap()).map(|(touched, _)| touched)
}

#[test]
fn nothing_is_known_of_a_directory_that_was_not_listed() {
    let (mine, notes, _) = scene();
    assert_eq!(touched(&mine, &notes), None);
    mine.create_dir("a").unwrap();
    assert_eq!(touched(&mine, &notes), None);
}

#[test]
fn what_the_writer_changes_itself_is_known_by_name() {
    let (mine, notes, _) = scene();
    list(&mine, &notes);
    assert_eq!(touched(&mine, &notes).unwrap(), [""; 0]);
    mine.create_dir("a").unwrap();
    mine.rename("a", "b", Rename::NoReplace).unwrap();
    assert_eq!(touched(&mine, &notes).unwrap(), ["a", "b"]);
    let (_, at) = notes.since_listed(mine.changed().unwrap()).unwrap();
    mine.remove_dir("b").unwrap();
    notes.looked_at(at);
    assert_eq!(touched(&mine, &notes).unwrap(), ["b"], "it was changed again after it was looked at");
}

#[test]
fn what_another_process_changes_is_news_until_the_directory_is_listed() {
    let (mine, notes, other) = scene();
    list(&mine, &notes);
    other.create_dir("a").unwrap();
    assert_eq!(touched(&mine, &notes), None);
    mine.create_dir("b").unwrap();
    assert_eq!(touched(&mine, &notes), None, "a change of its own does not hide it");
    list(&mine, &notes);
    assert_eq!(touched(&mine, &notes).unwrap(), [""; 0]);
}

#[test]
fn a_change_during_a_listing_makes_it_count_for_nothing() {
    let (mine, notes, _) = scene();
    let at = notes.now();
    let shows = mine.changed().unwrap();
    mine.create_dir("a").unwrap();
    notes.listed(at, shows);
    assert_eq!(touched(&mine, &notes), None);
}

#[test]
fn a_change_that_fails_is_none() {
    let (mine, notes, _) = scene();
    mine.create_dir("a").unwrap();
    list(&mine, &notes);
    assert!(mine.create_dir("a").is_err());
    assert_eq!(touched(&mine, &notes).unwrap(), ["a"]);
}
