//! Every change of a committed step's bytes is found before a value is returned, and reported with
//! file, block and leaf.
//!
//! The subject is a small state of every kind of leaf, saved by the real manager into a real
//! directory. Damage is made in place and repaired, so hundreds of thousands of cases take seconds.
//! `STEPWELL_LONG=1` tries every bit of the data too.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use stepwell_core::format::index::Index;
use stepwell_core::io::simulated::mix;
use stepwell_core::io::{Dir, Engine};
use stepwell_core::load::FileSet;
use stepwell_manager::Checkpoint;
use stepwell_tests::real::layout::DataFile;
use stepwell_tests::real::look::{self, By, Found, Reader};
use stepwell_tests::real::states;

/// The damaged step, and one beside it that must never suffer.
const STEP: u64 = 2;
const OTHER: u64 = 1;

const WORKERS: u64 = 2;

fn long() -> bool {
    std::env::var_os("STEPWELL_LONG").is_some()
}

/// A new root with two steps.
fn saved(dir: &Path) -> PathBuf {
    let root = dir.join("run");
    look::save(&root, &[OTHER, STEP], look::options(), &look::environment(dir).unwrap()).unwrap();
    root
}

/// Runs `work` on several copies of one root at a time; the second argument says which part of the
/// work is whose.
fn on_copies(work: impl Fn(&Reader, u64) + Sync) {
    let dir = tempfile::tempdir().unwrap();
    let original = saved(dir.path());
    std::thread::scope(|scope| {
        for worker in 0..WORKERS {
            let root = dir.path().join(format!("copy{worker}"));
            look::copy_tree(&original, &root).unwrap();
            let work = &work;
            scope.spawn(move || {
                let reader = Reader::open(&root).unwrap();
                assert!(reader.look(STEP).unwrap().is_none(), "the step is not whole to begin with");
                work(&reader, worker);
                for step in [OTHER, STEP] {
                    let found = reader.look(step).unwrap();
                    assert!(found.is_none(), "step {step}, mended, is not whole: {found:?}");
                }
            });
        }
    });
}

/// A file that is damaged in place and mended.
struct Victim {
    path: PathBuf,
    file: File,
    bytes: Vec<u8>,
}

impl Victim {
    fn open(path: PathBuf) -> Self {
        let bytes = std::fs::read(&path).unwrap();
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        Self { path, file, bytes }
    }

    /// Flips one bit while `check` runs.
    fn flipped<T>(&self, byte: u64, bit: u32, check: impl FnOnce() -> T) -> T {
        let good = self.bytes[byte as usize];
        self.file.write_all_at(&[good ^ (1 << bit)], byte).unwrap();
        let answer = check();
        self.file.write_all_at(&[good], byte).unwrap();
        answer
    }

    /// Cuts (or extends with zeros) to `length` while `check` runs.
    fn cut<T>(&self, length: u64, check: impl FnOnce() -> T) -> T {
        self.file.set_len(length).unwrap();
        let answer = check();
        self.file.set_len(self.bytes.len() as u64).unwrap();
        if let Some(rest) = self.bytes.get(length as usize..) {
            self.file.write_all_at(rest, length).unwrap();
        }
        answer
    }
}

/// Returns the finding; fails if the damage went unnoticed.
fn found(answer: Result<Option<Found>, String>, damage: impl Fn() -> String) -> Found {
    match answer {
        Ok(Some(found)) => found,
        Ok(None) => panic!("{}: nobody has found it", damage()),
        Err(what) => panic!("{}: {what}", damage()),
    }
}

/// Opens the step and says who found what.
fn opening(reader: &Reader) -> Result<Option<Found>, String> {
    Ok(reader.checkpoint(STEP)?.err())
}

/// The first check of a data file, which every restore makes: header, trailer, page table, checksum
/// pages.
fn first_look(dir: &Arc<dyn Dir>, index: &Index, file: u32) -> Result<Option<Found>, String> {
    let files = FileSet::new(Arc::clone(dir), &index.files);
    match files.block_bytes(file) {
        Ok(_) => Ok(None),
        Err(error) => Found::of(By::Restoring, &error.into()).map(Some),
    }
}

