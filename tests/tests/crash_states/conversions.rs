//! Conversions: a crash or a kill at any instant leaves a whole output or none, and the next
//! conversion finishes what is there.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use stepwell_core::dtype::Dtype;
use stepwell_core::io::Disk;
use stepwell_core::io::simulated::{Action, Fault, Image, Moment, OperationKind, SimDisk};
use stepwell_manager::convert::{
    self as conversions, Conversion, ConversionOptions, ConversionPlan, NO_OWNER, OutputKind, PieceContent,
    PlannedFile, PlannedPiece, Sharing,
};
use stepwell_manager::{Checkpoint, Error, Outcome, SaveRequest, singular};
use stepwell_tests::crash::{Explorer, Marks};
use stepwell_tests::steps::run::options;
use stepwell_tests::steps::states::{FEW, MANY, state_of};
use stepwell_tests::steps::world;

use super::quick;

const SOURCE: &str = "models/a";
const OUTPUT: &str = "out/b";
const FILES: [&str; 2] = ["stepwell_export.json", "two.bin"];
/// The answer of a file system without preallocation.
const EOPNOTSUPP: i32 = 95;

/// A disk with a checkpoint: `params/w` is leaf 0, `optimizer/m` leaf 1.
fn source() -> Image {
    let base = SimDisk::new();
    let request = SaveRequest::new(0, state_of(0, "a", MANY).unwrap());
    let save = singular::save(Path::new(SOURCE), request, &options(), &world::environment(&base, 1)).unwrap();
    assert!(matches!(save.wait(Some(Duration::from_secs(60))), Ok(Some(Outcome::Committed))));
    base.image()
}

/// Two files of several windows, with checksums that go from one window to the next.
fn plan() -> ConversionPlan {
    let (w, m) = (MANY * 4, FEW * 4);
    let piece = |offset, length, content| PlannedPiece { offset, length, content };
    let bytes = |offset, count: u8| {
        piece(offset, count.into(), PieceContent::Bytes((0..count).map(|byte| byte ^ 0x5a).collect()))
    };
    let tensor =
        |offset, length, leaf| piece(offset, length, PieceContent::Tensor { leaf, dtype: Dtype::Float32 });
    let one = vec![
        bytes(0, 100),
        tensor(104, w, 0),
        piece(104 + w + 6, 4, PieceContent::Crc32 { first: 0, last: 1 }),
    ];
    let two = vec![tensor(0, m, 1), bytes(m, 3), tensor(4096, w, 0), bytes(4096 + w, 40)];
    let file = |name: &str, length, pieces| PlannedFile { name: name.to_owned(), length, pieces };
    let files = vec![file(FILES[0], 104 + w + 10, one), file(FILES[1], 4096 + w + 40, two)];
    ConversionPlan { files, digest: [3; 32], owner: NO_OWNER }
}

fn begin(
    disk: &SimDisk,
    seed: u64,
    plan: ConversionPlan,
    kind: OutputKind,
) -> Result<(Checkpoint, Conversion), Error> {
    let limits = ConversionOptions {
        budget_bytes: 1 << 20,
        window_bytes: 4096,
        journal_bytes: 8192,
        stall_timeout: Duration::from_secs(60),
    };
    begin_with(disk, seed, plan, kind, limits)
}

fn begin_with(
    disk: &SimDisk,
    seed: u64,
    plan: ConversionPlan,
    kind: OutputKind,
    limits: ConversionOptions,
) -> Result<(Checkpoint, Conversion), Error> {
    let environment = world::environment(disk, seed);
    let source = Checkpoint::open(Path::new(SOURCE), &environment)?;
    let (output, alone) = (Path::new(OUTPUT), Arc::new(Sharing::alone(&environment)));
    let begun = Conversion::begin(&source, plan, output, kind, &alone, &environment, limits)?;
    Ok((source, begun))
}

/// Converts. Returns the bytes that an earlier process had written.
fn convert(disk: &SimDisk, seed: u64) -> Result<u64, Error> {
    let (source, begun) = begin(disk, seed, plan(), OutputKind::Directory)?;
    let resumed = begun.resumed_bytes();
    begun.write(&source, &mut |_, _| true)?.publish()?;
    Ok(resumed)
}

/// The files of the output; `None`: it does not exist.
fn output(disk: &SimDisk) -> Option<Vec<Vec<u8>>> {
    let dir = disk.open_dir(Path::new(OUTPUT)).ok()?;
    Some(FILES.iter().map(|name| dir.read_file(name, 1 << 20).unwrap()).collect())
}

