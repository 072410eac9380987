//! Invalid steps are never chosen and never deleted: foreign files, half-copied steps, other
//! spellings of a number, symlinks.
#![expect(clippy::unwrap_used, reason = "a test")]

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use stepwell_manager::{
    Checkpoint, Exists, Manager, Options, Outcome, Retention, SaveRequest, StepName, singular,
};
use stepwell_tests::real::look::{self, Reader};
use stepwell_tests::real::states;

fn commit(manager: &Manager, step: u64) {
    let save = manager.save(SaveRequest::new(step, states::state(step))).unwrap();
    let outcome = save.wait(Some(Duration::from_secs(60))).unwrap();
    assert!(matches!(outcome, Some(Outcome::Committed)), "{outcome:?}");
}

fn open(root: &Path, options: Options) -> Manager {
    Manager::open(root, options, look::environment(root).unwrap()).unwrap()
}

fn keep_latest(n: u64) -> Options {
    Options { retention: Retention::KeepLatest { n }, ..look::options() }
}

/// Everything below a directory: names, and what the files hold and the symlinks say.
fn everything(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut out = BTreeMap::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let kind = std::fs::symlink_metadata(&path).unwrap().file_type();
        if kind.is_symlink() {
            out.insert(
                path.clone(),
                std::fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes(),
            );
        } else if kind.is_dir() {
            out.insert(path.clone(), b"directory".to_vec());
            out.extend(everything(&path));
        } else {
            out.insert(path.clone(), std::fs::read(&path).unwrap());
        }
    }
    out
}

/// A root with two steps, in which nothing else stands.
fn saved(dir: &Path) -> PathBuf {
    let root = dir.join("run");
    look::save(&root, &[1, 2], look::options(), &look::environment(dir).unwrap()).unwrap();
    root
}

/// A root with much in it that is none of ours. Gives the paths of it all.
fn littered(dir: &Path) -> (PathBuf, Vec<PathBuf>) {
    let root = saved(dir);
    let outside = dir.join("outside");
    std::fs::create_dir(&outside).unwrap();
    look::copy_tree(&root.join("step_00000002"), &outside.join("step_00000009")).unwrap();
    for directory in [
        "step_00000020",    // empty
        "step_00000021/i0", // half deleted
        "step_5",           // another spelling
        "step_000000005",   // another one
        "5",
        "00000005",
        "step_",
        "step_00000005.partial", // as rsync leaves them
        "notes/deep",
        ".git",
        ".trash", // not one of our names
        ".trash-best-old",
        ".quarantine-old",
        ".tmp-something",
        "checkpoints",
    ] {
        std::fs::create_dir_all(root.join(directory)).unwrap();
    }
    for (file, text) in [
        ("step_00000022", "a file"),
        ("notes/deep/read me.txt", "keep me"),
        ("README", "keep me"),
        ("5/state.pt", "somebody's"),
        ("00000005/state.pt", "somebody's"),
        ("step_5/manifest.json", "{}"),
        (".git/HEAD", "ref: refs/heads/main"),
        (".tmp-something/x", "somebody's"),
        (".trash/x", "somebody's"),
        (".trash-best-old/x", "somebody's"),
        (".quarantine-old/x", "somebody's"),
        ("step_00000021/i0/00000.data", "half a file"),
    ] {
        std::fs::write(root.join(file), text).unwrap();
    }
    // A step under another number, one that lacks a file, one whose manifest was cut, and symlinks
    // to whole ones.
    look::copy_tree(&root.join("step_00000002"), &root.join("step_00000023")).unwrap();
    look::copy_tree(&root.join("step_00000002"), &root.join("step_2")).unwrap();
    symlink("step_00000002", root.join("step_00000025")).unwrap();
    symlink(outside.join("step_00000009"), root.join("step_00000009")).unwrap();
    symlink("nowhere", root.join("step_00000026")).unwrap();
    symlink(&outside, root.join("link")).unwrap();
    let ours = ["step_00000001", "step_00000002", ".stepwell"];
    let mut strangers: Vec<PathBuf> = std::fs::read_dir(&root)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| !ours.contains(&path.file_name().unwrap().to_str().unwrap()))
        .collect();
    strangers.push(outside);
    (root, strangers)
}

fn contents_of(paths: &[PathBuf]) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut out = BTreeMap::new();
    for path in paths {
        let kind = std::fs::symlink_metadata(path).unwrap().file_type();
        let here = if kind.is_symlink() {
            std::fs::read_link(path).unwrap().into_os_string().into_encoded_bytes()
        } else if kind.is_dir() {
            out.extend(everything(path));
            b"directory".to_vec()
        } else {
            std::fs::read(path).unwrap()
        };
        out.insert(path.clone(), here);
    }
    out
}

