//! Several ranks save together: each byte once, all or nothing, the same answer on every rank. Ranks are threads here, over one simulated disk.

#![expect(clippy::unwrap_used, clippy::panic, reason = "tests end by them")]
#![expect(clippy::unnecessary_wraps, reason = "what a tree takes")]

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use common::{LONG, TestRng, read};
use stepwell_core::dtype::Dtype;
use stepwell_core::io::simulated::SimDisk;
use stepwell_core::leaf_path::Component;
use stepwell_core::provider::{Fill, StateProvider, Ticket};
use stepwell_core::region::Region;
use stepwell_core::staging::{Filling, Slot};
use stepwell_core::tree::{ContainerKind, Tree};
use stepwell_core::value::Value;
use stepwell_manager::coordination::SingleProcess;
use stepwell_manager::coordination::in_process::InProcess;
use stepwell_manager::environment::SystemClock;
use stepwell_manager::state::{Holders, Part};
use stepwell_manager::{
    Decision, Environment, Error, Exists, LeafSource, Manager, Options, Outcome, Result, Retention,
    SavePolicy, SaveRequest, StateSource,
};

/// Several ranks, and what they share.
struct Job {
    disk: SimDisk,
    rng: Arc<TestRng>,
}

impl Job {
    fn new() -> Self {
        Self { disk: SimDisk::new(), rng: Arc::default() }
    }

    fn environment(
        &self,
        coordinator: impl stepwell_manager::coordination::Coordinator + 'static,
    ) -> Environment {
        Environment {
            disk: Arc::new(self.disk.clone()),
            clock: Arc::new(SystemClock::default()),
            rng: self.rng.clone(),
            coordinator: Arc::new(coordinator),
            staging: None,
        }
    }

