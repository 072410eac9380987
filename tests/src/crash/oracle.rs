//! The enumerator against brute force: random logs, every cut, every combination of choices built
//! from scratch.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;
use stepwell_core::io::simulated::{Log, Op, ROOT, SimDisk, mix};
use stepwell_core::io::{Dir, Disk, Rename, Transfer};
use stepwell_core::sys::Buffer;

use super::sample::{Builder, Choices, pending};
use super::{Explorer, Marks, Model, Options, Profile, Unread, preface};

/// One call of a random program. Names are drawn from a few, so that they collide.
#[derive(Clone, Debug)]
enum Call {
    Mkdir(u8),
    Write(u8, u8),
    Queue(u8, u8),
    Rename(u8, u8, bool),
    Exchange(u8, u8),
    Unlink(u8),
    SetLen(u8),
    Fsync,
    FsyncDir(u8),
    Mark,
}

fn call() -> impl Strategy<Value = Call> {
    let name = || 0u8..3;
    prop_oneof![
        name().prop_map(Call::Mkdir),
        (name(), 0u8..4).prop_map(|(name, len)| Call::Write(name, len)),
        (name(), 1u8..4).prop_map(|(name, len)| Call::Queue(name, len)),
        (name(), name(), any::<bool>()).prop_map(|(from, to, replace)| Call::Rename(from, to, replace)),
        (name(), name()).prop_map(|(from, to)| Call::Exchange(from, to)),
        name().prop_map(Call::Unlink),
        (0u8..6).prop_map(Call::SetLen),
        Just(Call::Fsync),
        name().prop_map(Call::FsyncDir),
        Just(Call::Mark),
    ]
}

/// Runs a program; calls that the file system refuses change nothing.
fn run(program: &[Call]) -> Log {
    let disk = SimDisk::new().with_order(5);
    let root = disk.open_dir(Path::new("/")).unwrap();
    let base = root.create_dir("d0").unwrap();
    base.write_file("f0", b"old").unwrap();
    disk.settle();
    let mut files = Vec::new();
    for (step, call) in program.iter().enumerate() {
        let file = |name: u8| format!("f{}", name % 2);
        let dirs: Vec<Arc<dyn Dir>> =
            [Ok(Arc::clone(&root)), root.open_dir("d0"), root.open_dir("d1")].into_iter().flatten().collect();
        let dir = |name: u8| Arc::clone(&dirs[name as usize % dirs.len()]);
        match *call {
            Call::Mkdir(name) => drop(root.create_dir(&format!("d{name}"))),
            Call::Write(name, len) => {
                let _ = dir(name).write_file(&file(len), &vec![step as u8 + 1; len as usize]);
            }
            Call::Queue(name, len) => {
                if let Ok(made) = dir(name).create_file(&file(len), 0) {
                    files.push(made);
                }
                if let Some(file) = files.last() {
                    let mut queue = disk.queue(2).unwrap();
                    for part in 0..2u8 {
                        let mut buffer = Buffer::alone(len.into()).unwrap();
                        buffer[..len.into()].fill(step as u8 + 100 * part + 1);
                        queue.submit(Transfer::Write, file, u64::from(part), len.into(), buffer, 0);
                    }
                }
            }
            Call::Rename(from, to, replace) => {
                let how = if replace { Rename::Replace } else { Rename::NoReplace };
                let _ = root.rename(&format!("d{from}"), &format!("d{to}"), how);
                let _ = dir(from).rename(&file(from), &file(to), how);
            }
            Call::Exchange(from, to) => {
                let _ = root.rename(&format!("d{from}"), &format!("d{to}"), Rename::Exchange);
            }
            Call::Unlink(name) => {
                let _ = dir(name).remove_file(&file(name));
                let _ = root.remove_dir(&format!("d{name}"));
            }
            Call::SetLen(len) => drop(files.last().map(|file| file.set_len(len.into()))),
            Call::Fsync => drop(files.last().map(|file| file.sync())),
            Call::FsyncDir(name) => drop(dir(name).sync()),
            Call::Mark => disk.mark("here"),
        }
    }
    disk.log()
}

/// All states of all cuts, one combination after the other; `None` where they are too many for
/// that.
fn by_force(log: &Log, options: &Options) -> Option<BTreeSet<u64>> {
    let mut found = BTreeSet::new();
    let mut model = Model::new(&log.base);
    let mut marks = Marks::default();
    let ordered = options.profile == Profile::OrderedMetadata;
    for cut in 0..=log.records.len() {
        let pending = pending(&model, ordered);
        let count: u64 = pending.iter().map(|&(_, choices)| u64::from(choices)).product();
        if count > 3000 {
            return None;
        }
        let lasts: Vec<Option<u64>> =
            if ordered { model.prefixes().into_iter().map(Some).collect() } else { vec![None] };
        for number in 0..if cut < preface(log) { 0 } else { count } {
            let mut rest = number;
            let mut chosen = std::collections::BTreeMap::new();
            for &(serial, choices) in &pending {
                chosen.insert(serial, (rest % u64::from(choices)) as u8);
                rest /= u64::from(choices);
            }
            for &last in &lasts {
                let choices = Choices { rest: 0, chosen: chosen.clone(), last };
                let node = Builder::new(&model, options.unread).node(ROOT, &choices, false);
                found.insert(mix(node.hash(), marks.hash()));
            }
        }
        if let Some(record) = log.records.get(cut) {
            if let Op::Mark(label) = &record.op {
                marks.push(label);
            }
            model.apply(&record.op);
        }
    }
    Some(found)
}

/// Every profile, with and without a directory that nobody reads in.
fn ways() -> Vec<(Profile, Option<Unread>)> {
    let d1: Unread = |name| name == "d1";
    [Profile::PosixMinimal, Profile::OrderedMetadata]
        .into_iter()
        .flat_map(|profile| [None, Some(d1)].map(|unread| (profile, unread)))
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn exploring_finds_exactly_the_states_of_every_cut(program in prop::collection::vec(call(), 1..9)) {
        let log = run(&program);
        for (profile, unread) in ways() {
            let options = Options { unread, ..Options::default().profile(profile) };
            let Some(forced) = by_force(&log, &options) else { continue };
            let mut found = BTreeSet::new();
            let mut explorer = Explorer::new(options);
            explorer.explore_from(&log, 0, &Marks::default(), |image, marks| {
                found.insert(mix(image.hash(), marks.hash()));
                Ok(())
            }).unwrap();
            prop_assert_eq!(explorer.explored.sampled_cuts, 0);
            prop_assert_eq!(&found, &forced, "{:?}\n{}", profile, log);
        }
    }

    #[test]
    fn samples_are_states_of_the_cut(program in prop::collection::vec(call(), 1..9)) {
        let log = run(&program);
        for (profile, unread) in ways() {
            let options = Options { cap: 3, unread, ..Options::default().profile(profile) };
            let Some(forced) = by_force(&log, &options) else { continue };
            Explorer::new(options).explore_from(&log, 0, &Marks::default(), |image, marks| {
                let known = forced.contains(&mix(image.hash(), marks.hash()));
                if known { Ok(()) } else { Err("a sample that no crash can leave".into()) }
            }).unwrap();
        }
    }
}
