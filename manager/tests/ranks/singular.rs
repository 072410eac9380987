//! Several ranks save one checkpoint to a path, without a root: all of it or nothing, and nothing
//! stays beside it.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use stepwell_core::io::Disk;
use stepwell_manager::coordination::SingleProcess;
use stepwell_manager::singular::{PathTicket, save};
use stepwell_manager::{Checkpoint, Environment, Error, Exists, LeafSource, Options, Save, SaveRequest};

use crate::common::{self, read};
use crate::job::{Job, committed, expected, failure, model_of_two, options};

const PATH: &str = "/models/best";

fn to_path(rank: u32, seed: u64, exists: Exists, environment: &Environment) -> Result<Save, Error> {
    let request = SaveRequest { exists, ..SaveRequest::new(0, model_of_two(rank, seed)) };
    save(Path::new(PATH), request, &options(), environment)
}

fn restored(job: &Job) -> Vec<u8> {
    let checkpoint = Checkpoint::open(Path::new(PATH), &job.environment(SingleProcess)).unwrap();
    read(&checkpoint).remove(0).1
}

/// The names beside the checkpoint.
fn beside(job: &Job) -> Vec<String> {
    let parent = job.disk.open_dir(Path::new("/models")).unwrap();
    let names = parent.entries().unwrap().into_iter().map(|entry| entry.name);
    names.filter(|name| name != "best").collect()
}

#[test]
fn ranks_save_one_checkpoint_to_a_path() {
    let job = Job::new();
    job.run(2, 2, |rank, environment| {
        committed(&to_path(rank, 1, Exists::Error, &environment).unwrap());
        // The coordinator serves the next save too.
        let error = to_path(rank, 2, Exists::Error, &environment).unwrap_err();
        assert_eq!(error.kind(), "step_exists", "{error}");
        let skipped = to_path(rank, 2, Exists::Skip, &environment).unwrap();
        assert!(skipped.refusal().is_some());
        committed(&to_path(rank, 3, Exists::Replace, &environment).unwrap());
    });
    assert_eq!(restored(&job), expected(8, 4, 3));
    assert_eq!(beside(&job), Vec::<String>::new());
}

#[test]
fn a_rank_that_cannot_save_to_a_path_fails_all() {
    for (failing, at_plan) in [(0, true), (0, false), (1, true), (1, false)] {
        let job = Job::new();
        job.run(2, 2, |rank, environment| {
            let ticket = PathTicket::new(Path::new(PATH), Exists::Error, &options(), &environment);
            let ticket = ticket.unwrap();
            if rank == failing && !at_plan {
                ticket.cause().set("KeyboardInterrupt".to_owned()).unwrap();
                return drop(ticket);
            }
            let mut state = model_of_two(rank, 1);
            if rank == failing {
                state.leaves.clear();
            }
            let saved = ticket.save(SaveRequest::new(0, state));
            if rank == failing {
                assert!(saved.unwrap_err().to_string().contains("found 0"));
                return;
            }
            let error = saved.map_or_else(Arc::new, |save| failure(&save));
            let cause = if at_plan { "found 0" } else { "KeyboardInterrupt" };
            assert!(error.to_string().contains(cause), "{error}");
        });
        assert_eq!(beside(&job), Vec::<String>::new());
        job.run(2, 2, |rank, environment| {
            committed(&to_path(rank, 2, Exists::Error, &environment).unwrap());
        });
        assert_eq!(restored(&job), expected(8, 4, 2));
    }
}

#[test]
fn a_broken_capture_fails_the_save_of_all() {
    let job = Job::new();
    job.run(2, 2, |rank, environment| {
        let mut state = model_of_two(rank, 1);
        if let (LeafSource::Tensor { provider, .. }, 1) = (&mut state.leaves[0], rank) {
            *provider = Arc::new(common::Broken);
        }
        let saved = save(Path::new(PATH), SaveRequest::new(0, state), &options(), &environment);
        if rank == 0 {
            failure(&saved.unwrap());
        } else {
            saved.unwrap_err();
        }
    });
    assert_eq!(beside(&job), Vec::<String>::new());
}

#[test]
fn a_missing_rank_is_named_within_the_timeout() {
    let job = Job::new();
    job.run(2, 2, |rank, environment| {
        if rank == 1 {
            return;
        }
        let options = Options { stall_timeout: Duration::from_millis(200), ..options() };
        let request = SaveRequest::new(0, model_of_two(rank, 1));
        let error = save(Path::new(PATH), request, &options, &environment).unwrap_err();
        assert!(matches!(&error, Error::CoordinationTimeout { missing, .. } if missing == &[1]), "{error}");
    });
}

#[test]
fn ranks_with_other_options_are_refused() {
    let job = Job::new();
    job.run(2, 2, |rank, environment| {
        let exists = if rank == 0 { Exists::Error } else { Exists::Replace };
        let error = to_path(rank, 1, exists, &environment).unwrap_err();
        assert!(error.to_string().contains("different values of exists"), "{error}");
    });
}
