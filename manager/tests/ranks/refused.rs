//! Ranks whose states or options do not fit together are told which, before anything is there.

use std::sync::Arc;

use stepwell_core::dtype::Dtype;
use stepwell_core::tree::{ContainerKind, Tree};
use stepwell_core::value::Value;
use stepwell_manager::state::Holders;
use stepwell_manager::{LeafSource, Options, SaveRequest, StateSource};

use crate::common;
use crate::job::{Filled, Job, committed, failure, key, one_leaf, open, options, part, tensor};

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
fn layouts_that_do_not_fit_are_refused_with_regions() {
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
        (twice, ["ranks 0 and 1 both hold [0:8, 0:4]", "none declares that the other one writes it"]),
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
fn differences_between_and_within_nodes_are_found() {
    for (odd, named) in [
        (vec![1], "its values differ between ranks 0 and 1"),
        (vec![3], "its values differ between ranks 0 and 3"),
        (vec![2, 3], "its values differ between ranks 0 and 2"),
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
fn what_differs_on_one_node_is_found_whoever_writes_it() {
    // Items of one object each: of most of them a node writes nothing.
    const ITEMS: usize = 6;
    let state = |odd: Option<usize>| {
        let mut tree = Tree::new();
        let root = tree.push_container(None, None, ContainerKind::Dict);
        let mut leaves = Vec::new();
        for number in 0..ITEMS {
            let item = tree.push_container(Some(root), key(&format!("item{number}")), ContainerKind::Dict);
            tree.push_leaf(Some(item), key("n"));
            leaves.push(LeafSource::Object(Value::Int(if odd == Some(number) { 9 } else { 1 })));
        }
        StateSource { tree, leaves }
    };
    for (ranks, per_node) in [(4, 2), (5, 3), (6, 2), (4, 4)] {
        let job = Job::new();
        job.run(ranks, per_node, |rank, environment| {
            let manager = open(environment, options()).unwrap();
            committed(&manager.save(SaveRequest::new(0, state(None))).unwrap());
            let mut step = 0;
            for odd in 0..ranks {
                for number in 0..ITEMS {
                    step += 1;
                    let mine = state((rank == odd).then_some(number));
                    let error = failure(&manager.save(SaveRequest::new(step, mine)).unwrap());
                    let text = error.to_string();
                    assert_eq!(error.kind(), "mismatch", "{text}");
                    let is_named = text.contains(&format!("`item{number}/n`"))
                        && [format!("ranks {odd} and "), format!(" and {odd};")]
                            .iter()
                            .any(|rank| text.contains(rank))
                        && text.contains("values differ");
                    assert!(is_named, "{ranks} ranks, {per_node} on a node, rank {odd}: {text}");
                }
            }
            committed(&manager.save(SaveRequest::new(step + 1, state(None))).unwrap());
            manager.close(None).unwrap();
        });
    }
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
fn items_written_by_few_ranks_are_checked_like_others() {
    type Leaf = fn(u32) -> Option<LeafSource>;
    // Only one rank has the item, possibly the leader.
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
        (nothing, ["no rank writes any part", "[8, 4]"]),
        (second_of_two, ["no rank writes any part", "[4, 4]"]),
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
fn the_disputed_tensor_is_named_and_no_other() {
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
fn differing_replicas_refuse_the_commit_by_leaf() {
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
            assert!(error.to_string().contains("`w`") && error.to_string().contains(" and 2;"), "{error}");
            committed(&manager.save(SaveRequest::new(3, state(false))).unwrap());
            manager.close(None).unwrap();
        });
    }
}

#[test]
fn replicas_that_have_drifted_are_refused_unless_they_may() {
    let places = |rank| Holders::Replicas { index: rank, count: 2 };
    let named = |_| Holders::Ranks([0, 1].into());
    let holders: [&(dyn Fn(u32) -> Holders + Sync); 2] = [&places, &named];
    let leaf = |value: u32, holders: Holders| {
        let parts = vec![part([0, 0], [256, 512], holders)];
        let provider = Arc::new(Filled(value as u8));
        one_leaf(LeafSource::Tensor { dtype: Dtype::Uint8, shape: vec![256, 512], parts, provider })
    };
    for holders in holders {
        for per_node in [1, 2] {
            let job = Job::new();
            job.run(2, per_node, |rank, environment| {
                let manager = open(environment, options()).unwrap();
                let error = failure(&manager.save(SaveRequest::new(1, leaf(rank, holders(rank)))).unwrap());
                let text = error.to_string();
                assert!(text.contains("its values differ between ranks 0 and 1"), "{text}");
                committed(&manager.save(SaveRequest::new(2, leaf(7, holders(rank)))).unwrap());
                manager.close(None).unwrap();
            });
        }
        let job = Job::new();
        job.run(2, 1, |rank, environment| {
            let leaf = leaf(rank, holders(rank));
            let manager = open(environment, Options { compare_replicas: false, ..options() }).unwrap();
            committed(&manager.save(SaveRequest::new(1, leaf)).unwrap());
            manager.close(None).unwrap();
        });
    }
}
