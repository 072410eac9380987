//! Errors of a plan are found before anything is written.

use super::*;
use crate::Error;
use crate::value::Value;

fn refused(items: Vec<ItemPlan>, options: SaveOptions) -> Error {
    prepare(items, &pool(2, 2 * BLOCK), options).map(|_| ()).expect_err("it was accepted")
}

fn leaf_error(leaf: LeafPlan) -> String {
    let error = refused(vec![item("i0", vec![LeafPlan::Object(Value::None), leaf])], options(1));
    assert!(matches!(&error, Error::Leaf { leaf, .. } if leaf == "a[1]"), "{error}");
    error.to_string()
}

fn with(change: impl FnOnce(&mut Dtype, &mut Vec<u64>, &mut Vec<ChunkPlan>)) -> LeafPlan {
    let LeafPlan::Tensor { mut dtype, mut shape, mut chunks, provider } = bytes_leaf(&[0; 64]) else {
        unreachable!()
    };
    change(&mut dtype, &mut shape, &mut chunks);
    LeafPlan::Tensor { dtype, shape, chunks, provider }
}

#[test]
fn wrong_tensors_are_refused_by_path() {
    assert!(leaf_error(with(|_, shape, _| shape[0] = 63)).contains("not inside the shape"));
    assert!(leaf_error(with(|_, shape, _| *shape = vec![u64::MAX, 2])).contains("does not fit 64 bits"));
    assert!(leaf_error(with(|dtype, _, _| *dtype = Dtype::Float32)).contains("1 bytes in memory, 4"));
    assert!(
        leaf_error(with(|_, _, chunks| chunks[0].local.extent[0] = 32))
            .contains("different numbers of elements")
    );
    assert!(
        leaf_error(with(|_, _, chunks| chunks[0].local.offset[0] = 1)).contains("passes the end of an array")
    );
    let run = ChunkRegion::Run { start: u64::MAX, len: 64 };
    assert!(leaf_error(with(|_, _, chunks| chunks[0].region = run)).contains("not inside the shape"));
    assert!(leaf_error(LeafPlan::Alias { of: 1 }).contains("tied"));
    assert!(leaf_error(LeafPlan::Alias { of: 7 }).contains("tied"));
    assert!(leaf_error(with(|_, shape, _| *shape = vec![1; 65])).contains("65 dimensions"));
}

#[test]
fn wrong_options_and_items_are_refused() {
    let one = || vec![item("i0", vec![])];
    let misuse = |items, options| assert!(matches!(refused(items, options), Error::Misuse(_)));
    let internal = |items, options| assert!(matches!(refused(items, options), Error::Internal { .. }));
    internal(one(), options(2));
    misuse(one(), SaveOptions { block_bytes: 4095, ..options(1) });
    misuse(one(), SaveOptions { block_bytes: 6000, ..options(1) });
    misuse(one(), SaveOptions { block_bytes: 0, ..options(1) });
    misuse(one(), SaveOptions { block_bytes: 4 * BLOCK as u64, ..options(1) });
    internal(vec![item("..", vec![])], options(1));
    internal(vec![item("a/b", vec![])], options(1));
    internal(vec![item("i0", vec![]), item("i0", vec![])], options(2));
    let mut short = item("i0", vec![LeafPlan::Object(Value::None)]);
    short.leaves.clear();
    internal(vec![short], options(1));
}

#[test]
fn what_the_footer_could_not_hold_is_refused_before_the_capture() {
    let deep = |levels: u64| {
        let mut tree = Tree::new();
        let mut node = tree.push_container(None, None, ContainerKind::Dict);
        for _ in 1..levels {
            node = tree.push_container(Some(node), Some(Component::Key("d".into())), ContainerKind::Dict);
        }
        tree.push_leaf(Some(node), Some(Component::Key("w".into())));
        ItemPlan { dir: "i0".into(), tree, leaves: vec![LeafPlan::Object(Value::None)] }
    };
    let ring = pool(2, 2 * BLOCK);
    prepare(vec![deep(crate::limits::MAX_DEPTH)], &ring, options(1)).map(drop).unwrap();
    let error = refused(vec![deep(crate::limits::MAX_DEPTH + 1)], options(1));
    assert!(matches!(&error, Error::Limit { what, .. } if what.contains("nesting")), "{error}");
    let mut tree = Tree::new();
    let root = tree.push_container(None, None, ContainerKind::Dict);
    let long = "k".repeat(crate::limits::MAX_NAME_BYTES as usize + 1);
    tree.push_leaf(Some(root), Some(Component::Key(long.into())));
    let item = ItemPlan { dir: "i0".into(), tree, leaves: vec![LeafPlan::Object(Value::None)] };
    let error = refused(vec![item], options(1));
    assert!(matches!(&error, Error::Limit { what, .. } if what.contains("name")), "{error}");
}