fn index_paths(checkpoint: &Checkpoint) -> Vec<String> {
    checkpoint.manifest().items.iter().map(|item| item.index.path.clone()).collect()
}

fn data_files(reader: &Reader, checkpoint: &Checkpoint) -> Vec<DataFile> {
    let index = &checkpoint.index().unwrap();
    let step = reader.step_path(STEP);
    index.files.iter().map(|file| DataFile::of(&step, &file.name, index).unwrap()).collect()
}

fn path_of(checkpoint: &Checkpoint, leaf: u32) -> String {
    checkpoint.leaves()[leaf as usize].path.to_string()
}

#[test]
fn every_flipped_bit_of_a_manifest_is_found() {
    let count = AtomicU64::new(0);
    on_copies(|reader, worker| {
        let victim = Victim::open(reader.step_path(STEP).join("manifest.json"));
        for at in (0..victim.bytes.len() as u64 * 8).filter(|at| at % WORKERS == worker) {
            let (byte, bit) = (at / 8, (at % 8) as u32);
            let damage = || format!("bit {bit} of byte {byte} of the manifest");
            victim.flipped(byte, bit, || {
                let listed = found(reader.listing(STEP), damage);
                assert!(listed.what.contains("manifest.json"), "{}: {}", damage(), listed.what);
                assert_eq!(reader.manager().all_steps().unwrap(), [OTHER], "{}", damage());
                assert_eq!(found(opening(reader), damage).file.as_ref(), Some(&victim.path), "{}", damage());
            });
            count.fetch_add(1, Ordering::Relaxed);
        }
    });
    println!("manifest: {count:?} of {count:?} bits flipped and found");
}

