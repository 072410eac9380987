//! Conversions into a store. The process may end at any request: readers find the other files by
//! the index, so it must be there only if they are.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests end by it")]

mod common;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use common::*;
use stepwell_core::dtype::Dtype;
use stepwell_core::remote::StoreOptions;
use stepwell_core::remote::simulated::{Fate, SimStore};
use stepwell_manager::convert::{
    Conversion, ConversionOptions, ConversionPlan, NO_OWNER, OutputKind, PieceContent, PlannedFile,
    PlannedPiece, Sharing, remove_objects, write_record,
};
use stepwell_manager::directory_layout::EXPORT_RECORD;
use stepwell_manager::ledger::{LedgerDisk, LedgerPatience};
use stepwell_manager::{Checkpoint, Environment};

const OUTPUT: &str = "s3://bucket/models/out";

fn file(name: &str, length: u64, content: PieceContent) -> PlannedFile {
    let pieces = vec![PlannedPiece { offset: 0, length, content }];
    PlannedFile { name: name.to_owned(), length, pieces }
}

/// An index, and two files of tensors, which it names.
fn plan() -> ConversionPlan {
    let tensor = |leaf| PieceContent::Tensor { leaf, dtype: Dtype::Uint8 };
    let files = vec![
        file("index", 5, PieceContent::Bytes(b"a & b".to_vec())),
        file("a", 3000, tensor(0)),
        file("b", 100, tensor(2)),
    ];
    ConversionPlan { files, digest: [1; 32], owner: NO_OWNER }
}

fn environment(world: &World, store: &Arc<SimStore>) -> Environment {
    let short = Duration::from_millis(40);
    let patience = LedgerPatience { full: short, ending: short, pause: Duration::from_millis(2) };
    let parts = StoreOptions { part_bytes: 1024, connections: 4, create_timeout: short };
    let disk = LedgerDisk::new(Arc::clone(store) as _, parts, patience, world.rng.clone());
    Environment { disk: Arc::new(disk), ..world.environment() }
}

fn convert(world: &World, source: &Checkpoint, store: &Arc<SimStore>) -> stepwell_manager::Result<()> {
    write(world, source, store, plan())
}

fn write(
    world: &World,
    source: &Checkpoint,
    store: &Arc<SimStore>,
    plan: ConversionPlan,
) -> stepwell_manager::Result<()> {
    let environment = environment(world, store);
    let sharing = Arc::new(Sharing::alone(&environment));
    let options = ConversionOptions {
        budget_bytes: 1 << 20,
        window_bytes: 4096,
        journal_bytes: 4096,
        stall_timeout: Duration::from_secs(10),
    };
    let path = Path::new(OUTPUT);
    let begun =
        Conversion::begin(source, plan, path, OutputKind::Directory, &sharing, &environment, options)?;
    begun.write(source, &mut |_, _| true)?.publish()
}

fn source(world: &World) -> Checkpoint {
    let manager = world.open(options());
    commit(&manager, 7);
    manager.checkpoint(Some(7)).unwrap()
}

fn written(store: &SimStore) -> Vec<String> {
    store.keys().into_iter().filter(|key| key.starts_with("models/")).collect()
}

fn is_whole(store: &SimStore) -> bool {
    let bytes = |name: &str| store.bytes(&format!("models/out/{name}"));
    bytes("a") == Some(vec![7; 3000])
        && bytes("b") == Some(vec![7 ^ 0xff; 100])
        && bytes("index") == Some(b"a & b".to_vec())
}

#[test]
fn the_index_is_there_only_with_what_it_names() {
    let world = World::default();
    let source = source(&world);
    let store = SimStore::new("s3://bucket");
    convert(&world, &source, &store).unwrap();
    assert!(is_whole(&store));
    let requests = store.requests().len() as u64;
    assert!(requests >= 8, "{requests}");
    for number in 0..requests {
        for fate in [Fate::Killed, Fate::KilledAfterwards, Fate::AnswerLost, Fate::Dropped, Fate::Late] {
            let store = SimStore::new("s3://bucket");
            let process = store.process();
            process.script(move |request| if request.number == number { fate } else { Fate::Served });
            let ended = convert(&world, &source, &process);
            let what = format!("{fate:?} at request {number}: {ended:?}, {:?}", written(&store));
            if matches!(fate, Fate::AnswerLost | Fate::Dropped) && ended.is_err() {
                assert!(written(&store).is_empty(), "{what}");
            }
            store.land_late();
            let has_index = store.bytes("models/out/index").is_some();
            assert_eq!(has_index, is_whole(&store), "{what}");
            assert!(ended.is_err() || has_index, "{what}");
        }
    }
}

