//! Saves to a path, where no root's lock tells the dead from the living.

use std::path::Path;
use std::time::Duration;

use stepwell_core::io::simulated::SimDisk;
use stepwell_manager::{Checkpoint, Exists, Outcome, SaveRequest, singular};
use stepwell_tests::crash::{Explorer, Marks, sweep};
use stepwell_tests::steps::run::options;
use stepwell_tests::steps::{states, world};

use super::quick;

const PATH: &str = "models/a";

fn save(disk: &SimDisk, tag: &str, seed: u64) -> Result<(), String> {
    let mut request = SaveRequest::new(0, states::state(0, tag)?);
    request.custom_metadata = serde_json::json!({ "tag": tag });
    request.exists = Exists::Replace;
    let save = singular::save(Path::new(PATH), request, &options(), &world::environment(disk, seed))
        .map_err(|error| error.to_string())?;
    match save.wait(Some(Duration::from_secs(60))) {
        Ok(Some(Outcome::Committed)) => {
            disk.mark(&format!("committed {tag}"));
            Ok(())
        }
        other => Err(format!("{other:?}")),
    }
}

/// Whole, and of the last attempt that was committed or of a later one.
fn check(disk: &SimDisk, marks: &Marks) -> Result<(), String> {
    let checkpoint = Checkpoint::open(Path::new(PATH), &world::environment(disk, 90));
    let tag = states::verify(&checkpoint.map_err(|error| error.to_string())?)?;
    let committed = marks.iter().filter_map(|mark| mark.strip_prefix("committed ")).next_back();
    if committed.is_none_or(|committed| committed <= tag.as_str()) {
        Ok(())
    } else {
        Err(format!("{committed:?} was committed, and {tag} is there"))
    }
}

#[test]
fn a_killed_replacement_is_removed_by_the_next() {
    let base = SimDisk::new();
    save(&base, "a", 1).unwrap();
    let image = base.image();
    let mut explorer = Explorer::new(quick());
    let runs = sweep::kills(
        || SimDisk::from_image(&image),
        |disk| drop(save(disk, "b", 2)),
        |disk| {
            save(&disk.process(), "c", 3)?;
            let image = disk.image();
            let names = image.get("models").and_then(|dir| dir.entries()).unwrap_or_default().len();
            if names != 1 {
                return Err(format!("something was left behind:\n{image}"));
            }
            explorer.explore(&disk.log(), &Marks::default(), check).map_err(|failure| failure.to_string())
        },
    );
    let runs = runs.unwrap_or_else(|failure| panic!("{failure}"));
    println!("{runs} kills; {}", explorer.explored);
    assert!(runs > 40, "{runs}");
}