#[test]
fn every_flipped_bit_of_an_index_is_found_when_opened() {
    let count = AtomicU64::new(0);
    on_copies(|reader, worker| {
        let checkpoint = reader.checkpoint(STEP).unwrap().unwrap();
        for path in index_paths(&checkpoint) {
            let victim = Victim::open(reader.step_path(STEP).join(path));
            for at in (0..victim.bytes.len() as u64 * 8).filter(|at| at % WORKERS == worker) {
                let (byte, bit) = (at / 8, (at % 8) as u32);
                let damage = || format!("bit {bit} of byte {byte} of {}", victim.path.display());
                let found = victim.flipped(byte, bit, || found(opening(reader), damage));
                assert_eq!(found.file.as_ref(), Some(&victim.path), "{}", damage());
                count.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    println!("indexes: {count:?} of {count:?} bits flipped and found");
}

#[test]
fn every_flipped_bit_of_a_file_frame_is_found() {
    let (by_restore, by_verify, whole) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    on_copies(|reader, worker| {
        let checkpoint = reader.checkpoint(STEP).unwrap().unwrap();
        let dir = reader.environment.disk.open_dir(&reader.step_path(STEP)).unwrap();
        for (file, data) in (0_u32..).zip(data_files(reader, &checkpoint)) {
            let victim = Victim::open(data.path.clone());
            for at in data.metadata().into_iter().flatten().flat_map(|byte| byte * 8..byte * 8 + 8) {
                if at % WORKERS != worker {
                    continue;
                }
                let (byte, bit) = (at / 8, (at % 8) as u32);
                let damage = || format!("bit {bit} of byte {byte} of {}", victim.path.display());
                victim.flipped(byte, bit, || {
                    let first = if data.is_index_page(byte) {
                        // No restore reads them: they are there to rebuild an index from.
                        by_verify.fetch_add(1, Ordering::Relaxed);
                        let fresh = reader.checkpoint(STEP).unwrap().unwrap();
                        found(look::verify(&fresh), damage)
                    } else {
                        by_restore.fetch_add(1, Ordering::Relaxed);
                        found(first_look(&dir, &checkpoint.index().unwrap(), file), damage)
                    };
                    assert_eq!(first.file.as_ref(), Some(&victim.path), "{}: {}", damage(), first.what);
                    // The whole way of a reader, for a part of them.
                    if mix(at, u64::from(file)).is_multiple_of(97) {
                        let found = found(reader.look(STEP), damage);
                        assert!(matches!(found.by, By::Restoring | By::Verifying), "{}: {found:?}", damage());
                        assert_eq!(found.file.as_ref(), Some(&victim.path), "{}", damage());
                        whole.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        }
    });
    println!(
        "headers, footers, trailers: every bit flipped: {by_restore:?} found before a restore begins, {by_verify:?} (pages that no restore reads) by verify; \
         {whole:?} of them by the whole way of a reader too"
    );
}

#[test]
fn a_flipped_data_bit_is_found_and_located() {
    let every = if long() { 1 } else { 29 };
    let (restored, padding, verified, whole, all) =
        (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    on_copies(|reader, worker| {
        let checkpoint = reader.checkpoint(STEP).unwrap().unwrap();
        let contents = states::contents(STEP);
        for data in data_files(reader, &checkpoint) {
            let victim = Victim::open(data.path.clone());
            for at in 4096 * 8..data.data_end * 8 {
                if at % WORKERS != worker {
                    continue;
                }
                all.fetch_add(1, Ordering::Relaxed);
                let drawn = mix(at, data.length);
                if !drawn.is_multiple_of(every) {
                    continue;
                }
                let drawn = drawn / every;
                let (byte, bit) = (at / 8, (at % 8) as u32);
                let block = data.block_of(byte);
                let damage =
                    || format!("bit {bit} of byte {byte}, block {block}, of {}", victim.path.display());
                let leaves = data.leaves_in(block);
                let names: Vec<String> = leaves.iter().map(|&leaf| path_of(&checkpoint, leaf)).collect();
                let named = |found: &Found| {
                    assert_eq!(found.file.as_ref(), Some(&victim.path), "{}: {}", damage(), found.what);
                    assert_eq!(found.block, Some(block), "{}: {}", damage(), found.what);
                    let right = found.leaf.as_ref().map_or(names.is_empty(), |leaf| names.contains(leaf));
                    assert!(right, "{}: {:?} is named, {names:?} are hit", damage(), found.leaf);
                };
                victim.flipped(byte, bit, || {
                    if leaves.is_empty() {
                        // Nobody's bytes: every value is right, and the damage is still told.
                        padding.fetch_add(1, Ordering::Relaxed);
                        assert!(states::read_all(&checkpoint).unwrap() == contents, "{}", damage());
                        named(&found(look::verify(&checkpoint), damage));
                        return;
                    }
                    let leaf = leaves[drawn as usize % leaves.len()];
                    match states::read(&checkpoint, leaf) {
                        Err(error) => named(&Found::of(By::Restoring, &error).unwrap()),
                        Ok(_) => panic!("{}: {} was given out", damage(), path_of(&checkpoint, leaf)),
                    }
                    restored.fetch_add(1, Ordering::Relaxed);
                    if drawn.is_multiple_of(8) {
                        named(&found(look::verify(&checkpoint), damage));
                        verified.fetch_add(1, Ordering::Relaxed);
                    }
                    if drawn % 64 == 1 {
                        let found = found(reader.look(STEP), damage);
                        assert_eq!(found.by, By::Restoring, "{}", damage());
                        named(&found);
                        whole.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        }
    });
    println!(
        "data: of {all:?} bits {restored:?} flipped and found by a restore of a leaf in their block, {padding:?} in blocks of padding by verify; \
         {verified:?} of them by verify too, {whole:?} by the whole way of a reader"
    );
    assert!(restored.into_inner() >= 20_000);
}

#[test]
fn padding_between_leaves_is_verified_too() {
    let dir = tempfile::tempdir().unwrap();
    let root = saved(dir.path());
    let reader = Reader::open(&root).unwrap();
    let checkpoint = reader.checkpoint(STEP).unwrap().unwrap();
    let mut gaps = 0;
    for data in data_files(&reader, &checkpoint) {
        let victim = Victim::open(data.path.clone());
        let covered = |byte: u64| data.extents.iter().any(|(_, range)| range.contains(&byte));
        for byte in (4096..data.data_end).filter(|&byte| !covered(byte)) {
            gaps += 1;
            let damage = || format!("byte {byte} between the leaves of {}", victim.path.display());
            let found = victim.flipped(byte, (byte % 8) as u32, || found(look::verify(&checkpoint), damage));
            assert_eq!(found.block, Some(data.block_of(byte)));
            assert_eq!(found.file.as_ref(), Some(&victim.path));
        }
    }
    println!("padding: {gaps} bytes between leaves, each flipped and found by verify");
    assert!(gaps > 100);
}

#[test]
fn every_truncation_of_every_file_is_found() {
    let (manifests, indexes, data) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    on_copies(|reader, worker| {
        let checkpoint = reader.checkpoint(STEP).unwrap().unwrap();
        let step = reader.step_path(STEP);
        let dir = reader.environment.disk.open_dir(&step).unwrap();
        let mine = |length: &u64| length % WORKERS == worker;

        let victim = Victim::open(step.join("manifest.json"));
        for length in (0..victim.bytes.len() as u64).filter(mine) {
            let damage = || format!("the manifest, cut to {length} bytes");
            victim.cut(length, || {
                found(reader.listing(STEP), damage);
                assert_eq!(reader.manager().latest_step().unwrap(), Some(OTHER), "{}", damage());
                assert_eq!(found(opening(reader), damage).file.as_ref(), Some(&victim.path));
            });
            manifests.fetch_add(1, Ordering::Relaxed);
        }
        for path in index_paths(&checkpoint) {
            let victim = Victim::open(step.join(&path));
            for length in (0..victim.bytes.len() as u64).filter(mine) {
                let damage = || format!("{path}, cut to {length} bytes");
                victim.cut(length, || {
                    assert!(found(reader.lengths(STEP), damage).what.contains(&path), "{}", damage());
                    assert_eq!(found(opening(reader), damage).file.as_ref(), Some(&victim.path));
                });
                indexes.fetch_add(1, Ordering::Relaxed);
            }
        }
        for (file, layout) in (0_u32..).zip(data_files(reader, &checkpoint)) {
            let victim = Victim::open(layout.path.clone());
            let path = &checkpoint.outline().files[file as usize].name;
            let is_data = |length: u64| length >= 4096 && length < layout.data_end;
            for length in (0..layout.length).filter(mine) {
                if is_data(length) && !long() && length % 64 > 1 && length % 4096 < 4094 {
                    continue;
                }
                let damage = || format!("{path}, cut to {length} bytes");
                victim.cut(length, || {
                    assert!(found(reader.lengths(STEP), damage).what.contains(&**path), "{}", damage());
                    let first = found(first_look(&dir, &checkpoint.index().unwrap(), file), damage);
                    assert_eq!(first.file.as_ref(), Some(&victim.path), "{}", damage());
                    if mix(length, 3).is_multiple_of(101) {
                        assert_eq!(reader.manager().latest_step().unwrap(), Some(OTHER), "{}", damage());
                        assert_eq!(found(reader.look_inside(STEP), damage).file.as_ref(), Some(&victim.path));
                    }
                });
                data.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    println!(
        "truncations found: {manifests:?} of manifests (every length), {indexes:?} of indexes (every length), {data:?} of data files"
    );
}

#[test]
fn a_truncated_file_gives_an_error_and_no_value() {
    let dir = tempfile::tempdir().unwrap();
    let reader = Reader::open(&saved(dir.path())).unwrap();
    let checkpoint = reader.checkpoint(STEP).unwrap().unwrap();
    // All that is learnt of the files once is known before they are cut.
    assert!(look::look_into(&checkpoint, STEP).unwrap().is_none());
    let mut cuts = 0;
    for data in data_files(&reader, &checkpoint) {
        let victim = Victim::open(data.path.clone());
        for length in (0..data.data_end).step_by(1021) {
            for leaf in data.leaves_in(data.data_end.min(length + 4096) / data.block_bytes) {
                let ends: Vec<u64> =
                    data.extents.iter().filter(|(of, _)| *of == leaf).map(|(_, range)| range.end).collect();
                if ends.iter().all(|&end| end <= length) {
                    continue;
                }
                cuts += 1;
                victim.cut(length, || match states::read(&checkpoint, leaf) {
                    Ok(_) => panic!(
                        "{} came from {} cut to {length}",
                        path_of(&checkpoint, leaf),
                        data.path.display()
                    ),
                    Err(error) => {
                        let found = Found::of(By::Restoring, &error).unwrap();
                        assert_eq!(found.file.as_ref(), Some(&victim.path), "{}", found.what);
                    }
                });
            }
        }
    }
    assert!(cuts > 30, "{cuts}");
    println!("{cuts} restores from files that were cut under an open checkpoint: an error each");
}

#[test]
fn files_that_are_missing_or_longer_are_found_and_named() {
    let dir = tempfile::tempdir().unwrap();
    let root = saved(dir.path());
    let reader = Reader::open(&root).unwrap();
    let step = reader.step_path(STEP);
    let files = files_of(&step);
    for path in &files {
        let bytes = std::fs::read(path).unwrap();
        let is_manifest = path.ends_with("manifest.json");
        let named = |what: &str| {
            let damage = || format!("{} {what}", path.display());
            let found_first = found(reader.look(STEP), damage);
            let by = if is_manifest { By::Listing } else { By::Lengths };
            assert_eq!(found_first.by, by, "{}", damage());
            let name = path.strip_prefix(&step).unwrap().to_str().unwrap();
            assert!(found_first.what.contains(name), "{}: {}", damage(), found_first.what);
            assert_eq!(reader.manager().latest_step().unwrap(), Some(OTHER), "{}", damage());
            let inside = found(reader.look_inside(STEP), damage);
            assert!(inside.what.contains(name), "{}: {}", damage(), inside.what);
            assert!(reader.look(OTHER).unwrap().is_none());
        };
        let aside = dir.path().join("aside");
        std::fs::rename(path, &aside).unwrap();
        named("is missing");
        std::fs::create_dir(path).unwrap();
        named("is a directory");
        std::fs::remove_dir(path).unwrap();
        std::os::unix::fs::symlink(&aside, path).unwrap();
        named("is a symlink to its own bytes");
        std::fs::remove_file(path).unwrap();
        std::fs::rename(&aside, path).unwrap();
        let tail = &bytes[bytes.len().saturating_sub(4096)..];
        for more in [&b"\0"[..], b"\n", &[0; 4095], &[0; 4096], tail, &bytes] {
            std::fs::write(path, [&bytes, more].concat()).unwrap();
            named(&format!("has {} bytes more", more.len()));
        }
        std::fs::write(path, &bytes).unwrap();
        assert!(reader.look(STEP).unwrap().is_none());
    }
    println!("{} files: missing, a directory, a symlink, six times longer: all found and named", files.len());
}

/// The files of a step, but for the lease, which holds nothing.
fn files_of(step: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(step).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(files_of(&path));
        } else if !path.ends_with(".lease") {
            files.push(path);
        }
    }
    files.sort();
    files
}

fn exchange(a: &Path, b: &Path) {
    let aside = a.with_extension("aside");
    std::fs::rename(a, &aside).unwrap();
    std::fs::rename(b, a).unwrap();
    std::fs::rename(&aside, b).unwrap();
}

#[test]
fn every_pair_of_files_that_change_places_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let root = saved(dir.path());
    let reader = Reader::open(&root).unwrap();
    let steps = [OTHER, STEP];
    let files: Vec<(u64, PathBuf)> = steps
        .iter()
        .flat_map(|&step| files_of(&reader.step_path(step)).into_iter().map(move |path| (step, path)))
        .collect();
    let mut same_length = 0;
    let mut pairs = 0;
    let mut finders: BTreeMap<By, u64> = BTreeMap::new();
    for (at, (step, a)) in files.iter().enumerate() {
        for (other_step, b) in &files[at + 1..] {
            let damage = || format!("{} and {} have changed places", a.display(), b.display());
            let length = |path: &Path| std::fs::metadata(path).unwrap().len();
            same_length += u64::from(length(a) == length(b));
            pairs += 1;
            exchange(a, b);
            for each in steps {
                let hit = each == *step || each == *other_step;
                match reader.look(each) {
                    Ok(None) if !hit => {}
                    answer => *finders.entry(found(answer, damage).by).or_default() += 1,
                }
                if hit {
                    found(reader.look_inside(each), damage);
                }
            }
            exchange(a, b);
            // One of them in both places.
            let good = std::fs::read(b).unwrap();
            std::fs::copy(a, b).unwrap();
            found(reader.look(*other_step), || format!("{} stands at {} too", a.display(), b.display()));
            std::fs::write(b, good).unwrap();
        }
    }
    for step in steps {
        assert!(reader.look(step).unwrap().is_none());
    }
    println!(
        "{pairs} pairs of files, {same_length} of equal lengths, changed places or doubled: all found, by {finders:?}"
    );
    assert!(same_length >= 10);
}

#[test]
fn directories_that_change_places_are_found() {
    let dir = tempfile::tempdir().unwrap();
    let root = saved(dir.path());
    let reader = Reader::open(&root).unwrap();
    let [one, two] = [OTHER, STEP].map(|step| reader.step_path(step));
    exchange(&one, &two);
    for step in [OTHER, STEP] {
        let found = found(reader.look(step), || "two steps have changed names".to_owned());
        assert!(found.by == By::Listing && found.what.contains("it is step"), "{found:?}");
    }
    exchange(&one, &two);
    for (a, b) in
        [(two.join("i0"), two.join("i1")), (one.join("i0"), two.join("i0")), (one.join("i2"), two.join("i2"))]
    {
        exchange(&a, &b);
        found(reader.look(STEP), || format!("{} and {} have changed places", a.display(), b.display()));
        exchange(&a, &b);
    }
    for step in [OTHER, STEP] {
        assert!(reader.look(step).unwrap().is_none());
    }
}

#[test]
fn a_file_of_another_attempt_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let root = saved(dir.path());
    let twin = dir.path().join("elsewhere");
    std::fs::create_dir(&twin).unwrap();
    let twin = Reader::open(&saved(&twin)).unwrap().step_path(STEP);
    let reader = Reader::open(&root).unwrap();
    let step = reader.step_path(STEP);
    for path in files_of(&step) {
        let name = path.strip_prefix(&step).unwrap();
        let good = std::fs::read(&path).unwrap();
        std::fs::copy(twin.join(name), &path).unwrap();
        found(reader.look(STEP), || format!("{} is of another attempt", name.display()));
        std::fs::write(&path, good).unwrap();
    }
    assert!(reader.look(STEP).unwrap().is_none());
}

#[test]
fn all_leaves_of_a_damaged_block_are_found() {
    let dir = tempfile::tempdir().unwrap();
    let reader = Reader::open(&saved(dir.path())).unwrap();
    let checkpoint = reader.checkpoint(STEP).unwrap().unwrap();
    let contents = states::contents(STEP);
    for data in data_files(&reader, &checkpoint) {
        let victim = Victim::open(data.path.clone());
        for block in 1..data.data_end / data.block_bytes {
            let hit = data.leaves_in(block);
            victim.flipped(block * data.block_bytes + 77, 3, || {
                for leaf in 0..checkpoint.leaves().len() as u32 {
                    let answer = states::read(&checkpoint, leaf);
                    let is_hit = hit.contains(&leaf);
                    let path = path_of(&checkpoint, leaf);
                    match answer {
                        Err(_) if is_hit => {}
                        Ok(content) if !is_hit => assert!(content == contents[leaf as usize], "{path}"),
                        Ok(_) => panic!("{path} was given out, and block {block} holds bytes of it"),
                        Err(error) => panic!("{path} has nothing in block {block}: {error}"),
                    }
                }
            });
        }
    }
}

#[test]
fn every_engine_finds_damage() {
    let dir = tempfile::Builder::new().tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let root = saved(dir.path());
    for engine in [Engine::Uring, Engine::Threads, Engine::Buffered] {
        let reader = Reader::open_with(&root, engine).unwrap();
        assert!(reader.look(STEP).unwrap().is_none());
        let checkpoint = reader.checkpoint(STEP).unwrap().unwrap();
        let mut flips = 0;
        for data in data_files(&reader, &checkpoint) {
            let victim = Victim::open(data.path.clone());
            for byte in (0..data.length).step_by(997) {
                let damage = || format!("byte {byte} of {}", victim.path.display());
                let found = victim.flipped(byte, (byte % 8) as u32, || found(reader.look(STEP), damage));
                assert_eq!(found.file.as_ref(), Some(&victim.path), "{}: {}", damage(), found.what);
                flips += 1;
            }
        }
        assert!(reader.look(STEP).unwrap().is_none());
        println!(
            "{} (asked for {engine:?}): {flips} bits flipped and found",
            reader.environment.disk.choice().engine
        );
    }
}