fn expected(base: &Image) -> Vec<Vec<u8>> {
    let disk = SimDisk::from_image(base);
    assert_eq!(convert(&disk, 2).unwrap(), 0);
    let found = output(&disk).unwrap();
    let lengths: Vec<u64> = found.iter().map(|bytes| bytes.len() as u64).collect();
    assert_eq!(lengths, plan().files.iter().map(|file| file.length).collect::<Vec<_>>());
    found
}

#[test]
fn a_crash_of_a_conversion_leaves_a_whole_output_or_none() {
    let base = source();
    let expected = expected(&base);
    let disk = SimDisk::from_image(&base);
    convert(&disk, 2).unwrap();
    disk.mark("converted");
    let mut resumed = 0;
    let check = |disk: &SimDisk, marks: &Marks| {
        match output(disk) {
            Some(found) if found == expected => return Ok(()),
            Some(_) => return Err("the output is not whole".to_owned()),
            None if marks.iter().any(|mark| mark == "converted") => return Err("it is gone".to_owned()),
            None => {}
        }
        let before = convert(disk, 90).map_err(|error| format!("the next conversion: {error}"))?;
        resumed += u64::from(before > 0);
        match output(disk) {
            Some(found) if found == expected => Ok(()),
            found => Err(format!("after {before} resumed bytes, the output is {:?}", found.is_some())),
        }
    };
    let mut explorer = Explorer::new(quick());
    if let Err(failure) = explorer.explore(&disk.log(), &Marks::default(), check) {
        panic!("{failure}");
    }
    println!("{}; {resumed} resumed", explorer.explored);
    assert!(resumed > 0);
}

#[test]
fn a_conversion_killed_at_any_operation_is_finished_by_the_next() {
    kill_at_each_operation(|_| {});
}

#[test]
fn finished_windows_count_without_preallocation() {
    kill_at_each_operation(|disk| {
        let unsupported = Action::Fail(EOPNOTSUPP);
        disk.inject(Fault::on(OperationKind::Allocate, unsupported).from_then_on());
    });
}

/// Kills conversions on a disk that `prepare` has changed. The next one resumes most of the bytes.
fn kill_at_each_operation(prepare: fn(&SimDisk)) {
    let base = source();
    let expected = expected(&base);
    let (mut kills, mut resumes) = (0, Vec::new());
    for operation in 0.. {
        let disk = SimDisk::from_image(&base);
        prepare(&disk);
        disk.kill_at(disk.operations() + operation);
        let first = convert(&disk, 2);
        let next = disk.process();
        if first.is_ok() {
            break;
        }
        kills += 1;
        if output(&next).is_none() {
            resumes.push(convert(&next, 3).unwrap());
        }
        assert_eq!(output(&next), Some(expected.clone()), "killed at operation {operation}");
    }
    assert!(kills > 50, "{kills} kills");
    let lengths: Vec<u64> = plan().files.iter().map(|file| file.length).collect();
    let first = lengths[0];
    // Finished windows of a file in progress count: the other half of its windows is missing.
    for part in [1..first / 2, first + 1..first + lengths[1] / 2] {
        assert!(resumes.iter().any(|bytes| part.contains(bytes)), "{resumes:?}, but none in {part:?}");
    }
}

#[test]
fn a_removed_output_is_not_created_again() {
    for kind in [OutputKind::Directory, OutputKind::File] {
        let disk = SimDisk::from_image(&source());
        let mut plan = plan();
        plan.files.truncate(if kind == OutputKind::File { 1 } else { 2 });
        let (source, begun) = begin(&disk, 2, plan, kind).unwrap();
        assert_eq!(names(&disk), ["b.partial", "b.partial.journal"]);
        let parent = disk.open_dir(Path::new("out")).unwrap();
        match kind {
            OutputKind::Directory => {
                for file in FILES {
                    parent.remove_file(&format!("b.partial/{file}")).unwrap();
                }
                parent.remove_dir("b.partial").unwrap();
            }
            OutputKind::File => parent.remove_file("b.partial").unwrap(),
        }
        let failed = begun.write(&source, &mut |_, _| true).map(drop).unwrap_err();
        assert!(failed.to_string().contains("b.partial is gone"), "{failed}");
        assert_eq!(names(&disk), ["b.partial.journal"]);
        assert_eq!(convert(&disk, 3).unwrap(), 0);
    }
}

