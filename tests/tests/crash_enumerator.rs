//! The crash-state enumerator finds every bug of a small commit protocol, and none where there is
//! none.
#![expect(clippy::unwrap_used, reason = "a test")]

use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use stepwell_core::io::simulated::{Action, Fault, Log, OperationKind, SimDisk};
use stepwell_core::io::{Dir, Disk, EntryKind, Rename, Transfer};
use stepwell_core::sys::Buffer;
use stepwell_core::{Error, Result};
use stepwell_tests::crash::mutants::{Explained, Mutation, judge};
use stepwell_tests::crash::{Explorer, Failure, Marks, Options, Profile, explore, explore_nested, sweep};

/// How a save is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    None,
    NoDataSync,
    SyncBeforeCompletion,
    DataSyncTriedAgain,
    NoManifestSync,
    NoStepDirSync,
    NoRootSync,
    AcknowledgeBeforeRootSync,
    RetireBeforeRootSync,
    NoTrashSync,
    DeleteInPlace,
    ManifestFirst,
    ReplaceInPlace,
}

const FILES: [&str; 2] = ["a", "b"];

fn bytes_of(step: u64, file: &str) -> Vec<u8> {
    (0..24).map(|i| (step as u8) * 40 + file.as_bytes()[0] + i).collect()
}

fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(7, |sum, &byte| sum * 31 % 1_000_003 + u64::from(byte))
}

