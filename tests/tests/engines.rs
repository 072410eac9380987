//! One save through every engine gives one directory, byte for byte: what is on the disk depends on
//! the state, the options and the ids, and on nothing else.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use stepwell_core::io::simulated::SimDisk;
use stepwell_core::io::{Dir, Disk, Engine, EntryKind, open_disk};
use stepwell_core::sys::testing::absent;
use stepwell_manager::Options;
use stepwell_tests::real::{look, repeatable};

/// The files of the root after three steps with metrics, the last one replaced, except for the
/// writer's epoch (it names the process).
fn saved(root: &Path, disk: &Arc<dyn Disk>, options: &Options) -> BTreeMap<String, Vec<u8>> {
    repeatable::save(root, Arc::clone(disk), options).unwrap();
    let mut out = BTreeMap::new();
    collect(&disk.open_dir(root).unwrap(), "", &mut out);
    out.remove(".stepwell/epoch").unwrap();
    out
}

fn collect(dir: &Arc<dyn Dir>, prefix: &str, out: &mut BTreeMap<String, Vec<u8>>) {
    for entry in dir.entries().unwrap() {
        let name = format!("{prefix}{}", entry.name);
        match entry.kind {
            EntryKind::Dir => collect(&dir.open_dir(&entry.name).unwrap(), &format!("{name}/"), out),
            EntryKind::File => {
                out.insert(name, dir.read_file(&entry.name, 1 << 30).unwrap());
            }
            EntryKind::Other => panic!("{name} is neither file nor directory"),
        }
    }
}

#[test]
fn every_engine_writes_the_same_bytes() {
    let small = repeatable::options();
    let large =
        Options { block_bytes: 256 << 10, chunk_bytes: 8 << 20, min_row_bytes: 4096, ..small.clone() };
    for options in [small, large] {
        let simulated: Arc<dyn Disk> = Arc::new(SimDisk::new());
        let expected = saved(Path::new("/run"), &simulated, &options);
        assert_eq!(
            expected.keys().filter(|name| name.ends_with("00000.data")).count(),
            6,
            "{:?}",
            expected.keys()
        );
        let mut seen = vec!["simulated"];
        for engine in [Engine::Uring, Engine::Threads, Engine::Buffered] {
            // Alone and in company, in any order of completions.
            for (depth, threads) in [(1, 1), (16, 4)] {
                let options =
                    Options { queue_depth: Some(depth), capture_threads: Some(threads), ..options.clone() };
                let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
                let disk = open_disk(dir.path(), engine).unwrap();
                let found = saved(&dir.path().join("run"), &disk, &options);
                assert_eq!(
                    found.keys().collect::<Vec<_>>(),
                    expected.keys().collect::<Vec<_>>(),
                    "{engine:?}"
                );
                for (name, bytes) in &found {
                    let first = bytes.iter().zip(&expected[name]).position(|(a, b)| a != b);
                    assert!(
                        *bytes == expected[name],
                        "{name} through {engine:?}: {} bytes and {}, the first other one is {first:?}",
                        bytes.len(),
                        expected[name].len()
                    );
                }
                seen.push(disk.choice().engine);
            }
        }
        seen.dedup();
        if seen.len() < 4 {
            absent("uring", &format!("this machine has only {seen:?}"));
        }
        println!("{} files, the same through {seen:?}", expected.len());
    }
}

#[test]
fn what_one_engine_wrote_every_other_reads() {
    let engines = [Engine::Uring, Engine::Threads, Engine::Buffered];
    for writer in engines {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let root = dir.path().join("run");
        look::save(&root, &[1], look::options(), &look::environment_with(dir.path(), writer).unwrap())
            .unwrap();
        for reader in engines {
            let reader = look::Reader::open_with(&root, reader).unwrap();
            let found = reader.look(1).unwrap();
            assert!(found.is_none(), "{writer:?}: {found:?}");
        }
    }
}