#[test]
fn a_lock_of_an_unlinked_journal_is_worth_nothing() {
    let base = source();
    let expected = expected(&base);
    let disk = SimDisk::from_image(&base);
    let (other, third) = (disk.process(), disk.process());
    // Before this process looks at its lock, the one that held it gives up, and a third begins.
    let writing = Arc::new(Mutex::new(None));
    let begun = Arc::clone(&writing);
    disk.set_hook(Some(Arc::new(move |moment, operation| {
        let is_lock = operation.kind == OperationKind::Lock && operation.process == 1;
        if moment == Moment::After && is_lock && operation.path.ends_with("b.partial.journal") {
            let parent = third.open_dir(Path::new("out")).unwrap();
            parent.remove_file("b.partial.journal").unwrap();
            *begun.lock().unwrap() = Some(begin(&third, 4, plan(), OutputKind::Directory).unwrap());
        }
    })));
    let refused = convert(&other, 3).unwrap_err().to_string();
    disk.set_hook(None);
    assert!(refused.contains("another process writes /out/b.partial"), "{refused}");
    let (source, begun) = writing.lock().unwrap().take().unwrap();
    begun.write(&source, &mut |_, _| true).unwrap().publish().unwrap();
    assert_eq!(output(&disk), Some(expected));
}

#[test]
fn a_conversion_does_not_wait_for_a_sync_that_hangs() {
    let base = source();
    let expected = expected(&base);
    // With little memory, the reader waits for buffers. With more, it waits for the end.
    for budget_bytes in [16 << 10, 1 << 20] {
        let disk = SimDisk::from_image(&base);
        let stall_timeout = Duration::from_millis(200);
        let limits =
            ConversionOptions { budget_bytes, window_bytes: 4096, journal_bytes: 8192, stall_timeout };
        let (source, begun) = begin_with(&disk, 2, plan(), OutputKind::Directory, limits).unwrap();
        let hangs = Arc::new(AtomicBool::new(true));
        let hook = Arc::clone(&hangs);
        disk.set_hook(Some(Arc::new(move |moment, operation| {
            let is_output = operation.path.to_string_lossy().contains("b.partial/");
            while moment == Moment::Before
                && operation.kind == OperationKind::Sync
                && is_output
                && hook.load(Ordering::SeqCst)
            {
                std::thread::sleep(Duration::from_millis(1));
            }
        })));
        let failed = begun.write(&source, &mut |_, _| true).map(drop).unwrap_err();
        assert!(matches!(failed, Error::Timeout { .. }), "{failed}");
        assert!(failed.to_string().contains("the writer of /out/b.partial"), "{failed}");
        // The thread that hangs may still write.
        let refused = convert(&disk, 3).unwrap_err().to_string();
        assert!(refused.contains("another process writes"), "{refused}");
        hangs.store(false, Ordering::SeqCst);
        let begun = Instant::now();
        while let Err(error) = convert(&disk, 3) {
            assert!(begun.elapsed() < Duration::from_secs(30), "{error}");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(output(&disk), Some(expected.clone()));
    }
}

/// The entries beside the output.
fn names(disk: &SimDisk) -> Vec<String> {
    let dir = disk.open_dir(Path::new("out")).unwrap();
    dir.entries().unwrap().into_iter().map(|entry| entry.name).collect()
}

#[test]
fn a_crash_of_a_removal_leaves_a_whole_output_or_none() {
    let base = source();
    let disk = SimDisk::from_image(&base);
    convert(&disk, 2).unwrap();
    let expected = output(&disk).unwrap();
    let disk = SimDisk::from_image(&disk.image());
    conversions::remove(Path::new(OUTPUT), &world::environment(&disk, 3)).unwrap();
    disk.mark("removed");
    assert_eq!(names(&disk), Vec::<String>::new());
    let check = |disk: &SimDisk, marks: &Marks| {
        let is_removed = marks.iter().any(|mark| mark == "removed");
        match output(disk) {
            Some(found) if found != expected => return Err("the output is not whole".to_owned()),
            Some(_) if is_removed => return Err("the output is back".to_owned()),
            _ => {}
        }
        let rest =
            disk.open_dir(Path::new("out/b.removed")).and_then(|dir| dir.entries()).unwrap_or_default();
        if !rest.is_empty() && !rest.iter().any(|entry| entry.name == FILES[0]) {
            return Err(format!("the record of an export is gone before {rest:?}"));
        }
        let there = output(disk).is_some();
        conversions::end_removal(Path::new(OUTPUT), &world::environment(disk, 4))
            .map_err(|error| error.to_string())?;
        match names(disk) {
            left if left.is_empty() != there => Ok(()),
            left => Err(format!("left behind: {left:?}")),
        }
    };
    let mut explorer = Explorer::new(quick());
    if let Err(failure) = explorer.explore(&disk.log(), &Marks::default(), check) {
        panic!("{failure}");
    }
    println!("{}", explorer.explored);
}