/// Saves `step` and retires the one before it.
fn save(disk: &SimDisk, root: &dyn Dir, step: u64, bug: Bug) -> Result<()> {
    let temporary = format!(".tmp-{step}");
    let name = format!("step_{step}");
    let dir = if bug == Bug::ReplaceInPlace { root.create_dir(&name)? } else { root.create_dir(&temporary)? };
    let mut manifest = String::new();
    for file in FILES {
        let bytes = bytes_of(step, file);
        writeln!(manifest, "{file} {} {}", bytes.len(), sum(&bytes)).unwrap();
    }
    writeln!(manifest, "end {}", sum(manifest.as_bytes())).unwrap();
    let write_manifest = |sync: bool| -> Result<()> {
        if sync {
            dir.write_file("manifest", manifest.as_bytes())
        } else {
            write(disk, &*dir, "manifest", manifest.as_bytes(), Sync::Never)
        }
    };
    if bug == Bug::ManifestFirst {
        write_manifest(true)?;
        dir.sync()?;
        root.rename(&temporary, &name, Rename::NoReplace)?;
    }
    for file in FILES {
        let sync = match bug {
            Bug::NoDataSync => Sync::Never,
            Bug::SyncBeforeCompletion => Sync::Early,
            Bug::DataSyncTriedAgain => Sync::TriedAgain,
            _ => Sync::Once,
        };
        write(disk, &*dir, file, &bytes_of(step, file), sync)?;
    }
    if bug != Bug::ManifestFirst {
        write_manifest(bug != Bug::NoManifestSync)?;
    }
    if bug != Bug::NoStepDirSync {
        dir.sync()?;
    }
    if !matches!(bug, Bug::ManifestFirst | Bug::ReplaceInPlace) {
        root.rename(&temporary, &name, Rename::NoReplace)?;
    }
    match bug {
        Bug::AcknowledgeBeforeRootSync => {
            disk.mark(&format!("committed {step}"));
            root.sync()?;
        }
        Bug::RetireBeforeRootSync => {
            retire(root, step - 1, bug)?;
            root.sync()?;
            disk.mark(&format!("committed {step}"));
            return Ok(());
        }
        _ => {
            if bug != Bug::NoRootSync {
                root.sync()?;
            }
            disk.mark(&format!("committed {step}"));
        }
    }
    retire(root, step - 1, bug)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Sync {
    Once,
    Never,
    Early,
    TriedAgain,
}

fn write(disk: &SimDisk, dir: &dyn Dir, name: &str, bytes: &[u8], sync: Sync) -> Result<()> {
    let file = dir.create_file(name, 0)?;
    let mut queue = disk.queue(4)?;
    for (part, bytes) in bytes.chunks(12).enumerate() {
        let mut buffer = Buffer::alone(bytes.len())?;
        buffer[..bytes.len()].copy_from_slice(bytes);
        let offset = part as u64 * 12;
        queue.submit(Transfer::Write, &file, offset, bytes.len(), buffer, 0);
    }
    if sync == Sync::Early {
        file.sync()?;
    }
    while let Some(done) = queue.complete(Duration::ZERO) {
        done.result?;
    }
    match sync {
        Sync::Once => file.sync(),
        Sync::TriedAgain => file.sync().or_else(|_| file.sync()),
        Sync::Never | Sync::Early => Ok(()),
    }
}

fn retire(root: &dyn Dir, step: u64, bug: Bug) -> Result<()> {
    let name = format!("step_{step}");
    if root.stat(&name)?.is_none() {
        return Ok(());
    }
    if bug == Bug::DeleteInPlace {
        return delete(root, &name);
    }
    let trash = format!(".trash-{step}");
    root.rename(&name, &trash, Rename::NoReplace)?;
    if bug != Bug::NoTrashSync {
        root.sync()?;
    }
    delete(root, &trash)
}

fn delete(root: &dyn Dir, name: &str) -> Result<()> {
    let dir = root.open_dir(name)?;
    // The manifest last: the worst order for a deletion that is not behind a rename.
    for entry in dir.entries()? {
        dir.remove_file(&entry.name)?;
    }
    root.remove_dir(name)
}

/// The recovery when a writer opens the root.
fn recover(root: &dyn Dir) -> Result<()> {
    root.sync()?;
    for entry in root.entries()? {
        if entry.name.starts_with(".tmp-") {
            let trash = format!(".trash-of{}", entry.name);
            root.rename(&entry.name, &trash, Rename::NoReplace)?;
            root.sync()?;
            delete(root, &trash)?;
        } else if entry.name.starts_with(".trash-") {
            delete(root, &entry.name)?;
        }
    }
    root.sync()
}

/// A visible step is whole.
fn verify(dir: &dyn Dir, step: u64) -> std::result::Result<(), String> {
    let text = dir.read_file("manifest", 4096).map_err(|error| format!("step {step} is torn: {error}"))?;
    let text = String::from_utf8(text).map_err(|_| format!("step {step} is torn: manifest"))?;
    let end = text.find("end ").ok_or_else(|| format!("step {step} is torn: manifest without end"))?;
    if text[end..] != format!("end {}\n", sum(&text.as_bytes()[..end])) {
        return Err(format!("step {step} is torn: sum of the manifest"));
    }
    for file in FILES {
        let found = dir.read_file(file, 4096).map_err(|error| format!("step {step} is torn: {error}"))?;
        if found != bytes_of(step, file) {
            return Err(format!("step {step} is torn: bytes of {file}"));
        }
    }
    Ok(())
}

fn check(disk: &SimDisk, marks: &Marks) -> std::result::Result<(), String> {
    let words = |error: Error| format!("recovery: {error}");
    let root = disk.open_dir(Path::new("run")).map_err(words)?;
    recover(&*root).map_err(words)?;
    let mut steps = Vec::new();
    for entry in root.entries().map_err(words)? {
        assert_eq!(entry.kind, EntryKind::Dir);
        let step =
            entry.name.strip_prefix("step_").ok_or_else(|| format!("{} was left behind", entry.name))?;
        let step = step.parse().unwrap();
        verify(&*root.open_dir(&entry.name).map_err(words)?, step)?;
        steps.push(step);
    }
    if let Some(newest) = marks.numbers("committed ").max()
        && !steps.contains(&newest)
    {
        return Err(format!("committed step {newest} is lost; there are {steps:?}"));
    }
    let before = disk.image();
    recover(&*root).map_err(words)?;
    if before == disk.image() { Ok(()) } else { Err("recovering twice is not recovering once".into()) }
}

/// The effects of saving steps 1 to 3, broken from step 2 on.
fn record(bug: Bug, order: u64) -> Log {
    let disk = SimDisk::new().with_order(order);
    let root: Arc<dyn Dir> = disk.create_dir_all(Path::new("run")).unwrap();
    disk.settle();
    save(&disk, &*root, 1, Bug::None).unwrap();
    if bug == Bug::DataSyncTriedAgain {
        disk.inject(Fault::on(OperationKind::Sync, Action::Fail(libc_eio())));
    }
    save(&disk, &*root, 2, bug).unwrap();
    save(&disk, &*root, 3, bug).unwrap();
    disk.log()
}

fn libc_eio() -> i32 {
    5
}

fn run(bug: Bug, profile: Profile) -> std::result::Result<(), Box<Failure>> {
    explore_nested(&record(bug, 3), &Options::default().profile(profile), check).map(|(outer, inner)| {
        println!("{bug:?}, {profile:?}: {outer}; inside recoveries: {inner}");
        assert_eq!(outer.sampled_cuts + inner.sampled_cuts, 0, "small enough to be exhaustive");
    })
}

#[test]
fn the_sound_protocol_passes_in_every_state() {
    for profile in [Profile::PosixMinimal, Profile::OrderedMetadata] {
        if let Err(failure) = run(Bug::None, profile) {
            panic!("{profile:?}: {failure}");
        }
    }
}

#[test]
fn every_broken_protocol_is_caught() {
    for (bug, says) in [
        (Bug::NoDataSync, "torn"),
        (Bug::SyncBeforeCompletion, "torn"),
        (Bug::DataSyncTriedAgain, "torn"),
        (Bug::NoManifestSync, "torn"),
        (Bug::NoStepDirSync, "torn"),
        (Bug::NoRootSync, "lost"),
        (Bug::AcknowledgeBeforeRootSync, "lost"),
        (Bug::RetireBeforeRootSync, "lost"),
        (Bug::NoTrashSync, "torn"),
        (Bug::DeleteInPlace, "torn"),
        (Bug::ManifestFirst, "torn"),
        (Bug::ReplaceInPlace, "torn"),
    ] {
        let Err(failure) = run(bug, Profile::PosixMinimal) else { panic!("{bug:?} was not noticed") };
        println!("{bug:?}: {}", failure.message.lines().next().unwrap_or_default());
        assert!(failure.message.contains(says), "{bug:?} was noticed for another reason: {failure}");
    }
}

#[test]
fn mechanical_mutants_are_caught_or_explained() {
    let log = record(Bug::None, 0);
    let table = EXPLAINED;
    let report = judge(&log, &Options::default(), table, check).unwrap_or_else(|failure| panic!("{failure}"));
    println!("{report}");
    assert_eq!(report.survivors(), Vec::<&str>::new());
    assert_eq!(report.unused, Vec::<&str>::new());
    for step in 1..=3 {
        for dropped in [
            format!("drop fsync run/.tmp-{step}/a"),
            format!("drop fsync run/.tmp-{step}/b"),
            format!("drop fsync run/.tmp-{step}/manifest"),
            format!("drop fsync run/.tmp-{step}/"),
            format!("drop rename run/.tmp-{step} -> step_{step}"),
            format!("swap [rename run/.tmp-{step} -> step_{step} | fsync run/]"),
            format!("swap [fsync run/ | mark \"committed {step}\"]"),
        ] {
            assert!(report.caught().contains(&dropped.as_str()), "{dropped}");
        }
    }
}

/// Survivors of the small protocol and why they do no harm.
const EXPLAINED: &[Explained] = &[
    Explained {
        pattern: "swap [fsync run/.tmp-*/a | create run/.tmp-*/b]",
        reason: "the files of a temporary are made durable in any order, all before the rename",
    },
    Explained {
        pattern: "swap [fsync run/.tmp-*/b | create run/.tmp-*/manifest]",
        reason: "as above; the manifest speaks only once it stands under the step's name",
    },
    Explained {
        pattern: "swap [mark \"committed 1\" | mkdir run/.tmp-2]",
        reason: "a temporary is no step, whether the one before was acknowledged or not",
    },
];

fn prepared() -> SimDisk {
    let disk = SimDisk::new();
    disk.create_dir_all(Path::new("run")).unwrap();
    disk.settle();
    disk
}

fn two_saves(disk: &SimDisk) -> Result<()> {
    let root = disk.open_dir(Path::new("run"))?;
    save(disk, &*root, 1, Bug::None)?;
    save(disk, &*root, 2, Bug::None)
}

/// A new process opens the root after a kill, and announces the newest step that it sees.
fn reopen(disk: &SimDisk, syncs: bool) -> Result<()> {
    let root = disk.open_dir(Path::new("run"))?;
    if syncs {
        recover(&*root)?;
    }
    let steps =
        root.entries()?.into_iter().filter_map(|entry| entry.name.strip_prefix("step_")?.parse::<u64>().ok());
    if let Some(newest) = steps.max() {
        disk.mark(&format!("committed {newest}"));
    }
    Ok(())
}

#[test]
fn after_a_kill_only_synced_data_is_trusted() {
    let explore_after = |syncs: bool| {
        sweep::kills(
            prepared,
            |disk| drop(two_saves(disk)),
            |disk| {
                reopen(disk, syncs).map_err(|error| error.to_string())?;
                explore(&disk.log(), &Options::default(), check)
                    .map(drop)
                    .map_err(|failure| failure.to_string())
            },
        )
    };
    let runs = explore_after(true).unwrap();
    assert!(runs > 40, "{runs}");
    let failure = explore_after(false).unwrap_err();
    assert!(failure.contains("is lost"), "{failure}");
}

#[test]
fn a_failed_operation_loses_and_tears_nothing() {
    for action in [Action::Fail(libc_eio()), Action::FailHalfway(28), Action::FailAfterwards(libc_eio())] {
        for from_then_on in [false, true] {
            let runs = sweep::failures(
                action,
                from_then_on,
                prepared,
                |disk| drop(two_saves(disk)),
                |disk| {
                    explore(&disk.log(), &Options::default(), check)
                        .map(drop)
                        .map_err(|failure| failure.to_string())
                },
            );
            assert!(runs.unwrap_or_else(|failure| panic!("{failure}")) > 40);
        }
    }
}

#[test]
fn a_mutant_without_a_state_of_its_own_is_called_equivalent() {
    let disk = SimDisk::new();
    let root = disk.create_dir_all(Path::new("run")).unwrap();
    disk.settle();
    root.write_file("a", b"1").unwrap();
    root.sync().unwrap();
    root.sync().unwrap();
    let log = disk.log();
    let report = judge(&log, &Options::default(), &[], |_, _| Ok(())).unwrap();
    let second = Mutation::Drop(log.records.len() - 1);
    assert!(report.equivalent().contains(&second.label(&log).as_str()), "{report}");
}

#[test]
fn a_cut_with_too_many_states_is_sampled_and_said_so() {
    let disk = SimDisk::new();
    let root = disk.create_dir_all(Path::new("run")).unwrap();
    disk.settle();
    for file in 0..20u8 {
        write(&disk, &*root, &format!("f{file:02}"), &[file + 1; 24], Sync::Never).unwrap();
    }
    let options = Options { cap: 500, ..Options::default() };
    let mut both = 0;
    let explored = explore(&disk.log(), &options, |disk, _| {
        let there = |name: &str| disk.bytes(&format!("run/{name}")).is_some_and(|bytes| bytes.len() == 24);
        both += u64::from(there("f03") && !there("f17"));
        Ok(())
    });
    let explored = explored.unwrap();
    assert_eq!((explored.cuts, explored.sampled_cuts, explored.states), (1, 1, 500));
    assert!(both > 20, "{both}");
}

#[test]
fn what_a_failed_sync_left_behind_is_not_saved_by_the_next_one() {
    let disk = SimDisk::new();
    let root = disk.create_dir_all(Path::new("run")).unwrap();
    disk.settle();
    let file = root.create_file("a", 0).unwrap();
    root.sync().unwrap();
    file.set_len(3).unwrap();
    disk.inject(Fault::on(OperationKind::Sync, Action::Fail(libc_eio())));
    file.sync().unwrap_err();
    file.sync().unwrap();
    disk.mark("synced");
    let lost = explore(&disk.log(), &Options::default(), |disk, marks| {
        let kept = disk.bytes("run/a").is_some_and(|bytes| bytes.len() == 3);
        if marks.contains("synced") && !kept { Err("lost".into()) } else { Ok(()) }
    });
    assert_eq!(lost.unwrap_err().message, "lost");
}

/// The states that a crash may leave after `script`, in a root that holds the file `old`, written
/// as `name=bytes name/=` lines.
fn left_after(script: impl Fn(&SimDisk, &dyn Dir)) -> Vec<String> {
    let disk = SimDisk::new();
    let root = disk.open_dir(Path::new("/")).unwrap();
    root.write_file("old", b"o").unwrap();
    disk.settle();
    script(&disk, &*root);
    let mut left = std::collections::BTreeSet::new();
    explore(&disk.log(), &Options::default(), |disk, _| {
        let root = disk.open_dir(Path::new("/")).unwrap();
        let mut line = Vec::new();
        for entry in root.entries().unwrap() {
            line.push(match entry.kind {
                EntryKind::Dir => format!("{}/", entry.name),
                _ => format!("{}={}", entry.name, root.read_file(&entry.name, 99).unwrap().escape_ascii()),
            });
        }
        left.insert(line.join(" "));
        Ok(())
    })
    .unwrap();
    left.into_iter().collect()
}

#[test]
fn a_crash_leaves_any_part_of_a_write() {
    let left = left_after(|disk, root| {
        let file = root.create_file("f", 0).unwrap();
        root.sync().unwrap();
        disk.settle();
        let mut queue = disk.queue(1).unwrap();
        let mut buffer = Buffer::alone(4).unwrap();
        buffer[..4].copy_from_slice(b"abcd");
        queue.submit(Transfer::Write, &file, 0, 4, buffer, 0);
    });
    let zero = r"\x00";
    let expected = [
        "f= old=o".into(),
        format!("f={zero}{zero}cd old=o"),
        format!("f={} old=o", zero.repeat(4)),
        "f=ab old=o".into(),
        "f=abcd old=o".into(),
    ];
    let mut expected = expected.to_vec();
    expected.sort();
    assert_eq!(left, expected);
}

#[test]
fn a_crash_keeps_or_loses_each_change_of_a_directory() {
    let left = left_after(|_, root| {
        root.rename("old", "new", Rename::NoReplace).unwrap();
        root.create_dir("d").unwrap();
    });
    assert_eq!(left, ["d/ new=o", "d/ old=o", "new=o", "old=o"]);
    let left = left_after(|_, root| {
        root.rename("old", "new", Rename::NoReplace).unwrap();
        root.rename("new", "newer", Rename::NoReplace).unwrap();
    });
    assert_eq!(left, ["new=o", "newer=o", "old=o"], "one name, whichever renames were lost");
    let left = left_after(|_, root| {
        root.rename("old", "new", Rename::NoReplace).unwrap();
        root.sync().unwrap();
        root.remove_file("new").unwrap();
    });
    assert_eq!(left, ["", "new=o", "old=o"]);
}

#[test]
fn ordered_metadata_keeps_a_prefix() {
    let disk = SimDisk::new();
    let root = disk.open_dir(Path::new("/")).unwrap();
    disk.settle();
    for name in ["a", "b", "c"] {
        root.create_dir(name).unwrap().create_dir("x").unwrap();
    }
    let options = Options::default().profile(Profile::OrderedMetadata);
    let explored = explore(&disk.log(), &options, |_, _| Ok(())).unwrap();
    assert_eq!(explored.distinct, 7, "six changes, seven prefixes");
}

/// Prints how fast states are made: `cargo test --release -p stepwell-tests --test crash_enumerator
/// speed -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn speed_of_enumeration() {
    let log = record(Bug::NoDataSync, 0);
    let mut explorer = Explorer::new(Options { cap: 1_000_000, ..Options::default() });
    let begin = std::time::Instant::now();
    explorer.explore(&log, &Marks::default(), |_, _| Ok(())).unwrap();
    let with_disks = begin.elapsed();
    let rate = u128::from(explorer.explored.distinct) * 1_000_000 / with_disks.as_micros();
    println!("{}: {rate} distinct states/s, each on its own disk", explorer.explored);
}