#[test]
fn strangers_in_a_root_are_never_touched() {
    let dir = tempfile::tempdir().unwrap();
    let (root, strangers) = littered(dir.path());
    let before = contents_of(&strangers);
    let manager = open(&root, keep_latest(1));
    assert_eq!(manager.all_steps().unwrap(), [1, 2]);
    assert_eq!(manager.latest_step().unwrap(), Some(2));
    let quarantined: Vec<String> =
        manager.quarantined().unwrap().into_iter().map(|quarantined| quarantined.name).collect();
    let names = [9, 20, 21, 22, 23, 25, 26].map(|step| format!("step_{step:08}"));
    assert_eq!(quarantined, names, "each that has a step's name, and nothing else");
    for quarantined in manager.quarantined().unwrap() {
        assert!(!quarantined.reason.is_empty());
    }
    // Retention goes over them again and again.
    for step in 3..8 {
        commit(&manager, step);
    }
    assert_eq!(manager.apply_retention().unwrap(), [] as [u64; 0]);
    assert_eq!(manager.all_steps().unwrap(), [7]);
    manager.close(None).unwrap();
    assert!(contents_of(&strangers) == before, "something of other people's was changed");
    // Recovery does, too.
    open(&root, keep_latest(1)).close(None).unwrap();
    assert!(contents_of(&strangers) == before, "recovery changed something of other people's");
    assert_eq!(
        std::fs::read_dir(&root).unwrap().count(),
        strangers.len() - 1 + 2,
        "what is there beside them: the root's own, one step"
    );
}

#[test]
fn a_commit_moves_an_invalid_step_aside_whole() {
    let dir = tempfile::tempdir().unwrap();
    let (root, _) = littered(dir.path());
    let manager = open(&root, look::options());
    for step in [20, 21, 22, 23, 25, 26] {
        let path = root.join(format!("step_{step:08}"));
        let before = contents_of(std::slice::from_ref(&path));
        commit(&manager, step);
        let names: Vec<PathBuf> = std::fs::read_dir(&root)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| {
                path.file_name()
                    .unwrap()
                    .to_str()
                    .unwrap()
                    .starts_with(&format!(".quarantine-step_{step:08}-"))
            })
            .collect();
        assert_eq!(names.len(), 1, "{names:?}");
        let moved: BTreeMap<PathBuf, Vec<u8>> = contents_of(&names)
            .into_iter()
            .map(|(at, bytes)| (path.join(at.strip_prefix(&names[0]).unwrap()), bytes))
            .collect();
        // A path joined with nothing ends in a separator; compared, it does not count.
        assert!(moved == before, "step {step}");
        let checkpoint = manager.checkpoint(Some(step)).unwrap();
        assert!(look::look_into(&checkpoint, step).unwrap().is_none());
    }
    manager.close(None).unwrap();
    // The next writer leaves quarantined directories.
    open(&root, keep_latest(1)).close(None).unwrap();
    let kept = std::fs::read_dir(&root).unwrap();
    let kept = kept.filter(|entry| {
        entry.as_ref().unwrap().file_name().to_str().unwrap().starts_with(".quarantine-step_")
    });
    assert_eq!(kept.count(), 6);
}

#[test]
fn two_spellings_of_a_number_are_one_step_at_most() {
    for (pattern, good, bad) in [
        (StepName::new("", 0).unwrap(), "5", &["05", "00000005", "+5", "5.", "step_00000005"][..]),
        (StepName::new("", 8).unwrap(), "00000005", &["5", "000000005", "step_00000005"][..]),
        (StepName::default(), "step_00000005", &["5", "00000005", "step_5", "step_000000005"][..]),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("run");
        let options = Options {
            step_name: Some(pattern),
            retention: Retention::KeepLatest { n: 1 },
            ..look::options()
        };
        let manager = open_new(&root, options.clone());
        commit(&manager, 5);
        for name in bad {
            look::copy_tree(&root.join(good), &root.join(name)).unwrap();
        }
        let others: Vec<PathBuf> = bad.iter().map(|name| root.join(name)).collect();
        let before = contents_of(&others);
        assert_eq!(manager.all_steps().unwrap(), [5]);
        assert_eq!(manager.quarantined().unwrap(), []);
        commit(&manager, 6);
        manager.close(None).unwrap();
        assert!(contents_of(&others) == before);
        assert_eq!(open_new(&root, options).all_steps().unwrap(), [6]);
    }
}

fn open_new(root: &Path, options: Options) -> Manager {
    Manager::open(root, options, look::environment(root.parent().unwrap()).unwrap()).unwrap()
}