/// The output of an export.
fn export_plan() -> ConversionPlan {
    ConversionPlan { owner: [2; 32], ..plan() }
}

/// Writes an export, and removes it.
fn export(world: &World, source: &Checkpoint, store: &Arc<SimStore>) -> stepwell_manager::Result<()> {
    let environment = environment(world, store);
    let path = Path::new(OUTPUT);
    write_record(&path.join(EXPORT_RECORD), b"begun", &environment)?;
    write(world, source, store, export_plan())?;
    write_record(&path.join(EXPORT_RECORD), b"done", &environment)?;
    write_record(&path.join(EXPORT_RECORD), b"removed", &environment)?;
    remove_objects(path, OutputKind::Directory, &environment)
}

#[test]
fn whatever_is_left_of_an_export_has_its_record() {
    let world = World::default();
    let source = source(&world);
    let store = SimStore::new("s3://bucket");
    export(&world, &source, &store).unwrap();
    assert!(written(&store).is_empty());
    let mut found = std::collections::BTreeSet::new();
    for number in 0..store.requests().len() as u64 {
        for fate in [Fate::Killed, Fate::KilledAfterwards, Fate::AnswerLost, Fate::Dropped] {
            let store = SimStore::new("s3://bucket");
            let process = store.process();
            process.script(move |request| if request.number == number { fate } else { Fate::Served });
            let ended = export(&world, &source, &process);
            let what = format!("{fate:?} at request {number}: {ended:?}, {:?}", written(&store));
            let record = store.bytes(&format!("models/out/{EXPORT_RECORD}"));
            assert!(record.is_some() || written(&store).is_empty(), "{what}");
            assert!(record.as_deref() != Some(b"done") || is_whole(&store), "{what}");
            found.insert(record);
        }
    }
    assert_eq!(found.len(), 4, "begun, done, removed, and nothing");
}

#[test]
fn an_export_replaces_nothing_but_its_record() {
    let world = World::default();
    let source = source(&world);
    let store = SimStore::new("s3://bucket");
    let environment = environment(&world, &store);
    let theirs = Path::new(OUTPUT).join("theirs");
    write_record(&theirs, b"theirs", &environment).unwrap();
    write_record(&Path::new(OUTPUT).join(EXPORT_RECORD), b"begun", &environment).unwrap();
    let error = write(&world, &source, &store, export_plan()).unwrap_err();
    assert!(error.to_string().contains("exists already"), "{error}");
    assert_eq!(written(&store).len(), 2);
}

#[test]
fn a_damaged_source_leaves_nothing() {
    let world = World::default();
    let source = source(&world);
    let manager = world.open(options());
    for file in &manager.manifest(Some(7)).unwrap().files {
        let path = manager.step_path(7).join(&file.path);
        assert!(world.disk.corrupt(path.to_str().unwrap(), |bytes| bytes[4200] ^= 1));
    }
    let store = SimStore::new("s3://bucket");
    let error = convert(&world, &source, &store).unwrap_err();
    assert_eq!(error.kind(), "corrupt_checkpoint", "{error}");
    assert_eq!((written(&store), store.open_uploads()), (Vec::new(), 0));
}

#[test]
fn a_place_that_is_taken_is_refused() {
    let world = World::default();
    let source = source(&world);
    let store = SimStore::new("s3://bucket");
    convert(&world, &source, &store).unwrap();
    let error = convert(&world, &source, &store).unwrap_err();
    assert!(error.to_string().contains("exists already"), "{error}");
    assert!(is_whole(&store), "nothing was changed");
}
