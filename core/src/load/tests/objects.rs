//! Object leaves return with their values, and their damage is named.

use super::super::testing::{FILE, MemoryDisk, TestItem, data_file, extent, options, tree};
use super::super::{FileSet, read_objects};
use crate::Error;
use crate::format::index::{Index, LeafRecord};
use crate::format::object;
use crate::value::Value;

fn values() -> Vec<Value> {
    vec![
        Value::None,
        Value::Int(-7),
        Value::Str("a string, longer than others".repeat(400)),
        Value::List(vec![Value::Bool(true), Value::Float(f64::INFINITY), Value::Bytes(vec![0; 5000])]),
    ]
}

fn item() -> TestItem {
    let mut data = Vec::new();
    let mut leaves = Vec::new();
    for value in values() {
        let encoded = object::encode(&value).unwrap();
        leaves.push(LeafRecord::Object(extent(0, 4096 + data.len() as u64, encoded.len() as u64)));
        data.extend(encoded);
        data.resize(data.len().next_multiple_of(64), 0);
    }
    leaves.push(LeafRecord::Alias { of: 1 });
    let names: Vec<String> = (0..leaves.len()).map(|i| format!("o{i}")).collect();
    let mut index = Index { tree: tree(&names), leaves, files: Vec::new() };
    let (bytes, record) = data_file(7, 4096, &data, &index);
    index.files.push(record);
    let disk = MemoryDisk::new();
    disk.put(FILE, bytes);
    TestItem { disk, index, block: 4096 }
}

fn read(item: &TestItem, leaves: &[u32]) -> crate::Result<Vec<Value>> {
    read_objects(&item.disk, &item.files(), &item.index, leaves, &options())
}

#[test]
fn objects_come_back_in_the_order_asked_for_ties_included() {
    let item = item();
    let v = values();
    let found = read(&item, &[3, 4, 0, 1, 2, 1]).unwrap();
    let expected = [&v[3], &v[1], &v[0], &v[1], &v[2], &v[1]];
    assert!(found.iter().eq(expected));
    assert_eq!(read(&item, &[]).unwrap(), vec![]);
}

#[test]
fn a_damaged_object_is_named() {
    let item = item();
    let at = item.extent(3).offset + item.extent(3).length - 1;
    item.disk.change(FILE, |bytes| bytes[at as usize] ^= 4);
    let Error::Corrupt { leaf, block, .. } = read(&item, &[3]).unwrap_err() else { panic!() };
    assert_eq!((leaf.as_deref(), block), (Some("o3"), Some(at / 4096)));
    assert_eq!(read(&item, &[0]).unwrap(), vec![Value::None]);
}

#[test]
fn bytes_that_are_no_object_are_damage_of_their_leaf() {
    let mut item = item();
    let LeafRecord::Object(extent) = &mut item.index.leaves[2] else { panic!() };
    extent.length -= 1;
    let Error::Corrupt { leaf, what, .. } = read(&item, &[2]).unwrap_err() else { panic!() };
    assert_eq!(leaf.as_deref(), Some("o2"));
    assert!(what.contains("does not decode"), "{what}");
}

#[test]
fn what_an_index_claims_is_checked_before_memory_is_taken() {
    let mut item = item();
    let kind = |item: &TestItem| read(item, &[0]).unwrap_err().kind();
    item.index.leaves[0] = LeafRecord::Object(extent(0, 4096, 1 << 60));
    assert_eq!(kind(&item), "format");
    item.index.leaves[0] = LeafRecord::Object(extent(0, u64::MAX, 1 << 20));
    assert_eq!(kind(&item), "corrupt_checkpoint");
    item.index.leaves[0] = LeafRecord::Object(extent(0, 4096, 1 << 29));
    assert_eq!(kind(&item), "corrupt_checkpoint");
    item.index.leaves[0] = LeafRecord::Object(extent(9, 4096, 1));
    assert_eq!(kind(&item), "corrupt_checkpoint");
    item.index.leaves[0] = super::super::testing::bytes_tensor(extent(0, 4096, 1));
    assert_eq!(kind(&item), "unsupported_leaf");
    assert_eq!(read(&item, &[99]).unwrap_err().kind(), "unsupported_leaf");
    item.index.leaves[1] = LeafRecord::Alias { of: 4 };
    assert_eq!(read(&item, &[4]).unwrap_err().kind(), "unsupported_leaf");
    assert!(FileSet::new(item.disk.dir(), &[]).is_empty());
}

#[test]
fn objects_that_share_bytes_take_bounded_memory() {
    let mut item = item();
    let long = item.index.leaves[2].clone();
    item.index.leaves = vec![long; 40];
    item.index.tree = tree(&(0..40).map(|i| format!("o{i}")).collect::<Vec<_>>());
    let leaves: Vec<u32> = (0..40).collect();
    let Error::Corrupt { leaf, what, .. } = read(&item, &leaves).unwrap_err() else { panic!() };
    assert!(leaf.is_some() && what.contains("claim"), "{leaf:?}: {what}");
    assert_eq!(read(&item, &[0, 0, 0]).unwrap().len(), 3);
}
