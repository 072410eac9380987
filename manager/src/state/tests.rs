use stepwell_core::provider::Fill;
use stepwell_core::region::Region;
use stepwell_core::staging::{Filling, Slot};

use super::*;

/// One process.
const ALONE: Writing<'static> =
    Writing { rank: 0, world_size: 1, nodes: &[0], limit: None, compares: false, census: None };

struct Nothing;

impl StateProvider for Nothing {
    fn capture(&self, _: &[Fill<'_>], _: &mut Slot<Filling>) -> stepwell_core::Result<()> {
        Ok(())
    }
}

/// It reads slabs of 16 MiB.
struct ReadsSlabs;

impl StateProvider for ReadsSlabs {
    fn capture(&self, _: &[Fill<'_>], _: &mut Slot<Filling>) -> stepwell_core::Result<()> {
        Ok(())
    }

    fn slab_bytes(&self) -> Option<u64> {
        Some(16 << 20)
    }
}

fn tensor() -> LeafSource {
    LeafSource::whole(Dtype::Uint8, vec![4], Arc::new(Nothing))
}

#[expect(clippy::unnecessary_wraps, reason = "what a tree takes")]
fn key(name: impl Into<String>) -> Option<Component> {
    Some(Component::Key(name.into().into()))
}

fn names(items: &StateItems) -> Vec<String> {
    items.drafts.iter().map(|item| item.name.clone()).collect()
}

/// `{"a": {"x"}, "one", "b": {"y"}, "two"}` with these sources in leaf order.
fn state(leaves: Vec<LeafSource>) -> StateSource {
    let mut tree = Tree::new();
    tree.push_container(None, None, ContainerKind::Dict);
    let a = tree.push_container(Some(0), key("a"), ContainerKind::Dict);
    tree.push_leaf(Some(a), key("x"));
    tree.push_leaf(Some(0), key("one"));
    let b = tree.push_container(Some(0), key("b"), ContainerKind::List);
    tree.push_leaf(Some(b), Some(Component::Index(0)));
    tree.push_leaf(Some(0), key("two"));
    StateSource { tree, leaves }
}

#[test]
fn containers_are_items_and_loose_leaves_share_one() {
    let items =
        items(&state(vec![tensor(), tensor(), tensor(), tensor()]), &subchunk::SubchunkOptions::HOST, &ALONE)
            .unwrap();
    assert_eq!(names(&items), ["a", ".", "b"]);
    let positions: Vec<Vec<u64>> =
        items.drafts.iter().map(|item| item.top_level.iter().map(|entry| entry.position).collect()).collect();
    assert_eq!(positions, [vec![0], vec![1, 3], vec![2]]);
    let paths: Vec<String> = (0..2).map(|leaf| items.plans[1].tree.leaf_path(leaf).to_string()).collect();
    assert_eq!(paths, ["one", "two"]);
    assert_eq!(items.plans[2].tree.leaf_path(0).to_string(), "b[0]");
}

#[test]
fn a_tie_is_stored_once_per_item() {
    let leaves = vec![tensor(), tensor(), LeafSource::Alias(0), LeafSource::Alias(1)];
    let items = items(&state(leaves), &subchunk::SubchunkOptions::HOST, &ALONE).unwrap();
    assert!(matches!(items.plans[1].leaves[1], LeafPlan::Alias { of: 0 }));
    assert!(matches!(items.plans[2].leaves[0], LeafPlan::Tensor { .. }));
    assert_eq!(items.tensor_bytes, 12);
}

#[test]
fn chunks_of_a_slab_follow_each_other() {
    let chunks = |provider: Arc<dyn StateProvider>| {
        let mut tree = Tree::new();
        tree.push_leaf(None, None);
        let leaves = vec![LeafSource::whole(Dtype::Uint8, vec![8192, 8192], provider)];
        let items = items(&StateSource { tree, leaves }, &subchunk::SubchunkOptions::HOST, &ALONE).unwrap();
        let LeafPlan::Tensor { chunks, .. } = &items.plans[0].leaves[0] else { panic!("a tensor") };
        let chunks =
            chunks.iter().map(|chunk| (chunk.band, chunk.local.offset[0] / 2048, chunk.local.clone()));
        chunks.collect::<Vec<_>>()
    };
    let bands =
        |chunks: &[(u32, u64, Region)]| chunks.iter().map(|&(band, ..)| band).collect::<BTreeSet<_>>().len();
    assert_eq!(bands(&chunks(Arc::new(Nothing))), 8);
    let found = chunks(Arc::new(ReadsSlabs));
    assert_eq!(bands(&found), 1);
    assert!(found.is_sorted_by_key(|&(_, slab, _)| slab));
    assert_eq!(found[0].2.extent[..], [512, 4096]);
}

#[test]
fn many_containers_or_other_keys_make_one_item() {
    for (count, integer, expected) in [(64, false, 64), (65, false, 1), (2, true, 1)] {
        let mut tree = Tree::new();
        tree.push_container(None, None, ContainerKind::Dict);
        for at in 0..count {
            let component = if integer { Some(Component::Int(at)) } else { key(format!("k{at}")) };
            let parent = tree.push_container(Some(0), component, ContainerKind::Dict);
            tree.push_leaf(Some(parent), key("w"));
        }
        let leaves = (0..count).map(|_| tensor()).collect();
        let items = items(&StateSource { tree, leaves }, &subchunk::SubchunkOptions::HOST, &ALONE).unwrap();
        assert_eq!(items.drafts.len(), expected, "{count} {integer}");
    }
}

#[test]
fn a_state_that_is_one_leaf_or_an_empty_container_is_one_item() {
    let mut tree = Tree::new();
    tree.push_leaf(None, None);
    let one = items(&StateSource { tree, leaves: vec![tensor()] }, &subchunk::SubchunkOptions::HOST, &ALONE)
        .unwrap();
    assert_eq!(names(&one), ["."]);
    assert_eq!(one.plans[0].leaves.len(), 1);
    let mut tree = Tree::new();
    tree.push_container(None, None, ContainerKind::Dict);
    let empty =
        items(&StateSource { tree, leaves: vec![] }, &subchunk::SubchunkOptions::HOST, &ALONE).unwrap();
    assert_eq!(names(&empty), ["."]);
}

#[test]
fn colliding_entries_and_bad_ties_are_refused_by_path() {
    let mut tree = Tree::new();
    tree.push_container(None, None, ContainerKind::Dict);
    tree.push_leaf(Some(0), key("x"));
    tree.push_leaf(Some(0), key("x"));
    let error = items(
        &StateSource { tree, leaves: vec![tensor(), tensor()] },
        &subchunk::SubchunkOptions::HOST,
        &ALONE,
    )
    .err()
    .unwrap();
    assert_eq!(error.kind(), "unsupported_leaf");
    assert!(error.to_string().contains("`x`"), "{error}");
    let leaves = vec![tensor(), LeafSource::Alias(2), LeafSource::Alias(1), tensor()];
    assert!(items(&state(leaves), &subchunk::SubchunkOptions::HOST, &ALONE).is_err());
}

#[test]
fn one_process_is_told_of_a_hole_in_what_it_holds() {
    let of = |regions: &[Region]| {
        let part = |region: &Region| Part { region: region.clone(), holders: Holders::This };
        let source = LeafSource::Tensor {
            dtype: Dtype::Int16,
            shape: vec![4, 6],
            parts: regions.iter().map(part).collect(),
            provider: Arc::new(Nothing),
        };
        items(&state(vec![tensor(), tensor(), source, tensor()]), &subchunk::SubchunkOptions::HOST, &ALONE)
    };
    let region = |offset: [u64; 2], extent: [u64; 2]| Region {
        offset: offset.as_slice().into(),
        extent: extent.as_slice().into(),
    };
    let whole = of(&[Region::whole(&[4, 6])]).unwrap();
    let LeafPlan::Tensor { chunks, .. } = &whole.plans[2].leaves[0] else { panic!("it is a tensor") };
    assert_eq!(chunks.len(), 1);
    assert_eq!(chunks[0].local, Region::whole(&[4, 6]));
    let (upper, lower) = (region([0, 0], [2, 6]), region([2, 0], [2, 6]));
    assert!(of(&[upper.clone(), lower.clone()]).is_ok());
    for (regions, why) in [
        (vec![upper.clone()], "no chunk holds [2:4, 0:6]"),
        (vec![lower.clone(), lower.clone(), upper], "both hold [2:4, 0:6]"),
        (vec![lower, region([0, 0], [2, 7])], "does not lie in the tensor"),
        (vec![], "no chunk holds [0:4, 0:6]"),
    ] {
        let error = of(&regions).err().unwrap();
        assert_eq!(error.kind(), "unsupported_leaf", "{regions:?}");
        assert!(error.to_string().contains("`b[0]`") && error.to_string().contains(why), "{error}");
    }
}

#[test]
fn a_shape_that_is_larger_than_any_memory_is_refused_by_path() {
    let vast = LeafSource::whole(Dtype::Int16, vec![u64::MAX; 3], Arc::new(Nothing));
    let error =
        items(&state(vec![tensor(), vast, tensor(), tensor()]), &subchunk::SubchunkOptions::HOST, &ALONE)
            .err()
            .unwrap();
    assert_eq!(error.kind(), "unsupported_leaf");
    assert!(error.to_string().contains("`one`"), "{error}");
}

#[test]
fn too_many_chunks_are_refused_by_path() {
    let one = subchunk::SubchunkOptions { target_bytes: 1, min_row_bytes: 1, min_band_row_bytes: 1 };
    let whole = |shape: &[u64]| LeafSource::whole(Dtype::Uint8, shape.into(), Arc::new(Nothing));
    for (first, second, path) in [
        (whole(&[1 << 50]), tensor(), "`one`"),
        (tensor(), whole(&[1 << 21, 1 << 21]), "`two`"),
        // By neither alone.
        (whole(&[10]), whole(&[MAX_CHUNKS - 5]), "`two`"),
    ] {
        let error = items(&state(vec![tensor(), first, tensor(), second]), &one, &ALONE).err().unwrap();
        assert_eq!(error.kind(), "unsupported_leaf");
        let text = error.to_string();
        assert!(text.contains(path) && text.contains("larger Options.chunk_bytes"), "{text}");
    }
}

#[test]
fn the_plan_hash_tells_structures_apart_and_not_values() {
    let hash = |leaves| items(&state(leaves), &subchunk::SubchunkOptions::HOST, &ALONE).unwrap().plan_hash;
    let base = hash(vec![tensor(), tensor(), tensor(), LeafSource::Object(Value::Int(1))]);
    assert_eq!(base, hash(vec![tensor(), tensor(), tensor(), LeafSource::Object(Value::Int(2))]));
    assert_ne!(base, hash(vec![tensor(), tensor(), tensor(), tensor()]));
    assert_ne!(base, hash(vec![tensor(), tensor(), LeafSource::Alias(0), LeafSource::Object(Value::Int(1))]));
    assert_eq!(base.len(), 32);
}

/// One node of every kind that there is, with one leaf of every sort.
fn every_kind() -> StateSource {
    let mut tree = Tree::new();
    let root = tree.push_container(None, None, ContainerKind::Dict);
    let name = |name: &str| Box::from(name);
    let stateful = |inner| ContainerKind::Stateful {
        type_name: name("torch.optim.Adam"),
        protocol: name("state_dict"),
        inner: Box::new(inner),
    };
    let kinds = [
        ContainerKind::OrderedDict,
        ContainerKind::DefaultDict,
        ContainerKind::List,
        ContainerKind::Tuple,
        ContainerKind::Deque { maxlen: None },
        ContainerKind::Deque { maxlen: Some(3) },
        ContainerKind::NamedTuple { type_name: name("run.Pair") },
        ContainerKind::Dataclass { type_name: name("run.Config") },
        ContainerKind::Custom { type_name: name("run.Node") },
        stateful(ContainerKind::Dict),
        stateful(ContainerKind::Deque { maxlen: Some(3) }),
    ];
    let mut leaves = Vec::new();
    for (number, kind) in kinds.into_iter().enumerate() {
        let parent = tree.push_container(Some(root), key(format!("k{number}")), kind);
        let components = [
            Component::Key("3".into()),
            Component::Field("3".into()),
            Component::Int(3),
            Component::Index(3),
        ];
        for component in components {
            tree.push_leaf(Some(parent), Some(component));
            leaves.push(match leaves.len() % 3 {
                0 => LeafSource::whole(Dtype::Float32, vec![2, 3], Arc::new(Nothing)),
                1 => LeafSource::Object(Value::Int(1)),
                _ => LeafSource::Alias(0),
            });
        }
    }
    StateSource { tree, leaves }
}

#[test]
fn the_plan_hash_of_every_kind_is_the_same_in_every_build() {
    // Other ranks may run another build, and manifests keep it: it changes with the structure of a
    // state and with nothing else.
    assert_eq!(plan_hash(&every_kind()), "79983400ca2825c69bfa936edba04ece");
}

#[test]
fn each_kind_and_component_has_its_own_plan_hash() {
    let name = |name: &str| Box::from(name);
    let one = |component: Component, kind: ContainerKind| {
        let mut tree = Tree::new();
        tree.push_container(None, None, ContainerKind::Dict);
        tree.push_container(Some(0), Some(component), kind);
        plan_hash(&StateSource { tree, leaves: vec![] })
    };
    let stateful =
        |inner| ContainerKind::Stateful { type_name: name("a"), protocol: name("b"), inner: Box::new(inner) };
    let kinds = [
        ContainerKind::Dict,
        ContainerKind::Deque { maxlen: None },
        ContainerKind::Deque { maxlen: Some(0) },
        ContainerKind::NamedTuple { type_name: name("a") },
        ContainerKind::Dataclass { type_name: name("a") },
        ContainerKind::Dataclass { type_name: name("b") },
        stateful(ContainerKind::Dict),
        stateful(ContainerKind::List),
    ];
    let components =
        [Component::Key("3".into()), Component::Field("3".into()), Component::Int(3), Component::Index(3)];
    let mut hashes = BTreeSet::new();
    for kind in &kinds {
        for component in &components {
            hashes.insert(one(component.clone(), kind.clone()));
        }
    }
    assert_eq!(hashes.len(), kinds.len() * components.len());
}