#[test]
fn symlinks_inside_a_step_are_not_followed() {
    let dir = tempfile::tempdir().unwrap();
    let root = saved(dir.path());
    let reader = Reader::open(&root).unwrap();
    let step = reader.step_path(2);
    let outside = dir.path().join("outside");
    look::copy_tree(&step, &outside).unwrap();
    for name in ["manifest.json", "i0/index", "i0/00000.data", "i0", "i1"] {
        let path = step.join(name);
        let aside = dir.path().join("aside");
        std::fs::rename(&path, &aside).unwrap();
        symlink(outside.join(name), &path).unwrap();
        assert!(
            reader.look(2).unwrap().is_some(),
            "{name} is a symlink to the very same bytes, and was followed"
        );
        assert!(reader.look_inside(2).unwrap().is_some(), "{name} was followed");
        // A writer that opens the root, saves and applies retention deletes nothing behind it.
        let before = everything(&outside);
        let manager = open(&root, keep_latest(1));
        manager.close(None).unwrap();
        assert!(everything(&outside) == before);
        std::fs::remove_file(&path).unwrap();
        std::fs::rename(&aside, &path).unwrap();
        assert!(reader.look(2).unwrap().is_none());
    }
}

#[test]
fn deleting_a_step_leaves_the_targets_of_its_symlinks() {
    let dir = tempfile::tempdir().unwrap();
    let root = saved(dir.path());
    let outside = dir.path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    std::fs::write(outside.join("file"), "keep me").unwrap();
    symlink(&outside, root.join("step_00000001/link")).unwrap();
    symlink(outside.join("file"), root.join("step_00000001/i0/link")).unwrap();
    let manager = open(&root, keep_latest(1));
    commit(&manager, 3);
    assert_eq!(manager.all_steps().unwrap(), [3]);
    assert!(manager.wait_for_deletions(Duration::from_secs(60)).unwrap());
    manager.close(None).unwrap();
    assert!(!root.join("step_00000001").exists());
    assert_eq!(everything(&outside).into_values().collect::<Vec<_>>(), [b"keep me".to_vec()]);
}

#[test]
fn a_save_to_a_path_deletes_nothing_of_other_people_beside_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("best");
    let others = [".trash-best", ".trash-best-old", ".tmp-best-old-1", ".quarantine-best-old"];
    let others: Vec<PathBuf> = others.iter().map(|name| dir.path().join(name)).collect();
    for other in &others {
        std::fs::create_dir(other).unwrap();
        std::fs::write(other.join("x"), "somebody's").unwrap();
    }
    let before = contents_of(&others);
    for step in 1..3 {
        let request = SaveRequest { exists: Exists::Replace, ..SaveRequest::new(0, states::state(step)) };
        let save = singular::save(&path, request, &look::options(), &look::environment(dir.path()).unwrap())
            .unwrap();
        assert!(matches!(save.wait(Some(Duration::from_secs(60))), Ok(Some(Outcome::Committed))));
        assert!(contents_of(&others) == before, "something of other people's was changed");
    }
    singular::sweep(&path, &look::environment(dir.path()).unwrap()).unwrap();
    assert!(contents_of(&others) == before, "a sweep changed something of other people's");
}

#[test]
fn a_root_that_is_a_symlink_is_the_directory_that_it_names() {
    let dir = tempfile::tempdir().unwrap();
    let root = saved(dir.path());
    let link = dir.path().join("latest run");
    symlink(&root, &link).unwrap();
    let manager = open(&link, look::options());
    commit(&manager, 3);
    manager.close(None).unwrap();
    let reader = Reader::open(&root).unwrap();
    assert!(reader.look(3).unwrap().is_none());
    Checkpoint::open(&link.join("step_00000003"), &reader.environment).unwrap();
}

#[test]
fn replacing_a_step_never_deletes_what_only_has_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let root = saved(dir.path());
    // A copy under another number is not a step: it may be the only copy of something.
    look::copy_tree(&root.join("step_00000001"), &root.join("step_00000005")).unwrap();
    let before = everything(&root.join("step_00000005"));
    let manager = open(&root, keep_latest(1));
    let replace = SaveRequest { exists: Exists::Replace, ..SaveRequest::new(5, states::state(5)) };
    let outcome = manager.save(replace).unwrap().wait(Some(Duration::from_secs(60))).unwrap();
    assert!(matches!(outcome, Some(Outcome::Committed)), "{outcome:?}");
    assert!(manager.wait_for_deletions(Duration::from_secs(60)).unwrap());
    manager.close(None).unwrap();
    let kept = std::fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().path());
    let kept: Vec<PathBuf> =
        kept.filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with(".quarantine-")).collect();
    assert_eq!(kept.len(), 1, "{kept:?}");
    assert_eq!(everything(&kept[0]).len(), before.len());
    assert!(everything(&kept[0]).into_values().eq(before.into_values()));
}
