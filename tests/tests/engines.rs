//! One save through every engine gives one directory, byte for byte: what is on the disk depends on the state, the options and the ids, and on nothing else.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use stepwell_core::io::simulated::{SimDisk, mix};
use stepwell_core::io::{Dir, Disk, Engine, EntryKind, open_disk};
use stepwell_manager::coordination::SingleProcess;
use stepwell_manager::{Clock, Environment, Exists, Manager, Options, Outcome, Retention, Rng, SaveRequest};
use stepwell_tests::real::look;
use stepwell_tests::real::states;

/// Wall-clock time stands still; deadlines are real.
struct Stopped(Instant);

impl Clock for Stopped {
    fn unix_ns(&self) -> i64 {
        1_700_000_000_000_000_000
    }

    fn monotonic(&self) -> Duration {
        self.0.elapsed()
    }
}

/// The same ids on every run.
#[derive(Default)]
struct Counted(AtomicU64);

impl Rng for Counted {
    fn next_u128(&self) -> u128 {
        let drawn = self.0.fetch_add(1, Ordering::SeqCst);
        (u128::from(mix(drawn, 1)) << 64) | u128::from(mix(drawn, 2))
    }
}

fn environment(disk: Arc<dyn Disk>) -> Environment {
    Environment {
        disk,
        clock: Arc::new(Stopped(Instant::now())),
        rng: Arc::new(Counted::default()),
        coordinator: Arc::new(SingleProcess),
        staging: None,
    }
}

/// Three steps with metrics, one of them replaced, under retention; then everything that stands in the root, but for the writer's own epoch (it names the process).
fn saved(root: &Path, disk: &Arc<dyn Disk>, options: &Options) -> BTreeMap<String, Vec<u8>> {
    let manager = Manager::open(root, options.clone(), environment(Arc::clone(disk))).unwrap();
    for (step, exists) in [(1, Exists::Error), (2, Exists::Error), (2, Exists::Replace), (3, Exists::Error)] {
        let metrics =
            BTreeMap::from([("loss".to_owned(), f64::from(step as u32)), ("worst".to_owned(), f64::NAN)]);
        let custom_metadata = serde_json::json!({"tokens": step});
        let request =
            SaveRequest { metrics, custom_metadata, exists, ..SaveRequest::new(step, states::state(step)) };
        let outcome = manager.save(request).unwrap().wait(Some(Duration::from_secs(60))).unwrap();
        assert!(matches!(outcome, Some(Outcome::Committed)), "{outcome:?}");
    }
    assert_eq!(manager.all_steps().unwrap(), [2, 3]);
    manager.close(None).unwrap();
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
    let small = Options { retention: Retention::KeepLatest { n: 2 }, ..look::options() };
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
            // Past the harness, which swallows what passing tests print.
            let _ = std::io::Write::write_fmt(
                &mut std::io::stderr(),
                format_args!("SKIPPED: this machine has not every engine\n"),
            );
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
