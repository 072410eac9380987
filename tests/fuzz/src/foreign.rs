//! The parsers of other libraries' bytes.

use stepwell_core::foreign::{Parsed, msgpack, npy, ocdbt, pickle, safetensors, zip};
use stepwell_core::format::checksum::crc32c;

/// A stream: no panic; nodes name nodes that exist; what follows the pickle changes nothing.
pub fn pickle(input: &[u8]) {
    let Ok(parsed) = pickle::parse(input) else { return };
    assert!(parsed.length <= input.len());
    let count = parsed.nodes.len() as u32;
    let check = |ids: &[u32]| assert!(ids.iter().all(|&id| id < count), "a node that does not exist");
    check(&[parsed.root]);
    for node in &parsed.nodes {
        match node {
            pickle::PickleNode::Long(span)
            | pickle::PickleNode::Str(span)
            | pickle::PickleNode::Bytes(span)
            | pickle::PickleNode::ByteArray(span) => assert!(input.get(span.range()).is_some()),
            pickle::PickleNode::List(ids) | pickle::PickleNode::Set(ids) => check(ids),
            pickle::PickleNode::Tuple(ids) | pickle::PickleNode::FrozenSet(ids) => check(ids),
            pickle::PickleNode::Dict(pairs) => pairs.iter().for_each(|&(key, value)| check(&[key, value])),
            pickle::PickleNode::Persistent(id) => check(&[*id]),
            pickle::PickleNode::Call(call) => {
                check(&[call.callable, call.args]);
                check(&call.items);
                call.entries.iter().for_each(|&(key, value)| check(&[key, value]));
                call.state.into_iter().chain(call.keywords).for_each(|id| check(&[id]));
            }
            _ => {}
        }
    }
    let again = pickle::parse(&input[..parsed.length]).expect("a pickle ends where it says");
    assert_eq!((again.nodes.len(), again.length), (parsed.nodes.len(), parsed.length));
}

/// An archive: no panic; members are inside it and do not overlap, also those that are found
/// without its directory.
pub fn zip(input: &[u8]) {
    let length = input.len() as u64;
    let mut end = 0;
    for (member, content) in zip::first_members(input) {
        assert!(end <= member.header && member.header < content);
        end = content.saturating_add(member.length);
        assert!(end <= length || member.length == zip::OPEN_LENGTH);
    }
    let Ok(directory) = zip::directory(input, length) else { return };
    assert!(directory.offset + directory.length <= length);
    let listed = &input[directory.offset as usize..][..directory.length as usize];
    let Ok(members) = zip::members(listed, &directory) else { return };
    for member in &members {
        assert!(member.header + zip::local_header_bytes(member) + member.stored_length <= directory.offset);
    }
    let header = |member: &zip::ZipMember| &input[member.header as usize..];
    let headers: Vec<(usize, &[u8])> = members.iter().map(header).enumerate().collect();
    let Ok(contents) = zip::contents(&headers, &members, &directory) else { return };
    let mut places: Vec<_> = members.iter().zip(contents).collect();
    places.sort_by_key(|(member, _)| member.header);
    let mut end = 0;
    for (member, content) in places {
        assert!(end <= member.header && member.header < content);
        end = content + member.stored_length;
    }
    assert!(end <= directory.offset);
}

/// A header: no panic; tensors fill the file and do not overlap.
pub fn safetensors(input: &[u8]) {
    let Some((start, rest)) = input.split_first_chunk() else { return };
    let file_length = input.len() as u64 + u64::from(rest.first().copied().unwrap_or_default());
    let Ok(length) = safetensors::header_length(*start, file_length) else { return };
    let Some(header) = rest.get(..length as usize) else { return };
    let Ok(parsed) = safetensors::parse(header, file_length) else { return };
    let mut at = safetensors::LENGTH_BYTES + length;
    for tensor in parsed.tensors {
        assert_eq!(tensor.offset, at);
        at += tensor.length;
    }
    assert_eq!(at, file_length);
}

/// An array: no panic; the header lies inside it, and nothing behind the header changes it.
pub fn npy(input: &[u8]) {
    let Ok(header) = npy::parse(input) else { return };
    let text = &input[..header.length as usize];
    assert_eq!(npy::header_length(&text[..npy::START_BYTES as usize]), Ok(header.length));
    assert_eq!(npy::parse(text), Ok(header));
}

/// A value: no panic; places lie inside it and do not overlap; every container has its parts; what
/// a skipped payload holds changes nothing.
pub fn msgpack(input: &[u8]) {
    let Ok(nodes) = msgpack::parse(input, &[1, 2, 3]) else { return };
    let (mut left, mut at) = (1_u64, 0);
    let mut blanked = input.to_vec();
    for node in &nodes {
        left -= 1;
        match node {
            msgpack::MsgpackNode::Array(count) => left += u64::from(*count),
            msgpack::MsgpackNode::Map(count) => left += 2 * u64::from(*count),
            msgpack::MsgpackNode::Ext { place, nested: true, .. } => {
                left += 1;
                assert!(place.offset > at && place.offset + u64::from(place.length) <= input.len() as u64);
            }
            msgpack::MsgpackNode::Bin(place) | msgpack::MsgpackNode::Ext { place, .. } => {
                assert!(place.offset > at);
                at = place.offset + u64::from(place.length);
                blanked[place.offset as usize..at as usize].fill(0xc1);
            }
            _ => {}
        }
    }
    assert_eq!(left, 0);
    // A NaN is not equal to itself.
    let shown = |nodes: Parsed<Vec<msgpack::MsgpackNode>>| format!("{nodes:?}");
    assert_eq!(shown(msgpack::parse(&blanked, &[1, 2, 3])), shown(Ok(nodes)));
}

/// A node or a manifest of an OCDBT database, without its frame: no panic; no more keys than bytes.
pub fn ocdbt(input: &[u8]) {
    let framed = |magic: u32| {
        let length = (input.len() + 18) as u64;
        let framed = [&magic.to_be_bytes()[..], &length.to_le_bytes(), &[0, 0], input].concat();
        [framed.as_slice(), &crc32c(&framed).to_le_bytes()].concat()
    };
    let _ = ocdbt::manifest(&framed(0x0cdb_3a2a));
    let node = framed(0x0cdb_20de);
    for height in [0, input.first().copied().unwrap_or(1)] {
        let count = match ocdbt::node(&node, "base/", height, &mut (64 << 20)) {
            Ok(ocdbt::OcdbtNode::Leaf(entries)) => entries.len(),
            Ok(ocdbt::OcdbtNode::Interior(children)) => children.len(),
            Err(_) => 0,
        };
        assert!(count <= input.len());
    }
}
