//! Copies of a checkpoint: a crash at any instant leaves a whole copy or none.

use std::path::Path;
use std::time::Duration;

use stepwell_core::io::simulated::SimDisk;
use stepwell_manager::{Checkpoint, Error, Outcome, SaveRequest, copy, singular};
use stepwell_tests::crash::{Explorer, Marks};
use stepwell_tests::steps::run::options;
use stepwell_tests::steps::{states, world};

use super::quick;

const SOURCE: &str = "models/a";
const COPY: &str = "kept/b";

fn open(disk: &SimDisk, path: &str) -> Result<Checkpoint, Error> {
    Checkpoint::open(Path::new(path), &world::environment(disk, 90))
}

fn check(disk: &SimDisk, marks: &Marks) -> Result<(), String> {
    let verified = |path: &str| match open(disk, path) {
        Ok(checkpoint) => states::verify(&checkpoint).map(Some),
        Err(Error::StepNotFound { .. }) => Ok(None),
        Err(error) => Err(error.to_string()),
    };
    if verified(SOURCE)?.as_deref() != Some("a") {
        return Err("the source is gone".to_owned());
    }
    match verified(COPY)?.as_deref() {
        Some("a") => Ok(()),
        None if !marks.iter().any(|mark| mark == "copied") => Ok(()),
        found => Err(format!("the copy is {found:?}")),
    }
}

#[test]
fn a_crash_during_a_copy_leaves_a_whole_copy_or_none() {
    let base = SimDisk::new();
    let mut request = SaveRequest::new(0, states::state(0, "a").unwrap());
    request.custom_metadata = serde_json::json!({ "tag": "a" });
    let save = singular::save(Path::new(SOURCE), request, &options(), &world::environment(&base, 1)).unwrap();
    assert!(matches!(save.wait(Some(Duration::from_secs(60))), Ok(Some(Outcome::Committed))));
    let disk = SimDisk::from_image(&base.image());
    let source = open(&disk, SOURCE).unwrap();
    copy::to_path(
        &source,
        &copy::CopySelection::default(),
        Path::new(COPY),
        &world::environment(&disk, 2),
        &mut |_| true,
    )
    .unwrap();
    disk.mark("copied");
    let mut explorer = Explorer::new(quick());
    if let Err(failure) = explorer.explore(&disk.log(), &Marks::default(), check) {
        panic!("{failure}");
    }
    println!("{}", explorer.explored);
}