    /// Runs one function per rank, each on a thread of its own, and gives what they return.
    fn run<T: Send>(&self, ranks: u32, per_node: u32, rank: impl Fn(u32, Environment) -> T + Sync) -> Vec<T> {
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0_u32..)
                .zip(InProcess::ranks(ranks, per_node))
                .map(|(number, coordinator)| {
                    let environment = self.environment(coordinator);
                    let rank = &rank;
                    scope.spawn(move || rank(number, environment))
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// What one process finds: the bytes of each leaf, by path.
    fn restored(&self, step: u64) -> Vec<(String, Vec<u8>)> {
        let options = Options { read_only: true, ..options() };
        let manager =
            Manager::open(Path::new(common::ROOT), options, self.environment(SingleProcess)).unwrap();
        read(&manager.checkpoint(Some(step)).unwrap())
    }

    fn data_bytes(&self) -> Vec<u64> {
        let image = self.disk.image();
        let mut lengths = Vec::new();
        let mut open = vec![common::ROOT.to_owned()];
        while let Some(path) = open.pop() {
            let Some(node) = image.get(&path) else { continue };
            match node.entries() {
                Some(entries) => open.extend(entries.iter().map(|(name, _)| format!("{path}/{name}"))),
                None if Path::new(&path).extension().is_some_and(|extension| extension == "data") => {
                    lengths.push(node.bytes().map_or(0, |bytes| bytes.len() as u64));
                }
                None => {}
            }
        }
        lengths
    }
}

fn options() -> Options {
    Options { stall_timeout: Duration::from_secs(20), staging_bytes: Some(32 << 20), ..Options::default() }
}

fn open(environment: Environment, options: Options) -> Result<Manager> {
    Manager::open(Path::new(common::ROOT), options, environment)
}

/// Elements of a whole tensor, told by their place: whoever asks for a region gets those.
struct Places {
    columns: u64,
    seed: u8,
}

impl Places {
    fn at(&self, row: u64, column: u64) -> u8 {
        ((row * self.columns + column) as u8).wrapping_mul(31).wrapping_add(self.seed)
    }
}

impl StateProvider for Places {
    fn capture(&self, fills: &[Fill<'_>], slot: &mut Slot<Filling>) -> stepwell_core::Result<Ticket> {
        for fill in fills {
            let width = fill.local.extent[1];
            for (n, byte) in (fill.from..).zip(slot.part(fill.at, fill.len)?) {
                *byte = self.at(fill.local.offset[0] + n / width, fill.local.offset[1] + n % width);
            }
        }
        Ok(Ticket::Done)
    }
}

fn key(name: &str) -> Option<Component> {
    Some(Component::Key(name.into()))
}

/// `rows` × `columns` bytes; this rank holds these parts.
fn tensor(rows: u64, columns: u64, seed: u8, parts: Vec<Part>) -> LeafSource {
    let provider = Arc::new(Places { columns, seed });
    LeafSource::Tensor { dtype: Dtype::Uint8, shape: vec![rows, columns], parts, provider }
}

fn part(offset: [u64; 2], extent: [u64; 2], holders: Holders) -> Part {
    let region = Region { offset: offset.as_slice().into(), extent: extent.as_slice().into() };
    Part { region, holders }
}

fn expected(rows: u64, columns: u64, seed: u8) -> Vec<u8> {
    let places = Places { columns, seed };
    (0..rows)
        .flat_map(|row| (0..columns).map(move |column| (row, column)))
        .map(|(r, c)| places.at(r, c))
        .collect()
}

const ROWS: u64 = 64;
const COLUMNS: u64 = 48;

/// A model over 4 ranks: rows cut over all of them, columns cut over pairs and held alike by two ranks each, and what everybody has.
fn model(rank: u32, step: u64) -> StateSource {
    let seed = step as u8;
    let mut tree = Tree::new();
    let root = tree.push_container(None, None, ContainerKind::Dict);
    let params = tree.push_container(Some(root), key("params"), ContainerKind::Dict);
    for name in ["rows", "columns", "norm"] {
        tree.push_leaf(Some(params), key(name));
    }
    // A layer that only the second half of the ranks has.
    if rank >= 2 {
        tree.push_leaf(Some(params), key("head"));
    }
    tree.push_leaf(Some(root), key("step"));
    let quarter = ROWS / 4;
    let rows = part([quarter * u64::from(rank), 0], [quarter, COLUMNS], Holders::This);
    let pair: Arc<[u32]> = if rank.is_multiple_of(2) { [0, 2].into() } else { [1, 3].into() };
    let columns = part([0, COLUMNS / 2 * u64::from(rank % 2)], [ROWS, COLUMNS / 2], Holders::Ranks(pair));
    let everyone = |rows| vec![part([0, 0], [rows, COLUMNS], Holders::Everyone)];
    let mut leaves = vec![
        tensor(ROWS, COLUMNS, seed, vec![rows]),
        tensor(ROWS, COLUMNS, seed ^ 1, vec![columns]),
        tensor(8, COLUMNS, seed ^ 2, everyone(8)),
    ];
    if rank >= 2 {
        leaves.push(tensor(16, COLUMNS, seed ^ 3, everyone(16)));
    }
    leaves.push(LeafSource::Object(Value::Int(step as i64)));
    StateSource { tree, leaves }
}

fn assert_model(job: &Job, step: u64) {
    let seed = step as u8;
    let found = job.restored(step);
    let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["params/rows", "params/columns", "params/norm", "params/head", "step"]);
    assert_eq!(found[0].1, expected(ROWS, COLUMNS, seed));
    assert_eq!(found[1].1, expected(ROWS, COLUMNS, seed ^ 1));
    assert_eq!(found[2].1, expected(8, COLUMNS, seed ^ 2));
    assert_eq!(found[3].1, expected(16, COLUMNS, seed ^ 3));
}

fn committed(save: &stepwell_manager::Save) {
    match save.wait(Some(LONG)).unwrap() {
        Some(Outcome::Committed) => {}
        other => panic!("step {}: {other:?} {:?}", save.step(), save.refusal()),
    }
}

fn failure(save: &stepwell_manager::Save) -> Arc<Error> {
    match save.wait(Some(LONG)).unwrap() {
        Some(Outcome::NotCommitted(error)) => error,
        other => panic!("step {}: {other:?}", save.step()),
    }
}

#[test]
fn what_four_ranks_save_together_one_process_reads_as_a_whole() {
    let job = Job::new();
    job.run(4, 2, |rank, environment| {
        let manager = open(environment, options()).unwrap();
        assert_eq!(manager.latest_step().unwrap(), None);
        for step in [10, 20, 30] {
            committed(&manager.save(SaveRequest::new(step, model(rank, step))).unwrap());
        }
        assert_eq!(manager.latest_step().unwrap(), Some(30));
        assert_eq!(manager.next_step().unwrap(), 31);
        manager.close(None).unwrap();
    });
    for step in [10, 20, 30] {
        assert_model(&job, step);
    }
}

#[test]
fn every_byte_is_written_once() {
    let job = Job::new();
    job.run(4, 4, |rank, environment| {
        let manager = open(environment, options()).unwrap();
        committed(&manager.save(SaveRequest::new(1, model(rank, 1))).unwrap());
        manager.close(None).unwrap();
    });
    let stored: u64 = 2 * ROWS * COLUMNS + 24 * COLUMNS;
    let most = stored + job.data_bytes().len() as u64 * 5 * 4096;
    assert!(job.data_bytes().iter().sum::<u64>() < most, "{:?}", job.data_bytes());
}

#[test]
fn nothing_is_left_of_what_the_ranks_have_said() {
    let job = Job::new();
    let ranks: Vec<Arc<InProcess>> = InProcess::ranks(3, 1).into_iter().map(Arc::new).collect();
    std::thread::scope(|scope| {
        for coordinator in &ranks {
            let environment =
                Environment { coordinator: coordinator.clone(), ..job.environment(SingleProcess) };
            scope.spawn(move || {
                let manager = open(environment, options()).unwrap();
                for step in 0..5 {
                    let mut state = model(3, step);
                    // All of it on all ranks.
                    state.leaves.iter_mut().for_each(|leaf| {
                        if let LeafSource::Tensor { shape, parts, .. } = leaf {
                            *parts = vec![part([0, 0], [shape[0], shape[1]], Holders::Everyone)];
                        }
                    });
                    let _ = manager.save(SaveRequest::new(step, state)).unwrap();
                    for _ in 0..100 {
                        manager.latest_step().unwrap();
                    }
                }
                manager.close(None).unwrap();
            });
        }
    });
    assert_eq!(ranks[0].left(), Vec::<String>::new());
}

#[test]
fn a_rank_whose_save_raises_fails_the_save_of_all_and_the_next_one_works() {
    let job = Job::new();
    job.run(3, 3, |rank, environment| {
        let manager = open(environment, options()).unwrap();
        let simple = |step: u64| {
            let mut tree = Tree::new();
            tree.push_leaf(None, None);
            StateSource {
                tree,
                leaves: vec![tensor(4, 4, step as u8, vec![part([0, 0], [4, 4], Holders::Everyone)])],
            }
        };
        committed(&manager.save(SaveRequest::new(1, simple(1))).unwrap());
        let mut broken = simple(2);
        if rank == 1 {
            broken.leaves.clear();
        }
        let saved = manager.save(SaveRequest::new(2, broken));
        if rank == 1 {
            assert!(saved.unwrap_err().to_string().contains("0 sources"));
        } else {
            let error = failure(&saved.unwrap());
            assert!(
                matches!(&*error, Error::RankFailed { rank: 1, cause } if cause.contains("0 sources")),
                "{error}"
            );
        }
        committed(&manager.save(SaveRequest::new(3, simple(3))).unwrap());
        manager.close(None).unwrap();
    });
    assert_eq!(job.restored(3)[0].1, expected(4, 4, 3));
}

#[test]
fn a_failure_that_one_rank_has_not_seen_is_raised_by_the_same_call_on_all() {
    let job = Job::new();
    let raised = job.run(2, 2, |rank, environment| {
        let manager = open(environment, options()).unwrap();
        let simple = |step: u64| {
            let mut tree = Tree::new();
            tree.push_leaf(None, None);
            let mut leaf = tensor(4, 4, step as u8, vec![part([0, 0], [4, 4], Holders::Everyone)]);
            if let (LeafSource::Tensor { provider, .. }, 1, 2) = (&mut leaf, rank, step) {
                *provider = Arc::new(common::Broken);
            }
            StateSource { tree, leaves: vec![leaf] }
        };
        let mut raised = Vec::new();
        for step in 1..12 {
            match manager.save(SaveRequest::new(step, simple(step))) {
                // Rank 0 looks at everything, rank 1 at nothing.
                Ok(save) if rank == 0 => drop(save.wait(Some(LONG))),
                Ok(_) => {}
                Err(error) => raised.push((step, error.kind())),
            }
        }
        let _ = manager.close(None);
        raised
    });
    // Its own provider breaks on rank 1 within the call; the others hear of it later, all by the same call.
    assert_eq!(raised[1].first().map(|(step, _)| *step), Some(2), "{raised:?}");
    let later: Vec<u64> = raised[0].iter().map(|(step, _)| *step).collect();
    let others: Vec<u64> = raised[1].iter().skip(1).map(|(step, _)| *step).collect();
    assert_eq!(later, others, "{raised:?}");
}

fn whole(step: u64) -> StateSource {
    one_leaf(tensor(4, 4, step as u8, vec![part([0, 0], [4, 4], Holders::Everyone)]))
}

/// What a rank does that raises in a call of `save` which all have begun.
fn breaks_off(manager: &Manager, step: u64) {
    let decision = manager.decide(step, false, Exists::Error, &BTreeMap::new()).unwrap();
    assert!(matches!(decision, Decision::Save));
    // Told twice, once where it broke and once where that was caught: it counts once.
    manager.abstain(step, "KeyboardInterrupt");
    manager.abstain(step, "KeyboardInterrupt");
}

#[test]
fn a_rank_that_breaks_off_a_save_ends_it_for_all_at_once_and_the_next_one_works() {
    for (broken, first) in [(0, 1), (1, 1), (0, 2), (1, 2)] {
        let job = Job::new();
        // It makes no other call until they have.
        let heard = &Barrier::new(3);
        job.run(3, 3, |rank, environment| {
            let manager = open(environment, options()).unwrap();
            for step in 1..=4 {
                // In the first save the ranks wait for what each has.
                if step != first {
                    committed(&manager.save(SaveRequest::new(step, whole(step))).unwrap());
                    if rank == broken {
                        // Too late: it has taken part.
                        manager.abstain(step, "KeyboardInterrupt");
                    }
                } else if rank == broken {
                    breaks_off(&manager, step);
                    heard.wait();
                } else {
                    let error = match manager.save(SaveRequest::new(step, whole(step))) {
                        Ok(save) => failure(&save).to_string(),
                        Err(error) => error.to_string(),
                    };
                    heard.wait();
                    let named = format!("rank {broken} failed: KeyboardInterrupt");
                    assert!(error.contains(&named), "{error}");
                }
            }
            // Where nothing was begun, nobody is owed anything.
            manager.abstain(9, "a step that the policy refuses");
            committed(&manager.save(SaveRequest::new(10, whole(10))).unwrap());
            manager.close(None).unwrap();
        });
    }
}

#[test]
fn a_call_of_save_that_is_left_before_its_answer_takes_no_part_once_that_is_there() {
    let job = Job::new();
    let left = &Barrier::new(2);
    job.run(2, 2, |rank, environment| {
        // Only the leader knows the time.
        let save_policy = SavePolicy::EverySeconds { seconds: 0.0 };
        let manager = open(environment, Options { save_policy, ..options() }).unwrap();
        committed(&manager.save(SaveRequest::new(1, whole(1))).unwrap());
        if rank == 0 {
            left.wait();
            let error = failure(&manager.save(SaveRequest::new(2, whole(2))).unwrap());
            assert!(matches!(&*error, Error::RankFailed { rank: 1, cause } if cause == "SIGINT"), "{error}");
        } else {
            std::thread::scope(|scope| {
                let asking = scope.spawn(|| manager.decide(2, false, Exists::Error, &BTreeMap::new()));
                for _ in 0..100 {
                    // At one of them the call is under way.
                    manager.abstain(2, "SIGINT");
                    std::thread::sleep(Duration::from_millis(10));
                }
                left.wait();
                assert!(matches!(asking.join().unwrap().unwrap(), Decision::Save));
            });
        }
        committed(&manager.save(SaveRequest::new(3, whole(3))).unwrap());
        manager.close(None).unwrap();
    });
}

#[test]
fn a_failure_of_a_rank_that_took_no_part_is_raised_by_the_same_call_on_all_and_once() {
    let job = Job::new();
    let over = &Barrier::new(2);
    let raised = job.run(2, 2, |rank, environment| {
        let manager = open(environment, options()).unwrap();
        committed(&manager.save(SaveRequest::new(1, whole(1))).unwrap());
        if rank == 0 {
            breaks_off(&manager, 2);
        } else {
            let save = manager.save(SaveRequest::new(2, whole(2))).unwrap();
            while !save.is_done() {
                std::thread::yield_now(); // and nobody looks how it has ended
            }
        }
        over.wait();
        let raised: Vec<u64> =
            (3..9).filter(|&step| manager.save(SaveRequest::new(step, whole(step))).is_err()).collect();
        manager.close(None).unwrap();
        raised
    });
    assert_eq!(raised[0].len(), 1, "{raised:?}");
    assert_eq!(raised[0], raised[1]);
}

#[test]
fn who_waits_for_a_save_is_told_which_rank_was_silent() {
    let job = Job::new();
    let given_up = &Barrier::new(4);
    job.run(4, 2, |rank, environment| {
        let manager =
            open(environment, Options { stall_timeout: Duration::from_secs(1), ..options() }).unwrap();
        committed(&manager.save(SaveRequest::new(1, whole(1))).unwrap());
        // Without a deadline of its own it has the patience of the save.
        let save = (rank != 0).then(|| manager.save(SaveRequest::new(2, whole(2))).unwrap());
        let ended = save.map(|save| save.wait(None));
        given_up.wait();
        if let Some(ended) = ended {
            let error = ended.unwrap().unwrap().error().cloned().unwrap();
            assert_eq!(error.kind(), "coordination_timeout", "{error}");
        }
    });
}

#[test]
fn a_rank_that_was_missed_is_not_waited_for_again_at_the_close() {
    let job = Job::new();
    job.run(2, 1, |rank, environment| {
        let manager =
            open(environment, Options { stall_timeout: Duration::from_secs(1), ..options() }).unwrap();
        committed(&manager.save(SaveRequest::new(1, whole(1))).unwrap());
        if rank == 1 {
            // As one that is killed: it does not say that it goes.
            std::mem::forget(manager);
            return;
        }
        let error = failure(&manager.save(SaveRequest::new(2, whole(2))).unwrap());
        assert!(matches!(&*error, Error::CoordinationTimeout { missing, .. } if missing == &[1]), "{error}");
        let error = manager.close(Some(LONG)).unwrap_err();
        let Error::CoordinationTimeout { missing, seconds, .. } = error else { panic!("{error}") };
        assert_eq!(missing, [1]);
        assert!(seconds < LONG.as_secs_f64(), "{seconds}");
        manager.close(Some(LONG)).unwrap();
    });
}

#[test]
fn layouts_that_do_not_fit_together_are_refused_with_leaf_ranks_and_regions() {
    type Leaf = fn(u32) -> LeafSource;
    let hole: Leaf = |rank| tensor(8, 4, 0, vec![part([2 * u64::from(rank), 0], [2, 4], Holders::This)]);
    let overlap: Leaf = |rank| tensor(8, 4, 0, vec![part([2 * u64::from(rank), 0], [5, 4], Holders::This)]);
    let twice: Leaf = |_| tensor(8, 4, 0, vec![part([0, 0], [8, 4], Holders::This)]);
    let shape: Leaf = |rank| {
        let rows = 4 + 4 * u64::from(rank);
        tensor(rows, 4, 0, vec![part([4 * u64::from(rank), 0], [4, 4], Holders::This)])
    };
    let sort: Leaf = |rank| {
        if rank == 0 {
            LeafSource::Object(Value::Int(1))
        } else {
            tensor(1, 1, 0, vec![part([0, 0], [1, 1], Holders::This)])
        }
    };
    for (leaf, words) in [
        (hole, ["no rank holds [4:8, 0:4]", "ranks [0, 1]"]),
        (overlap, ["ranks 0 and 1 both hold [2:5, 0:4]", "[8, 4]"]),
        (twice, ["ranks 0 and 1 both hold [0:8, 0:4]", "replica="]),
        (shape, ["shape [4, 4]", "shape [8, 4]"]),
        (sort, ["ranks 0 and 1 disagree", "an object"]),
    ] {
        let job = Job::new();
        job.run(2, 2, |rank, environment| {
            let manager = open(environment, options()).unwrap();
            let mut tree = Tree::new();
            let root = tree.push_container(None, None, ContainerKind::Dict);
            tree.push_leaf(Some(root), key("w"));
            let save =
                manager.save(SaveRequest::new(1, StateSource { tree, leaves: vec![leaf(rank)] })).unwrap();
            let error = failure(&save);
            assert_eq!(error.kind(), "mismatch", "{error}");
            let text = error.to_string();
            assert!(text.contains("`w`") && words.iter().all(|word| text.contains(word)), "{text}");
            assert_eq!(manager.latest_step().unwrap(), None);
            manager.close(None).unwrap();
        });
        let names: Vec<String> = job
            .disk
            .image()
            .get(common::ROOT)
            .unwrap()
            .entries()
            .unwrap()
            .iter()
            .map(|(name, _)| name.to_string())
            .collect();
        assert_eq!(names, [".stepwell"], "nothing is left");
    }
}

#[test]
fn what_differs_between_nodes_is_found_and_so_is_what_does_on_one() {
    for (odd, named) in [
        (vec![1], "rank 0 has other values than rank 1"),
        (vec![3], "rank 2 has other values than rank 3"),
        (vec![2, 3], "rank 0 has other values than rank 2"),
    ] {
        let job = Job::new();
        job.run(4, 2, |rank, environment| {
            let manager = open(environment, options()).unwrap();
            let state = |value: i64| {
                let mut tree = Tree::new();
                let root = tree.push_container(None, None, ContainerKind::Dict);
                tree.push_leaf(Some(root), key("norm"));
                StateSource { tree, leaves: vec![LeafSource::Object(Value::Int(value))] }
            };
            committed(&manager.save(SaveRequest::new(1, state(1))).unwrap());
            let error = failure(
                &manager.save(SaveRequest::new(2, state(if odd.contains(&rank) { 9 } else { 2 }))).unwrap(),
            );
            let text = error.to_string();
            assert_eq!(error.kind(), "mismatch", "{text}");
            assert!(text.contains("`norm`") && text.contains(named), "{text}");
            committed(&manager.save(SaveRequest::new(3, state(3))).unwrap());
            manager.close(None).unwrap();
        });
    }
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let job = Job::new();
    let mut ranks = InProcess::ranks(3, 1);
    let present = [ranks.remove(0), ranks.remove(0)];
    std::thread::scope(|scope| {
        for coordinator in present {
            let environment = job.environment(coordinator);
            scope.spawn(move || {
                let options = Options { stall_timeout: Duration::from_millis(300), ..options() };
                let Err(error) = open(environment, options) else { panic!("rank 2 is not there") };
                assert_eq!(error.kind(), "coordination_timeout", "{error}");
                assert!(error.to_string().contains("[2]") || error.to_string().contains("[0]"), "{error}");
            });
        }
    });
}

#[test]
fn ranks_that_do_not_agree_on_an_option_are_told_which() {
    let job = Job::new();
    job.run(2, 1, |rank, environment| {
        let options = Options { max_pending: 1 + rank as usize, ..options() };
        let Err(error) = open(environment, options) else { panic!("they do not agree") };
        assert!(error.to_string().contains("max_pending: 1 on rank 0, 2 on rank 1"), "{error}");
        assert_eq!(error.kind(), "invalid");
    });
}

#[test]
fn a_rank_that_votes_not_in_time_is_named_on_all_and_the_next_save_works() {
    let job = Job::new();
    let given_up = &Barrier::new(2);
    job.run(2, 1, |rank, environment| {
        let manager =
            open(environment, Options { stall_timeout: Duration::from_secs(2), ..options() }).unwrap();
        committed(&manager.save(SaveRequest::new(1, model_of_two(rank, 1))).unwrap());
        if rank == 1 {
            // It hangs in its training until the leader has given up, which tells it so.
            given_up.wait();
        }
        let error = failure(&manager.save(SaveRequest::new(2, model_of_two(rank, 2))).unwrap());
        assert_eq!(error.kind(), "coordination_timeout", "{error}");
        assert!(error.to_string().contains("[1]"), "{error}");
        if rank == 0 {
            given_up.wait();
        }
        committed(&manager.save(SaveRequest::new(3, model_of_two(rank, 3))).unwrap());
        manager.close(None).unwrap();
    });
    let names: Vec<String> = job
        .disk
        .image()
        .get(common::ROOT)
        .unwrap()
        .entries()
        .unwrap()
        .iter()
        .map(|(name, _)| name.to_string())
        .collect();
    assert_eq!(names, [".stepwell", "step_00000001", "step_00000003"]);
}

fn model_of_two(rank: u32, step: u64) -> StateSource {
    let mut tree = Tree::new();
    let root = tree.push_container(None, None, ContainerKind::Dict);
    tree.push_leaf(Some(root), key("w"));
    let half = part([4 * u64::from(rank), 0], [4, 4], Holders::This);
    StateSource { tree, leaves: vec![tensor(8, 4, step as u8, vec![half])] }
}

/// `{"x": {"w": …}, "step": …}`, without the first where a rank has none.
fn state_of_w(w: Option<LeafSource>) -> StateSource {
    let mut tree = Tree::new();
    let root = tree.push_container(None, None, ContainerKind::Dict);
    let mut leaves = Vec::new();
    if let Some(w) = w {
        let x = tree.push_container(Some(root), key("x"), ContainerKind::Dict);
        tree.push_leaf(Some(x), key("w"));
        leaves.push(w);
    }
    tree.push_leaf(Some(root), key("step"));
    leaves.push(LeafSource::Object(Value::Int(1)));
    StateSource { tree, leaves }
}

#[test]
fn what_few_ranks_or_none_write_of_an_item_is_checked_like_the_rest() {
    type Leaf = fn(u32) -> Option<LeafSource>;
    // Only one rank has the item, be it the leader.
    let first: Leaf = |rank| (rank == 0).then(|| tensor(8, 4, 0, vec![part([0, 0], [4, 4], Holders::This)]));
    // It holds nothing of it.
    let nothing: Leaf = |rank| (rank == 1).then(|| tensor(8, 4, 0, vec![]));
    // It says that another one holds the same, who would write it.
    let second_of_two: Leaf = |rank| {
        (rank == 1)
            .then(|| tensor(4, 4, 0, vec![part([0, 0], [4, 4], Holders::Replicas { index: 1, count: 2 })]))
    };
    let mut cases: Vec<(Leaf, [&str; 2])> = vec![
        (first, ["no rank holds [4:8, 0:4]", "ranks [0]"]),
        (nothing, ["no rank holds [0:8, 0:4]", "[8, 4]"]),
        (second_of_two, ["no rank holds [0:4, 0:4]", "[4, 4]"]),
    ];
    // Both hold it, and one writes it; the other one's is another.
    let shape: Leaf = |rank| {
        let pair = Holders::Ranks([0, 1].into());
        Some(tensor(4 + u64::from(rank), 4, 0, vec![part([0, 0], [4, 4], pair)]))
    };
    let dtype: Leaf = |rank| {
        let mut leaf = tensor(4, 4, 0, vec![part([0, 0], [4, 4], Holders::Ranks([0, 1].into()))]);
        if let (LeafSource::Tensor { dtype, .. }, 1) = (&mut leaf, rank) {
            *dtype = Dtype::Int8;
        }
        Some(leaf)
    };
    cases.push((shape, ["shape [4, 4]", "shape [5, 4]"]));
    cases.push((dtype, ["uint8", "int8"]));
    for (leaf, words) in cases {
        let job = Job::new();
        job.run(2, 2, |rank, environment| {
            let manager = open(environment, options()).unwrap();
            let error = failure(&manager.save(SaveRequest::new(1, state_of_w(leaf(rank)))).unwrap());
            let text = error.to_string();
            assert_eq!(error.kind(), "mismatch", "{text}");
            assert!(text.contains("`x/w`") && words.iter().all(|word| text.contains(word)), "{text}");
            assert_eq!(manager.latest_step().unwrap(), None);
            committed(&manager.save(SaveRequest::new(2, state_of_w(None))).unwrap());
            manager.close(None).unwrap();
        });
        assert_eq!(job.restored(2).len(), 1);
    }
}

#[test]
fn the_tensor_that_ranks_disagree_on_is_named_and_none_that_they_share_out_differently_for_it() {
    let job = Job::new();
    job.run(2, 2, |rank, environment| {
        let manager = open(environment, options()).unwrap();
        let mut tree = Tree::new();
        let root = tree.push_container(None, None, ContainerKind::Dict);
        let mut leaves = Vec::new();
        for (item, rows) in [("first", 200), ("second", if rank == 0 { 100 } else { 120 })] {
            let inside = tree.push_container(Some(root), key(item), ContainerKind::Dict);
            tree.push_leaf(Some(inside), key("w"));
            let all = part([0, 0], [rows, 300], Holders::Ranks([0, 1].into()));
            leaves.push(tensor(rows, 300, 0, vec![all]));
        }
        let error = failure(&manager.save(SaveRequest::new(1, StateSource { tree, leaves })).unwrap());
        let text = error.to_string();
        assert!(text.contains("`second/w`") && text.contains("disagree"), "{text}");
        manager.close(None).unwrap();
    });
}

#[test]
fn ranks_whose_states_have_other_entries_at_the_top_save_one_step() {
    let job = Job::new();
    job.run(3, 3, |rank, environment| {
        let manager = open(environment, options()).unwrap();
        let mut tree = Tree::new();
        let root = tree.push_container(None, None, ContainerKind::Dict);
        let entries = [&["step", "encoder"][..], &["decoder", "step"], &["lr", "head", "step"]];
        let mut leaves = Vec::new();
        for &entry in entries[rank as usize] {
            if let "step" | "lr" = entry {
                tree.push_leaf(Some(root), key(entry));
            } else {
                let inside = tree.push_container(Some(root), key(entry), ContainerKind::Dict);
                tree.push_leaf(Some(inside), key("w"));
            }
            leaves.push(tensor(4, 4, entry.len() as u8, vec![part([0, 0], [4, 4], Holders::Everyone)]));
        }
        committed(&manager.save(SaveRequest::new(1, StateSource { tree, leaves })).unwrap());
        manager.close(None).unwrap();
    });
    let mut found = job.restored(1);
    found.sort();
    let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["decoder/w", "encoder/w", "head/w", "lr", "step"]);
    for (name, bytes) in &found {
        let entry = name.split('/').next().unwrap();
        assert_eq!(*bytes, expected(4, 4, entry.len() as u8), "{name}");
    }
}

#[test]
fn a_tie_between_two_items_is_stored_whole_in_both_whoever_writes_what() {
    let job = Job::new();
    job.run(2, 2, |rank, environment| {
        let manager = open(environment, options()).unwrap();
        let state = || {
            let mut tree = Tree::new();
            let root = tree.push_container(None, None, ContainerKind::Dict);
            for item in ["params", "head"] {
                let inside = tree.push_container(Some(root), key(item), ContainerKind::Dict);
                tree.push_leaf(Some(inside), key("cut"));
                tree.push_leaf(Some(inside), key("whole"));
            }
            let half = part([4 * u64::from(rank), 0], [4, 4], Holders::This);
            let cut = tensor(8, 4, 1, vec![half]);
            let whole = tensor(8, 4, 2, vec![part([0, 0], [8, 4], Holders::Everyone)]);
            StateSource { tree, leaves: vec![cut, whole, LeafSource::Alias(0), LeafSource::Alias(1)] }
        };
        committed(&manager.save(SaveRequest::new(1, model_of_two(rank, 1))).unwrap());
        // Its leaves are new: both ranks write what is simply there.
        committed(&manager.save(SaveRequest::new(2, state())).unwrap());
        for step in 3..8 {
            committed(&manager.save(SaveRequest::new(step, state())).unwrap());
        }
        manager.close(None).unwrap();
    });
    for step in 2..8 {
        let bytes: Vec<Vec<u8>> = job.restored(step).into_iter().map(|(_, bytes)| bytes).collect();
        let (cut, whole) = (expected(8, 4, 1), expected(8, 4, 2));
        assert_eq!(bytes, [cut.clone(), whole.clone(), cut, whole]);
    }
}

#[test]
fn leaves_that_come_and_go_are_saved_once_and_then_shared_anew() {
    let job = Job::new();
    job.run(3, 3, |_, environment| {
        let manager = open(environment, options()).unwrap();
        for step in 0..10_u64 {
            let mut tree = Tree::new();
            let root = tree.push_container(None, None, ContainerKind::Dict);
            let params = tree.push_container(Some(root), key("params"), ContainerKind::Dict);
            let mut leaves = Vec::new();
            for number in 0..=(step / 3) {
                tree.push_leaf(Some(params), key(&format!("w{number}")));
                leaves.push(tensor(8, 4, step as u8, vec![part([0, 0], [8, 4], Holders::Everyone)]));
            }
            committed(&manager.save(SaveRequest::new(step, StateSource { tree, leaves })).unwrap());
        }
        manager.close(None).unwrap();
    });
    for step in 0..10 {
        let found = job.restored(step);
        assert_eq!(found.len() as u64, step / 3 + 1);
        assert!(found.iter().all(|(_, bytes)| *bytes == expected(8, 4, step as u8)));
    }
}

/// A leaf cut into halves over pairs of ranks (0 and 2, 1 and 3), which know nothing of each other: each says only that whoever has its box has the same.
fn boxes(rank: u32, seed: u8) -> LeafSource {
    tensor(8, 4, seed, vec![part([4 * u64::from(rank % 2), 0], [4, 4], Holders::Everyone)])
}

fn one_leaf(leaf: LeafSource) -> StateSource {
    let mut tree = Tree::new();
    let root = tree.push_container(None, None, ContainerKind::Dict);
    tree.push_leaf(Some(root), key("w"));
    StateSource { tree, leaves: vec![leaf] }
}

#[test]
fn a_box_that_is_simply_there_on_several_ranks_is_written_once() {
    let job = Job::new();
    job.run(4, 2, |rank, environment| {
        let manager = open(environment, options()).unwrap();
        for step in 1..=3 {
            committed(&manager.save(SaveRequest::new(step, one_leaf(boxes(rank, step as u8)))).unwrap());
        }
        manager.close(None).unwrap();
    });
    for step in 1..=3 {
        assert_eq!(job.restored(step)[0].1, expected(8, 4, step as u8));
    }
}

#[test]
fn boxes_that_nobody_has_heard_of_are_taken_once() {
    let job = Job::new();
    job.run(4, 2, |rank, environment| {
        let manager = open(environment, options()).unwrap();
        for step in 0..6 {
            let mut state = one_leaf(boxes(rank, step as u8));
            if step >= 2 {
                // As the slots of an optimizer, which come with its first step.
                state.tree.push_leaf(Some(0), key("slot"));
                state.leaves.push(boxes(rank, step as u8 + 100));
            }
            committed(&manager.save(SaveRequest::new(step, state)).unwrap());
        }
        manager.close(None).unwrap();
    });
    for step in 2..6 {
        assert_eq!(job.restored(step)[1].1, expected(8, 4, step as u8 + 100));
    }
}

#[test]
fn a_leaf_that_some_ranks_had_before_others_is_taken_once() {
    for first in 0..3 {
        let job = Job::new();
        job.run(3, 3, |rank, environment| {
            let manager = open(environment, options()).unwrap();
            for step in 0..6 {
                let mut state = one_leaf(tensor(8, 4, 7, vec![part([0, 0], [8, 4], Holders::Everyone)]));
                if step >= 2 || rank == first {
                    state.tree.push_leaf(Some(0), key("late"));
                    state.leaves.push(tensor(8, 4, 9, vec![part([0, 0], [8, 4], Holders::Everyone)]));
                }
                committed(&manager.save(SaveRequest::new(step, state)).unwrap());
            }
            manager.close(None).unwrap();
        });
        for step in 0..6 {
            assert_eq!(job.restored(step)[1].1, expected(8, 4, 9));
        }
    }
}

#[test]
fn retention_and_changes_are_the_leaders_and_every_rank_sees_them() {
    let job = Job::new();
    job.run(2, 2, |rank, environment| {
        let retention = Retention::keep_latest(2);
        let manager = open(environment, Options { retention, ..options() }).unwrap();
        for step in 1..=4 {
            committed(&manager.save(SaveRequest::new(step, model_of_two(rank, step))).unwrap());
        }
        assert_eq!(manager.latest_step().unwrap(), Some(4));
        let (_, moved) = manager.rewind(3, None).unwrap();
        assert_eq!(moved, [4]);
        assert_eq!(manager.latest_step().unwrap(), Some(3));
        let Err(error) = manager.save(SaveRequest::new(2, model_of_two(rank, 2))) else {
            panic!("it is below")
        };
        assert_eq!(error.kind(), "step_order", "{error}");
        committed(&manager.save(SaveRequest::new(4, model_of_two(rank, 4))).unwrap());
        manager.delete(4).unwrap();
        assert_eq!(manager.choose(None).unwrap(), 3);
        assert_eq!(manager.choose(Some(9)).unwrap_err().kind(), "step_not_found");
        manager.close(None).unwrap();
    });
}

#[test]
fn values_that_should_be_the_same_and_are_not_refuse_the_commit_by_leaf_and_ranks() {
    type Leaves = fn(u32) -> LeafSource;
    let large = |seed: u8| LeafSource::whole(Dtype::Uint8, vec![300_000], Arc::new(Filled(seed)));
    let object: Leaves = |rank| LeafSource::Object(Value::Int(i64::from(rank / 2)));
    // Ranks 0 and 2 have the one half, rank 1 the other.
    let half: Leaves = |rank| LeafSource::Tensor {
        dtype: Dtype::Uint8,
        shape: vec![8, 4],
        parts: vec![part([4 * u64::from(rank % 2), 0], [4, 4], Holders::Everyone)],
        provider: Arc::new(Filled((rank / 2) as u8)),
    };
    for (number, leaf) in [(0, None), (1, Some(object)), (2, Some(half))] {
        let job = Job::new();
        job.run(3, 3, |rank, environment| {
            let manager = open(environment, options()).unwrap();
            let state = |differs: bool| {
                let mut tree = Tree::new();
                let root = tree.push_container(None, None, ContainerKind::Dict);
                tree.push_leaf(Some(root), key("w"));
                let leaf = match leaf {
                    Some(leaf) => leaf(if differs { rank } else { rank % 2 }),
                    None => large(if differs { (rank / 2) as u8 } else { 0 }),
                };
                StateSource { tree, leaves: vec![leaf] }
            };
            committed(&manager.save(SaveRequest::new(1, state(false))).unwrap());
            let error = failure(&manager.save(SaveRequest::new(2, state(true))).unwrap());
            assert_eq!(error.kind(), "mismatch", "{number}: {error}");
            assert!(error.to_string().contains("`w`") && error.to_string().contains("rank 2"), "{error}");
            committed(&manager.save(SaveRequest::new(3, state(false))).unwrap());
            manager.close(None).unwrap();
        });
    }
}

#[test]
fn what_may_drift_is_stored_as_the_first_rank_has_it() {
    let job = Job::new();
    job.run(3, 3, |rank, environment| {
        let manager = open(environment, options()).unwrap();
        let mut tree = Tree::new();
        let root = tree.push_container(None, None, ContainerKind::Dict);
        tree.push_leaf(Some(root), key("w"));
        tree.push_leaf(Some(root), key("n"));
        let w = LeafSource::whole(Dtype::Uint8, vec![300_000], Arc::new(Filled(rank as u8 + 7))).of_first();
        let leaves = vec![w, LeafSource::Drifting(Value::Int(i64::from(rank)))];
        committed(&manager.save(SaveRequest::new(1, StateSource { tree, leaves })).unwrap());
        manager.close(None).unwrap();
    });
    assert!(job.restored(1)[0].1.iter().all(|&byte| byte == 7), "not stitched from several ranks");
}

/// As many of one byte as are asked for.
struct Filled(u8);

impl StateProvider for Filled {
    fn capture(&self, fills: &[Fill<'_>], slot: &mut Slot<Filling>) -> stepwell_core::Result<Ticket> {
        for fill in fills {
            slot.part(fill.at, fill.len)?.fill(self.0);
        }
        Ok(Ticket::Done)
    }

    fn peek(&self, _: &Region, _: u64, into: &mut [u8]) -> stepwell_core::Result<bool> {
        into.fill(self.0);
        Ok(true)
    }
}
